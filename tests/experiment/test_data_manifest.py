"""Data that changed since a run started or differ by host are named; trained images are found."""

import csv
import dataclasses
import json
import pathlib
import shutil
import threading

import pytest

from tests import tiny
from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.checkpoints import digests
from vit_jax.config import EvalConfig, write_config
from vit_jax.data.image_preprocessing import Resize
from vit_jax.data.loading import ImageReader
from vit_jax.data.sources.opening import make_opener
from vit_jax.distributed.processes import Job
from vit_jax.evaluation import probing
from vit_jax.evaluation.probing import FewshotConfig, ProbeSet
from vit_jax.experiment import data_manifest
from vit_jax.experiment.data_manifest import (
    SplitKey,
    SplitManifest,
    describe_differences,
    find_source_run,
    read_manifest,
)
from vit_jax.experiment.workdirs import Workdir

NAMES = [f'{i}.jpg' for i in range(60)]
LABELS = ['ant', 'bee', 'cat'] * 20
SIZES = list(range(1000, 1060))
TRAIN = SplitKey('train', 'train')
RECORD = SplitManifest(['ant', 'bee', 'cat'], NAMES, LABELS, SIZES)


def changed(index, **values):
    fields = {name: [*getattr(RECORD, name)] for name in values}
    for name, value in values.items():
        fields[name][index] = value
    return RECORD._replace(**fields)


CHANGES = {
    'none': (RECORD, []),
    'unknown sizes': (RECORD._replace(sizes=SIZES[:5]), []),
    'renamed image': (
        changed(7, names='late.jpg'),
        ["1 removed image: '7.jpg' (bee)", "1 added image: 'late.jpg' (bee)"],
    ),
    'relabeled image': (
        changed(7, labels='ant'),
        ["1 removed image: '7.jpg' (bee)", "1 added image: '7.jpg' (ant)"],
    ),
    'replaced image': (changed(7, sizes=5), ["1 replaced image: '7.jpg'"]),
    'four replaced images': (
        RECORD._replace(sizes=[1, 2, 3, 4, *SIZES[4:]]),
        ["4 replaced images: '0.jpg', '1.jpg', '2.jpg'"],
    ),
    'other classes': (
        RECORD._replace(class_names=['ant', 'cat', 'bee']),
        ["2 renumbered classes: 'cat' from 2 to 1, 'bee' from 1 to 2"],
    ),
    'renamed class': (
        RECORD._replace(class_names=['bee', 'cat', 'wasp']),
        [
            "1 removed class: 'ant'",
            "1 added class: 'wasp'",
            "2 renumbered classes: 'bee' from 1 to 0, 'cat' from 2 to 1",
        ],
    ),
    'one of two classes with the same name': (
        RECORD._replace(class_names=['ant', 'ant', 'cat']),
        ["1 removed class: 'bee'", "1 added class: 'ant'", "1 renumbered class: 'ant' from 0 to 1"],
    ),
    'image listed twice': (
        RECORD._replace(names=[*NAMES, '0.jpg'], labels=[*LABELS, 'ant'], sizes=[*SIZES, 1000]),
        ["1 added image: '0.jpg' (ant)"],
    ),
    'other order': (
        RECORD._replace(names=NAMES[::-1], labels=LABELS[::-1], sizes=SIZES[::-1]),
        ['the order of the images changed'],
    ),
    'one replaced, one added': (
        RECORD._replace(
            names=['new.jpg', *NAMES], labels=['cat', *LABELS], sizes=[1, 2, *SIZES[1:]]
        ),
        ["1 replaced image: '0.jpg'", "1 added image: 'new.jpg' (cat)"],
    ),
}


@pytest.mark.parametrize('change', CHANGES)
def test_every_kind_of_difference_is_counted_with_examples(change):
    new, lines = CHANGES[change]
    assert describe_differences(RECORD, new) == lines


@pytest.fixture
def photos(tmp_path):
    """Files of a folder, whose content nothing here decodes."""
    root = tmp_path / 'photos'
    for split, count in ('train', 8), ('test', 3):
        for name in 'cat', 'dog':
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                (root / split / name / f'{i}.jpg').write_bytes(b'x' * (10 + i))
    return root


def sources_of(data, **changes):
    config = tiny.experiment(**({'data': str(data), 'eval_split': 'test'} | changes))
    opened = make_opener(config.held_out)

    def reader(source):
        return ImageReader(source, Resize(), (8, 8), exif_rotation=False)

    train, evals = reader(opened(config.data, config.train_split)), []
    for one in config.evaluations.values():
        evals.append(reader(opened(one.data or config.data, one.split, one.labels)))
    probes = config.fewshot and probing.open_probes(config.fewshot, config.data, opened, reader)
    return data_manifest.name_sources(train, evals, probes)


def start(folder, sources, *, accept=False, job=None):
    """Starts a run and ends it, with a checkpoint."""
    folder.mkdir(exist_ok=True)
    compared = data_manifest.compare_data(Workdir(folder), sources, job or Job(), accept=accept)
    with compared as check:
        check(60.0)
    (folder / 'checkpoints' / '5').mkdir(parents=True, exist_ok=True)


def rejected(folder, sources, *texts, accept=False, acceptable=True):
    with pytest.raises(UserError, match='the data has changed') as e:
        start(folder, sources, accept=accept)
    assert ('or resume with --accept_data_changes' in str(e.value)) == acceptable
    for text in texts:
        assert text in str(e.value)


def test_images_that_change_are_rejected_by_name_or_accepted_once(photos, tmp_path, caplog):
    folder = tmp_path / 'run'
    start(folder, sources_of(photos))
    before = (folder / 'data_manifest.json.gz').read_bytes()
    start(folder, sources_of(photos))
    (photos / 'train/cat/new.jpg').write_bytes(b'new')
    (photos / 'train/dog/3.jpg').unlink()
    (photos / 'train/dog/4.jpg').write_bytes(b'of another size')
    (photos / 'test/cat/1.jpg').rename(photos / 'test/dog/7.jpg')
    lines = (
        "train: 1 replaced image: 'train/dog/4.jpg'; 1 removed image: 'train/dog/3.jpg' (dog); "
        "1 added image: 'train/cat/new.jpg' (cat)",
        "test: 1 removed image: 'test/cat/1.jpg' (cat); 1 added image: 'test/dog/7.jpg' (dog)",
    )
    rejected(folder, sources_of(photos), *lines)
    assert (folder / 'data_manifest.json.gz').read_bytes() == before and not caplog.text
    start(folder, sources_of(photos), accept=True)
    assert all(line in caplog.text for line in lines)
    caplog.clear()
    start(folder, sources_of(photos))
    assert not caplog.text


def write_table(path, rows):
    with path.open('w', newline='') as file:
        writer = csv.writer(file)
        writer.writerow(['path', 'label', 'split'])
        writer.writerows(rows)


@pytest.mark.parametrize('split', ['train', 'test', 'validation', 'rest'])
def test_repeated_and_reordered_images_of_every_split_are_noticed(tmp_path, split):
    """Split `validation` is evaluated next to `test`, and `rest` by the few-shot evaluation."""
    splits = 'train', 'test', 'validation', 'rest'
    rows = [(f'{s}{i}.jpg', 'ab'[i % 2], s) for s in splits for i in range(4)]
    for path, _, _ in rows:
        (tmp_path / path).write_bytes(b'x')
    sets = {'own': ProbeSet(train_split='rest', test_split='test')}
    fewshot = FewshotConfig(sets=sets, shots=(1,))
    evals = {'test': EvalConfig(split='test'), 'more': EvalConfig(split='validation')}

    def sources():
        return sources_of(tmp_path / 'table.csv', evals=evals, fewshot=fewshot)

    write_table(tmp_path / 'table.csv', rows)
    start(tmp_path / 'run', sources())
    write_table(tmp_path / 'table.csv', [*rows, (f'{split}0.jpg', 'a', split)])
    rejected(tmp_path / 'run', sources(), f"{split}: 1 added image: '{split}0.jpg' (a)")
    write_table(tmp_path / 'table.csv', sorted(rows, key=lambda row: (row[2] == split, row[::-1])))
    rejected(tmp_path / 'run', sources(), f'{split}: the order of the images changed')
    write_table(tmp_path / 'table.csv', rows)
    start(tmp_path / 'run', sources())


def test_another_requested_split_is_no_change_and_a_folder_may_be_moved(photos, tmp_path):
    start(tmp_path / 'run', sources_of(photos))
    moved = photos.rename(tmp_path / 'elsewhere')
    start(tmp_path / 'run', sources_of(moved))
    start(tmp_path / 'run', sources_of(moved, train_split='train[:10]'))
    (moved / 'train/dog/3.jpg').unlink()
    rejected(tmp_path / 'run', sources_of(moved, train_split='train[:10]'), 'train[:10]: ')
    rejected(tmp_path / 'run', sources_of(moved), 'train: 1 removed')


@pytest.mark.parametrize('kept_bytes', [None, 0, 10, 200])
def test_a_missing_or_damaged_record_is_warned_of_and_written_again(
    photos, tmp_path, caplog, kept_bytes
):
    start(tmp_path, sources_of(photos))
    path = tmp_path / 'data_manifest.json.gz'
    damaged = path.read_bytes()[:kept_bytes]
    path.unlink() if kept_bytes is None else path.write_bytes(damaged)
    start(tmp_path, sources_of(photos))
    assert f'{path}: ' in caplog.text
    (photos / 'train/dog/3.jpg').unlink()
    rejected(tmp_path, sources_of(photos))


def test_another_number_of_classes_cannot_be_accepted(photos, tmp_path):
    start(tmp_path / 'run', sources_of(photos))
    for split in 'train', 'test':
        (photos / split / 'ape').mkdir()
        (photos / split / 'ape' / '0.jpg').write_bytes(b'x')
    for accept in False, True:
        line = "train: 1 added class: 'ape'"
        rejected(tmp_path / 'run', sources_of(photos), line, accept=accept, acceptable=False)


@pytest.mark.parametrize('name, acceptable', [('zebra', True), ('ape', False)])
def test_a_renamed_class_can_be_accepted_if_no_class_number_changes(
    name, acceptable, photos, tmp_path
):
    start(tmp_path / 'run', sources_of(photos))
    for split in 'train', 'test':
        (photos / split / 'dog').rename(photos / split / name)
    rejected(tmp_path / 'run', sources_of(photos), f"added class: '{name}'", acceptable=acceptable)
    if acceptable:
        start(tmp_path / 'run', sources_of(photos), accept=True)
    else:
        rejected(tmp_path / 'run', sources_of(photos), accept=True, acceptable=False)


def test_sizes_of_further_files_are_compared_in_the_background(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(data_manifest, '_MAX_SIZES', 4)
    for i in range(1100):  # they are read in blocks of 1024
        (photos / f'train/cat/more{i}.jpg').write_bytes(b'x')
    folder = tmp_path / 'run'
    start(folder, sources_of(photos))
    names = sources_of(photos)[TRAIN].read_names(range(1100))
    pathlib.Path(names[1090]).write_bytes(b'of another size')
    compared = data_manifest.compare_data(Workdir(folder), sources_of(photos), Job())
    with compared as check, pytest.raises(UserError, match=names[1090].rpartition('/')[2]):
        check(60.0)
    pathlib.Path(names[3]).write_bytes(b'of another size')
    with pytest.raises(UserError, match=names[3].rpartition('/')[2]):
        start(folder, sources_of(photos))
    start(folder, sources_of(photos), accept=True)
    start(folder, sources_of(photos))


def test_a_run_that_ends_early_keeps_the_sizes_that_are_known(photos, tmp_path, monkeypatch):
    sources, never = sources_of(photos), threading.Event()
    trained = sources[TRAIN]
    start(tmp_path, sources)
    monkeypatch.setattr(data_manifest, '_MAX_SIZES', 4)

    def size_of(index):
        if index >= 4:
            never.wait(0.05)
        return trained.size_of(index)

    slow = sources | {TRAIN: dataclasses.replace(trained, size_of=size_of)}
    with data_manifest.compare_data(Workdir(tmp_path), slow, Job()):
        pass
    kept = read_manifest(tmp_path / 'data_manifest.json.gz')
    assert len(kept[TRAIN].sizes) == 16


class TwoHosts(Job):
    """Process 0 or 1 of a job in which process 0 has come to each comparison before."""

    facts = {}

    def __init__(self, index):
        super().__init__()
        self.count, self.index = 2, index

    def require_equal(self, name, facts, describe=None):
        if self.index == 0:
            self.facts[name] = json.dumps(facts)
        elif json.loads(self.facts[name]) != facts:
            raise UserError('\n'.join(describe()))


def test_a_host_with_other_images_is_rejected_with_examples(photos, tmp_path):
    first, second = TwoHosts(0), TwoHosts(1)
    copy = shutil.copytree(photos, tmp_path / 'copy')
    start(tmp_path / 'run', sources_of(photos), job=first)
    start(tmp_path / 'run', sources_of(copy), job=second)
    (copy / 'train/dog/3.jpg').write_bytes(b'of another size')
    (copy / 'test/cat/1.jpg').unlink()
    with pytest.raises(UserError) as e:
        start(tmp_path / 'run', sources_of(copy), job=second)
    assert "'train/dog/3.jpg'" in str(e.value) and "'test/cat/1.jpg'" in str(e.value)
    with pytest.raises(UserError, match='splits'):
        start(tmp_path / 'run', sources_of(photos, eval_split='train'), job=second)


@pytest.fixture
def data(tmp_path):
    """A folder of 14 training and 6 test files, all of one size, which nothing here decodes."""
    for index in range(20):
        split, name = ('test' if index >= 14 else 'train'), ('cat', 'dog')[index % 2]
        path = tmp_path / 'photos' / split / name / f'{index}.jpg'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b'x' * 10)
    return tmp_path / 'photos'


def trained(data, folder, *, accept=False, **changes):
    """Leaves the files of a run on these data in its work directory; returns it."""
    start(folder, sources_of(data, **changes), accept=accept)
    config = tiny.experiment(**({'data': str(data), 'eval_split': 'test'} | changes))
    write_config(folder / 'config.json', records.to_dict(config))
    (folder / 'checkpoints/5' / digests.FILE).touch()
    return folder


def counted(folder, data, split):
    run = find_source_run(str(folder))
    return len(run.find_training_images(make_opener(run.held_out)(str(data), split)))


def test_trained_images_are_found_also_after_the_folder_moved(data, tmp_path):
    run = trained(data, tmp_path / 'run')
    assert (counted(run, data, 'train'), counted(run, data, 'test')) == (14, 0)
    moved = data.rename(tmp_path / 'moved')
    assert (counted(run, moved, 'train'), counted(run, moved, 'test')) == (14, 0)


def test_a_folder_of_the_data_may_be_named_alone_before_or_after(data, tmp_path):
    for path in [*data.glob('train/*/*.jpg')]:
        (data / 'test' / path.relative_to(data / 'train')).write_bytes(b'y' * 11)
    for first, then in (data, data / 'train'), (data / 'train', data):
        changes = {'train_split': 'all', 'eval_split': 'all'} if first != data else {}
        run = trained(first, tmp_path / f'run of {first.name}', **changes)
        split = 'all' if then != data else 'train'
        assert counted(run, then, split) == 14
        assert counted(run, data, 'test') == counted(run, data / 'test', 'all') == 0


def test_what_an_earlier_start_or_run_was_trained_on_stays_known(data, tmp_path):
    """The run resumes with fewer images, then without one of them; another starts from it."""
    trained(data, tmp_path / 'run')
    trained(data, tmp_path / 'run', train_split='train[:10]')
    gone = data / 'train/cat/0.jpg'
    gone.unlink()
    run = trained(data, tmp_path / 'run', accept=True)
    assert counted(run, data, 'train') == 13
    gone.write_bytes(b'x' * 10)
    assert counted(run, data, 'train') == 14
    splits = {'train_split': 'test', 'eval_split': 'train'}
    tuned = trained(data, tmp_path / 'tuned', start_from=str(run), **splits)
    assert (counted(tuned, data, 'train'), counted(tuned, data, 'test')) == (14, 6)


def test_a_record_that_lacks_sizes_is_a_gap_beside_a_whole_one(data, tmp_path, monkeypatch):
    run = trained(data, tmp_path / 'run')
    assert not find_source_run(str(run)).gaps
    splits = read_manifest(run / 'data_manifest.json.gz')
    splits = {
        TRAIN: splits[TRAIN]._replace(sizes=[10]),
        TRAIN._replace(until_step=5): splits[TRAIN],
    }
    monkeypatch.setattr(data_manifest, 'read_manifest', lambda _: splits)
    (gap,) = find_source_run(str(run)).gaps
    assert 'incomplete' in gap
