"""Images that a model was trained on are recognized where they lie now, and no others are."""

import shutil

import pytest

from tests import tiny
from tests.experiment.test_data_record import sources_of, start
from vit_jax.base import records
from vit_jax.checkpoints import digests
from vit_jax.config import write_config
from vit_jax.data.sources.opening import make_opener
from vit_jax.experiment import data_record
from vit_jax.experiment.source_run import find_source_run


@pytest.fixture
def data(tmp_path):
    """A folder of 20 files in two classes, all of one size, which nothing here decodes."""
    for index in range(20):
        write(tmp_path / 'photos', f'{("cat", "dog")[index % 2]}/{index}.jpg')
    return tmp_path / 'photos'


def write(data, *names):
    for name in names:
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(b'x' * 10)


def trained(data, folder, *, accept=False, **changes):
    """Leaves the files of a run on these data in its work directory; returns it."""
    start(folder, sources_of(data, **changes), accept=accept)
    config = tiny.experiment(**({'data': str(data), 'eval_split': 'test'} | changes))
    write_config(folder / 'config.json', records.to_dict(config))
    (folder / 'checkpoints/5' / digests.FILE).touch()
    return folder


def counted(folder, data, split):
    run = find_source_run(str(folder))
    return len(run.find_trained(make_opener(run.held_out)(str(data), split)))


def sort_into_splits(data):
    """Moves 14 images to train/ and 6 to test/."""
    for path in sorted(data.rglob('*.jpg')):
        split = 'test' if int(path.stem) >= 14 else 'train'
        write(data, f'{split}/{path.parent.name}/{path.name}')
    for name in 'cat', 'dog':
        shutil.rmtree(data / name)


def test_images_of_a_folder_that_are_sorted_into_splits_later_are_counted(data, tmp_path):
    run = trained(data, tmp_path / 'run')
    held_out = {path.rsplit('/', 1)[1] for path in names(data, 'test')}
    sort_into_splits(data)
    for split in 'train', 'test':
        old = sum(path.rsplit('/', 1)[1] not in held_out for path in names(data, split))
        assert counted(run, data, split) == old
    write(data, 'test/cat/0.jpg')  # another image with the name of one in train/
    assert counted(run, data, 'test') == old


def names(data, split):
    source = make_opener()(str(data), split)
    return source.read_names(range(len(source)))


def test_images_that_change_splits_or_leave_them_are_counted(data, tmp_path):
    sort_into_splits(data)
    run = trained(data, tmp_path / 'run')
    assert (counted(run, data, 'train'), counted(run, data, 'test')) == (14, 0)
    for name in 'cat/0.jpg', 'dog/1.jpg', 'cat/2.jpg':
        (data / 'train' / name).rename(data / 'test' / name)
    assert (counted(run, data, 'train'), counted(run, data, 'test')) == (11, 3)
    for split in 'train', 'test':
        for path in sorted((data / split).rglob('*.jpg')):
            write(data, f'{path.parent.name}/{path.name}')
        shutil.rmtree(data / split)
    assert counted(run, data, 'all') == 14


def test_a_folder_of_the_data_may_be_named_alone_before_or_after(data, tmp_path):
    sort_into_splits(data)
    for path in [*data.glob('train/*/*.jpg')]:
        (data / 'test' / path.relative_to(data / 'train')).write_bytes(b'y' * 10)
    for first, then in (data, data / 'train'), (data / 'train', data):
        changes = {'train_split': 'all', 'eval_split': 'all'} if first != data else {}
        run = trained(first, tmp_path / f'run of {first.name}', **changes)
        split = 'all' if then != data else 'train'
        assert counted(run, then, split) == 14
        assert counted(run, data, 'test') == counted(run, data / 'test', 'all') == 0


def test_what_an_earlier_start_was_trained_on_stays_known(data, tmp_path):
    """The run resumes with fewer images, then with one image moved to the evaluation."""
    sort_into_splits(data)
    trained(data, tmp_path / 'run')
    run = trained(data, tmp_path / 'run', train_split='train[:10]')
    assert counted(run, data, 'train') == 14
    (data / 'train/cat/0.jpg').rename(data / 'test/cat/0.jpg')
    run = trained(data, tmp_path / 'run', accept=True)
    assert (counted(run, data, 'train'), counted(run, data, 'test')) == (13, 1)
    run = trained(data, tmp_path / 'run', train_split='test', eval_split='train')
    assert counted(run, data, 'test') == 7


def test_a_record_that_lacks_sizes_is_a_gap_beside_a_whole_one(data, tmp_path, monkeypatch):
    run = trained(data, tmp_path / 'run')
    assert not find_source_run(str(run)).gaps
    splits = data_record.read_record(run / 'data.json.gz')
    (name,) = (name for name in splits if name.startswith(data_record.TRAINED))
    splits = {name: splits[name]._replace(sizes=[10]), f'{name} until step 5': splits[name]}
    monkeypatch.setattr('vit_jax.experiment.source_run.read_record', lambda _: splits)
    (gap,) = find_source_run(str(run)).gaps
    assert 'incomplete' in gap


def test_evaluated_images_are_not_trained_on(data, tmp_path):
    sort_into_splits(data)
    run = trained(data, tmp_path / 'run', evals={}, eval_split='test')
    assert counted(run, data, 'test') == 0
