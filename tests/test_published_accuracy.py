"""The script that measures published checkpoints, on a small one and three images."""

import csv

import cv2
import numpy as np
import pytest

import vit_jax
from docs import published_accuracy
from tests import tiny
from tests.networks import loaded
from vit_jax.data import imagenet_classes


def run(*arguments):
    published_accuracy.main(published_accuracy.make_parser().parse_args([*arguments]))


@pytest.mark.gate
def test_measured_accuracies_enter_the_table_and_the_page(tmp_path, monkeypatch):
    table, page = tmp_path / 'table.csv', tmp_path / 'page.md'
    monkeypatch.setattr(published_accuracy, 'TABLE', table)
    monkeypatch.setattr(published_accuracy, 'PAGE', page)
    monkeypatch.setattr(published_accuracy, '_NUM_IMAGES', 5)
    network = loaded(tiny.model(num_classes=1000), class_names=imagenet_classes.names())
    vit_jax.save(network, tmp_path / 'one', 'vit_jax')
    image = np.zeros((8, 8, 3), np.uint8)
    best = int(network.logits(network.preprocess(image)[None]).argmax())
    for number, count in (best, 1), ((best + 1) % 1000, 3):  # all images are equal
        folder = tmp_path / 'val' / imagenet_classes.ids()[number]
        folder.mkdir(parents=True)
        for i in range(count):
            cv2.imwrite(str(folder / f'{i}.png'), image)
    names = str(tmp_path / 'one'), str(tmp_path / 'missing')
    page.write_text('kept\n|---|---|---|\nold')
    table.write_text('name,published,source,measured,date,device\n')
    with table.open('a') as file:
        csv.writer(file).writerows([name, 12.5, 'x', '', '', ''] for name in names)
    run()
    text = page.read_text()
    assert text.startswith('kept\n') and text.count('| 12.5 % | no ImageNet here |') == 2
    run(f'--data={tmp_path}')  # an image is missing
    assert page.read_text().count('no ImageNet here') == 2
    monkeypatch.setattr(published_accuracy, '_NUM_IMAGES', 4)
    run(f'--data={tmp_path}')
    with table.open() as file:
        one, missing = csv.DictReader(file)
    assert float(one['measured']) == 25 and one['device'] == 'cpu' and missing['measured'] == ''
    assert f'| `{names[0]}` | 12.5 % | 25.000 % ({one["date"]}, cpu) |' in page.read_text()


def test_the_page_is_up_to_date():
    with published_accuracy.TABLE.open() as file:
        page = published_accuracy.page([*csv.DictReader(file)])
    assert published_accuracy.PAGE.read_text() == page
