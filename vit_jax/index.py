"""Writes an index next to data in shards: python -m vit_jax.index --data=DATA.

Without it, the first run of each user reads all shards once. DATA is a folder of tar shards or
Parquet files, or a folder that TFDS prepared in a bucket. The index is written to the folder
_vit_jax_index next to the shards. Run the program again after you replace shards.
"""

import argparse

from vit_jax.base import UserError, plural, require
from vit_jax.cli import app
from vit_jax.data.sources.indexing import INDEX_FOLDER
from vit_jax.data.sources.opening import open_stored_splits


def main(arguments: argparse.Namespace) -> int:
    """Makes and writes the index of each split."""
    splits = open_stored_splits(arguments.data, label_column=arguments.labels)
    for name in arguments.splits or splits:
        require(name in splits, f'--splits={name}: expected some of {", ".join(splits)}')
        source = splits[name]()
        if source.write_index is None:
            raise UserError(
                f'--data={arguments.data}: needs no index; expected tar shards, Parquet files, or '
                'a folder of TFDS in a bucket'
            )
        count = source.write_index()
        written = f'wrote {plural(count, "file")} to' if count else 'the index is complete in'
        print(f'{name}: {len(source):,} images; {written} {INDEX_FOLDER}')
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    parser = app.new_parser('index', __doc__)
    add = parser.add_argument
    add('--data', required=True, help='gs://BUCKET/FOLDER, s3://BUCKET/FOLDER or a folder')
    add('--splits', nargs='+', help='the splits to index; by default all')
    add('--labels', metavar='COLUMN', help='label column of TFDS data; by default as in training')
    return parser


if __name__ == '__main__':
    app.run(main, make_parser(), on_devices=False)
