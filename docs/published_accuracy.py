"""Measures the ImageNet accuracy of published checkpoints: python -m docs.published_accuracy.

    python -m docs.published_accuracy --data=IMAGENET [NAME ...]

Evaluates each NAME of published_accuracy.csv (default: all that were not measured yet) on the
validation images in IMAGENET, records accuracy, date and device in published_accuracy.csv after
each one, and writes published_accuracy.md. Without --data it only writes the page.
"""

import argparse
import csv
import datetime
import pathlib

import jax

from vit_jax import load
from vit_jax.base import UserError, require
from vit_jax.cli import app
from vit_jax.data.sources.base import Source, renumber_classes
from vit_jax.evaluation import imagenet_suite

TABLE = pathlib.Path(__file__).with_suffix('.csv')
PAGE = TABLE.with_suffix('.md')
_VAL = next(one for one in imagenet_suite.TEST_SETS if one.name == 'val')
_NUM_IMAGES = 50_000
_HEAD = '|---|---|---|\n'  # the rows after this line of the page are replaced


def main(arguments: argparse.Namespace) -> int:
    """Measures checkpoints, and writes the table and the page."""
    with TABLE.open(newline='') as file:
        rows = [*csv.DictReader(file)]
    unknown = {*arguments.names} - {row['name'] for row in rows}
    require(not unknown, f'{sorted(unknown)}: not in {TABLE}; add a row')
    require(bool(arguments.data) or not arguments.names, '--data: missing; expected a folder')
    failed = False
    if arguments.data:
        source = _VAL.open(pathlib.Path(arguments.data))
        for row in rows:
            if row['name'] in arguments.names or not (arguments.names or row['measured']):
                failed |= not measure(row, source)
                write_table(rows)
    PAGE.write_text(page(rows))
    return int(failed)


def measure(row: dict[str, str], source: Source) -> bool:
    """Writes the accuracy into the row; prints why and returns False if it cannot be measured."""
    try:
        model = load(row['name'])
        images = renumber_classes(source, imagenet_suite.get_class_names(model))
        found = imagenet_suite.evaluate(_VAL, model, images, batch_size=128)
        wrong = f'{found.num_images:,} validation images were read; expected {_NUM_IMAGES:,}'
        require(found.num_images == _NUM_IMAGES, wrong)
    except UserError as error:
        print(f'{row["name"]}: {error}')
        return False
    today, device = datetime.date.today().isoformat(), jax.devices()[0].device_kind
    row |= {'measured': f'{100 * found.metrics["accuracy"]:.3f}', 'date': today, 'device': device}
    print(f'{row["name"]}: published {row["published"] or "-"}, measured {row["measured"]}')
    return True


def write_table(rows: list[dict[str, str]]) -> None:
    """Replaces the table."""
    with TABLE.open('w', newline='') as file:
        writer = csv.DictWriter(file, rows[0], lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)


def page(rows: list[dict[str, str]]) -> str:
    """Returns the page with a line for each row."""
    lines = []
    for row in rows:
        measured = 'no ImageNet here'
        if row['measured']:
            measured = f'{row["measured"]} % ({row["date"]}, {row["device"]})'
        published = f'{row["published"]} %' if row['published'] else '-'
        lines.append(f'| `{row["name"]}` | {published} | {measured} |\n')
    return PAGE.read_text().partition(_HEAD)[0] + _HEAD + ''.join(lines)


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('names', nargs='*', metavar='NAME', help='default: all without a number')
    parser.add_argument('--data', metavar='IMAGENET', help="folder with ImageNet's own files")
    return parser


if __name__ == '__main__':
    app.run(main, make_parser())
