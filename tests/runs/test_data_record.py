"""Data that is other than when the run began, or on another host, is noticed and named."""

import dataclasses
import json
import shutil
import threading

import cv2
import numpy as np
import pytest

from tests import tiny
from tests.hosts import hosts
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.store import save_alone
from vit_jax.data.image_preprocessing import Resize
from vit_jax.data.reading import ImageReader
from vit_jax.data.sources import listing
from vit_jax.data.sources.listing import Listing
from vit_jax.data.sources.opening import make_opener
from vit_jax.parallel.processes import Job
from vit_jax.runs import data_record, training_run
from vit_jax.runs.workdirs import Workdir
from vit_jax.training.duration import Duration

CLASSES = 'ant', 'bee', 'cat'


def listed(count=180, *, classes=CLASSES, labels=None, stamps=None, names=None):
    names = [f'{i}.jpg' for i in range(count)] if names is None else names
    labels = np.arange(len(names)) % 3 if labels is None else labels
    stamps = 1000 + np.arange(len(names)) if stamps is None else stamps
    return Listing(tuple(classes), names, np.array(labels), np.array(stamps))


def but(values, index, value):
    values = list(values)
    values[index] = value
    return values


def renamed(names=None, index=7, name='late.jpg'):
    return but([f'{i}.jpg' for i in range(180)], index, name)


CHANGES = {  # one of 180 images each, and what is said of it between starts, and between hosts
    'renamed': (
        listed(names=renamed()),
        ["1 image added: 'late.jpg'", "1 image removed: '7.jpg'"],
        ["other names among 1 image here: 'late.jpg'"],
    ),
    'relabelled': (
        listed(labels=but(np.arange(180) % 3, 7, 0)),
        ["1 image relabelled: '7.jpg' from 'bee' to 'ant'"],
        ["other labels among 1 image here: '7.jpg'"],
    ),
    'replaced': (
        listed(stamps=but(1000 + np.arange(180), 7, 5)),
        ["1 image replaced: '7.jpg'"],
        ["other contents among 1 image here: '7.jpg'"],
    ),
    'added': (
        listed(181),
        ["1 image added: '180.jpg'"],
        ['180 images there, 181 here', "other names among 1 image here: '180.jpg'"],
    ),
    'removed': (
        listed(179),
        ["1 image removed: '179.jpg'"],
        ['180 images there, 179 here', 'images there that are not here'],
    ),
    'a class renamed': (
        listed(classes=('ant', 'zebra', 'cat')),
        ["class 1: 'bee' -> 'zebra'", "60 images relabelled: '1.jpg' from 'bee' to 'zebra', "],
        ["other classes; here 'ant', 'zebra', 'cat'"],
    ),
    'all labels': (
        listed(labels=(np.arange(180) + 1) % 3),
        ["180 images relabelled: '0.jpg' from 'ant' to 'bee', '1.jpg' from 'bee' to 'cat', "],
        ["other labels among 180 images here: '0.jpg', '1.jpg', '2.jpg', ..."],
    ),
    'order': (
        listed(
            names=[f'{i}.jpg' for i in range(180)][::-1],
            labels=(np.arange(180) % 3)[::-1],
            stamps=(1000 + np.arange(180))[::-1],
        ),
        ['the same images in another order'],
        ['the images have another order'],
    ),
    'twice': (
        listed(
            names=[f'{i % 180}.jpg' for i in range(181)],
            labels=np.arange(181) % 180 % 3,
            stamps=1000 + np.arange(181) % 180,
        ),
        ["1 image listed a different number of times: '0.jpg'"],
        ['180 images there, 181 here', "other names among 2 images here: '0.jpg', '0.jpg'"],
    ),
}


@pytest.mark.parametrize('change', CHANGES)
def test_each_change_of_one_image_is_named(change):
    new, since, hosts_say = CHANGES[change]
    said = listing.differences(listed(), new)
    assert len(said) == len(since)
    for line, beginning in zip(said, since, strict=True):
        assert line.startswith(beginning)
    facts = json.loads(json.dumps({'train': listed().facts()}))
    found = listing.host_differences(facts, {'train': new})
    few = [line for line in found if any(line == f'train: {text}' for text in hosts_say)]
    assert len(few) == len(hosts_say), found


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


def splits_of(root, **changes):
    """What a run of this data begins with."""
    config = tiny.experiment(data=str(root), eval_split='test', **changes)
    opened = make_opener(config.held_out)
    splits = {'train': config.train_split, 'test': config.eval_split}
    readers = {
        name: ImageReader(opened(str(root), split), Resize(), (8, 8), exif_rotation=False)
        for name, split in splits.items()
    }
    return data_record.agreed_splits(config, readers, None, Job())


def start(folder, splits, accept=False):
    """A start of a run, to its end; it leaves a checkpoint."""
    folder.mkdir(exist_ok=True)
    record = data_record.compared(Workdir(folder), splits, Job(), accept=accept)
    with record.begun():
        record.check(wait=60.0)
    (folder / 'checkpoints' / '5').mkdir(parents=True, exist_ok=True)


def refused(folder, root, *texts, **changes):
    with pytest.raises(
        UserError, match='(?s)holds a run on other data:.*--accept_data_changes'
    ) as e:
        start(folder, splits_of(root, **changes))
    for text in texts:
        assert text in str(e.value)


def test_the_order_of_test_images_is_no_change_that_of_training_images_is(photos, tmp_path):
    splits = splits_of(photos)
    start(tmp_path / 'run', splits)
    for name in 'test', 'train':
        one = splits[name].listing
        turned = {'names': one.names[::-1], 'labels': one.labels[::-1], 'stamps': one.stamps[::-1]}
        other = splits | {name: splits[name]._replace(listing=dataclasses.replace(one, **turned))}
        if name == 'test':
            start(tmp_path / 'run', other)
        else:
            with pytest.raises(UserError, match='train: the same images in another order'):
                start(tmp_path / 'run', other)
        twice = {key: [*value, value[0]] for key, value in vars(one).items() if key in turned}
        twice |= {key: np.array(twice[key]) for key in ('labels', 'stamps')}
        other = splits | {name: splits[name]._replace(listing=dataclasses.replace(one, **twice))}
        with pytest.raises(UserError, match=f'{name}: 1 image listed a different number of times'):
            start(tmp_path / 'run', other)


def test_files_that_come_go_or_change_are_refused_by_name_or_accepted_once(
    photos, tmp_path, caplog
):
    folder = tmp_path / 'run'
    start(folder, splits_of(photos))
    before = (folder / 'data.zip').read_bytes()
    start(folder, splits_of(photos))
    (photos / 'train/cat/new.jpg').write_bytes(b'new')
    (photos / 'train/dog/3.jpg').unlink()
    (photos / 'train/dog/4.jpg').write_bytes(b'of another size')
    (photos / 'test/cat/1.jpg').rename(photos / 'test/dog/7.jpg')
    said = (
        "train: 1 image added: 'train/cat/new.jpg'",
        "train: 1 image removed: 'train/dog/3.jpg'",
        "train: 1 image replaced: 'train/dog/4.jpg'",
        "test: 1 image added: 'test/dog/7.jpg'",
    )
    refused(folder, photos, *said)
    refused(folder, photos)
    assert (folder / 'data.zip').read_bytes() == before and not caplog.text
    start(folder, splits_of(photos), accept=True)
    assert all(text in caplog.text for text in said)
    caplog.clear()
    start(folder, splits_of(photos))
    assert not caplog.text


def test_a_run_without_a_checkpoint_has_learned_from_nothing(photos, tmp_path):
    start(tmp_path / 'run', splits_of(photos))
    (tmp_path / 'run/checkpoints/5').rmdir()
    (photos / 'train/dog/3.jpg').unlink()
    start(tmp_path / 'run', splits_of(photos))
    start(tmp_path / 'run', splits_of(photos))


def test_other_fields_ask_for_other_images_and_a_folder_may_be_moved(photos, tmp_path):
    start(tmp_path / 'run', splits_of(photos))
    moved = photos.rename(tmp_path / 'elsewhere')
    start(tmp_path / 'run', splits_of(moved))
    start(tmp_path / 'run', splits_of(moved, train_split='train[:10]'))
    (moved / 'train/dog/3.jpg').unlink()
    refused(tmp_path / 'run', moved, train_split='train[:10]')


def test_a_run_of_an_earlier_version_goes_on_and_is_recorded_from_there(photos, tmp_path, caplog):
    (tmp_path / 'run/checkpoints/5').mkdir(parents=True)
    start(tmp_path / 'run', splits_of(photos))
    assert 'no data.zip: an earlier version began this run' in caplog.text
    (photos / 'train/dog/3.jpg').unlink()
    refused(tmp_path / 'run', photos, "'train/dog/3.jpg'")


@pytest.mark.parametrize('keep', [0, 10, 300])
def test_a_damaged_record_is_said_and_made_anew(photos, tmp_path, caplog, keep):
    start(tmp_path, splits_of(photos))
    (tmp_path / 'data.zip').write_bytes((tmp_path / 'data.zip').read_bytes()[:keep])
    start(tmp_path, splits_of(photos))
    assert 'data.zip: cannot be read, so that data which changed is not noticed' in caplog.text
    (photos / 'train/dog/3.jpg').unlink()
    refused(tmp_path, photos)


def test_classes_are_those_of_the_checkpoints_card(photos, tmp_path):
    """Also where there is no record; of another number they are no matter of acceptance."""
    folder = tmp_path / 'run'
    path = folder / 'checkpoints' / '7'
    save_alone(path, {'head': np.zeros(2)}, {'class_names': ['cat', 'dog']})
    start(folder, splits_of(photos))
    for split in 'train', 'test':
        (photos / split / 'dog').rename(photos / split / 'ant')
    (folder / 'data.zip').unlink()
    refused(folder, photos, "train: class 0: 'cat' -> 'ant', class 1: 'dog' -> 'cat'")
    for split in 'train', 'test':
        (photos / split / 'emu').mkdir()
        (photos / split / 'emu' / '0.jpg').write_bytes(b'x')
    for accept in False, True:
        with pytest.raises(
            UserError, match=r'/7 has 2 classes, the data 3: class 0: .*start_from='
        ):
            start(folder, splits_of(photos), accept=accept)


def test_more_files_than_are_looked_at_first_are_compared_while_training(
    photos, tmp_path, monkeypatch
):
    monkeypatch.setattr(listing, 'LOOKS', 4)
    start(tmp_path / 'run', splits_of(photos))
    everything = splits_of(photos)['train'].source
    order = everything.read_names(range(16))
    start(tmp_path / 'run', splits_of(photos))
    with open(order[1], 'ab') as file:  # 0, 5, 10 and 15 are looked at first
        file.write(b'more')
    record = data_record.compared(Workdir(tmp_path / 'run'), splits_of(photos), Job(), accept=False)
    with record.begun(), pytest.raises(UserError, match='1 image replaced'):
        record.check(wait=60.0)
    with open(order[5], 'ab') as file:
        file.write(b'more')
    with pytest.raises(UserError, match='1 image replaced'):
        data_record.compared(Workdir(tmp_path / 'run'), splits_of(photos), Job(), accept=False)


def test_a_run_that_ends_before_all_files_are_looked_at_keeps_what_is_known(
    photos, tmp_path, monkeypatch, caplog
):
    """And does not wait for a disk that stalls."""
    monkeypatch.setattr(listing, 'LOOKS', 4)
    monkeypatch.setattr(data_record, 'LAST', 0.1)
    splits, looking, stalled = splits_of(photos), threading.Event(), threading.Event()

    def stall(indices):
        looking.set()
        stalled.wait(5)
        return np.full(len(indices), -1)

    train = splits['train']
    splits['train'] = train._replace(source=dataclasses.replace(train.source, read_stamps=stall))
    record = data_record.compared(Workdir(tmp_path), splits, Job(), accept=False)
    with record.begun():
        looking.wait()
    assert record._thread.is_alive()
    stalled.set()
    (tmp_path / 'checkpoints/5').mkdir(parents=True)
    (photos / 'train/dog/3.jpg').unlink()
    refused(tmp_path, photos, "train: 1 image removed: 'train/dog/3.jpg'")
    assert 'an earlier version' not in caplog.text


def test_a_first_save_that_a_kill_cut_short_is_no_run_that_began(photos, tmp_path):
    (tmp_path / 'checkpoints/5.orbax-checkpoint-tmp-0').mkdir(parents=True)
    record = data_record.compared(Workdir(tmp_path), splits_of(photos), Job(), accept=False)
    with record.begun():
        record.check(wait=60.0)
    (photos / 'train/dog/3.jpg').unlink()
    data_record.compared(Workdir(tmp_path), splits_of(photos), Job(), accept=False)


def test_a_record_that_cannot_be_read_is_not_taken_for_a_damaged_one(photos, tmp_path):
    """Which would be written over."""
    start(tmp_path, splits_of(photos))
    (tmp_path / 'data.zip').unlink()
    (tmp_path / 'data.zip').mkdir()
    with pytest.raises(UserError, match='data.zip: a folder; expected a file'):
        data_record.compared(Workdir(tmp_path), splits_of(photos), Job(), accept=True)


def test_the_record_is_a_list_of_every_image(photos, tmp_path):
    start(tmp_path, splits_of(photos))
    with np.load(tmp_path / 'data.zip') as file:
        names = file['0.names'].tobytes().decode().split('\0')[:-1]
        sizes, labels = dict(zip(names, file['0.stamps'], strict=True)), file['0.labels']
    assert len(names) == 16 and labels.sum() == 8
    assert all(sizes[f'train/{c}/{i}.jpg'] == 10 + i for c in ('cat', 'dog') for i in range(8))


@pytest.mark.full
def test_hosts_whose_labels_all_differ_are_refused(tmp_path):
    command = ['tests.faulty', 'other_labels:0:1', '--config=tests/tiny_config.py']
    with hosts(tmp_path, [*command, f'--workdir={tmp_path}/run'], 2) as started:
        assert [host.wait(60) for host in started] == [1, 1]
    for host in started:
        assert 'the data: process 1 ' in host.text and 'differs from process 0' in host.text
        assert "train: other labels among 1,438 images here: 'train[0]'" in host.text
    assert not (tmp_path / 'run').exists()


def write_images(root):
    rng = np.random.default_rng(0)
    for i in range(16):
        path = root / ('train' if i < 12 else 'test') / ('cat', 'dog')[i % 2] / f'{i}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), rng.integers(0, 256, (8, 8, 3), np.uint8))


@pytest.mark.full
def test_a_resume_with_a_class_renamed_or_other_photos_is_refused(tmp_path, caplog):
    root, folder = tmp_path / 'photos', str(tmp_path / 'run')
    write_images(root)
    config = tiny.experiment(
        data=str(root), eval_split='test', total=Duration(steps=4), checkpoint_every_steps=2
    )
    training_run.train(config, folder)
    shutil.rmtree(tmp_path / 'run/checkpoints/4')  # as if killed before
    for split in 'train', 'test':
        (root / split / 'cat').rename(root / split / 'zebra')
    with pytest.raises(UserError, match="(?s)other data:.*class 0: 'cat' -> 'dog', class 1: 'dog'"):
        training_run.train(config, folder, accept_changes=True)
    for split in 'train', 'test':
        (root / split / 'zebra').rename(root / split / 'cat')
    (root / 'train/cat/0.png').rename(root / 'train/cat/late.png')
    with pytest.raises(UserError, match='(?s)image added: .*late.png.*removed: .*0.png'):
        training_run.train(config, folder)
    result = training_run.train(config, folder, accept_data=True)
    assert int(result.state.step) == 4 and 'goes on with other data' in caplog.text
    training_run.train(config, folder)
