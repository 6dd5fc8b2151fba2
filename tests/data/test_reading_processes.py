import errno
import gc
import io
import os
import pathlib
import signal
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest
from PIL import Image

from vit_jax.data import loading, reading, reading_processes
from vit_jax.data.image_preprocessing import CentralCrop, InceptionCrop
from vit_jax.data.reading_processes import ReadingProcesses, Unsendable
from vit_jax.data.sources.base import OpenFile, Source
from vit_jax.parallel.meshes import MeshConfig, batch_sharding, make_mesh

ROOT = pathlib.Path(__file__).parent.parent.parent
SIZE = (12, 10)
IMAGES = np.random.default_rng(0).integers(0, 256, (50, 40, 50, 3), np.uint8)


def jpeg(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, 'JPEG')
    return file.getvalue()


STORED = [*map(jpeg, IMAGES[:40]), *IMAGES[40:]]  # encoded, and pixels as they are


def source(stored=STORED, **options):
    """Made of plain functions: those of `vit_jax`, whose types are checked here, cannot be sent."""
    functions = {
        'read': lambda i: (stored[i], np.array([i % 2, 1, 0], np.int32)),
        'read_names': lambda indices: [f'image {i}' for i in indices],
        'read_labels': lambda indices: np.array([[i % 2, 1, 0] for i in indices]),
    }
    options = {'count': len(stored), 'class_names': tuple('abc'), 'multi_label': True} | options
    return Source(**(functions | options))


def reader(images=None, crop=None, **options):
    crop = crop or InceptionCrop()
    return reading.ImageReader(images or source(), crop, SIZE, exif_rotation=True, **options)


def loader(processes, images=None, **options):
    config = loading.LoaderConfig(placement='host', processes=processes)
    mesh = make_mesh(MeshConfig())
    return loading.make_loader(reader(images, **options), config, batch_sharding(mesh))


REFS = [reading.ExampleRef(i, epoch) for epoch in (0, 1) for i in range(len(STORED))] + [None]


def workers_of(pid):
    return [p for p in psutil.Process(pid).children() if is_worker(p)]


def is_worker(process):
    try:
        return 'vit_jax.data.reading_worker' in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def gone(processes, seconds=20):
    return not psutil.wait_procs(processes, seconds)[1]


@pytest.mark.full
def test_batches_are_those_of_threads():
    threads, processes = (
        loading.training_batches(loader(count), steps=range(6), batch_size=40, seed=3)
        for count in (0, 2)
    )
    for here, there in zip(threads, processes, strict=True):
        assert here.keys() == there.keys()
        for name in here:
            np.testing.assert_array_equal(here[name], there[name])


@pytest.mark.full
def test_an_unreadable_image_is_named_or_left_out_as_by_threads():
    broken, found = [*STORED[:7], b'no image', *STORED[8:]], []
    for count in 0, 2:
        with pytest.raises(ValueError) as error:
            loader(count, source(broken)).load(REFS)
        left_out = []
        skipping = loader(count, source(broken), on_unreadable='skip', on_skipped=left_out.append)
        for _ in range(3):  # over memory that held other images
            batch = skipping.load(REFS)
        assert np.flatnonzero(~batch['mask']).tolist() == [7, 57, 100]
        found.append((str(error.value), left_out, batch['images'].tobytes()))
    assert found[0] == found[1]
    assert found[0][0].startswith('image 7: not a whole image of a known format')
    assert found[0][1] == 6 * ['image 7: not a whole image of a known format']


@pytest.mark.full
def test_a_process_that_is_killed_is_an_error_of_one_sentence_and_no_image_is_blamed():
    skipping = loader(2, on_unreadable='skip')
    skipping.load(REFS)
    for worker in workers_of(os.getpid()):
        worker.kill()
    for _ in range(2):
        with pytest.raises(ValueError, match='^a process that reads .* by SIGKILL, as where') as e:
            skipping.load(REFS)
        assert 'loader.processes=0' in str(e.value) and '\n' not in str(e.value)


@pytest.mark.full
def test_processes_go_on_where_all_of_a_job_are_told_to_stop():
    """As Slurm and terminals do: the process that trains has to save first."""
    asked = loader(2)
    asked.load(REFS)
    for worker in workers_of(os.getpid()):
        for told in signal.SIGTERM, signal.SIGINT, signal.SIGHUP:
            worker.send_signal(told)
    assert asked.load(REFS)['mask'].any()


@pytest.mark.full
def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(RuntimeError, match='Traceback(.|\n)*KeyError'):
        processes = ReadingProcesses(reader(source(read=lambda i: ({0: STORED[0]}[i], 0))), 1)
        processes.fill([reading.ExampleRef(1)], np.zeros((1, *SIZE, 3), np.uint8))


@pytest.mark.full
def test_processes_end_with_what_holds_them():
    before = workers_of(os.getpid())
    processes = ReadingProcesses(reader(), 2)
    started = [p for p in workers_of(os.getpid()) if p not in before]
    assert len(started) == 2
    del processes
    gc.collect()
    assert gone(started)


PARENT = """
import sys
import time

import numpy as np
import psutil

from vit_jax.data.image_preprocessing import Resize
from vit_jax.data.reading import ExampleRef, ImageReader
from vit_jax.data.reading_processes import ReadingProcesses
from vit_jax.data.sources.base import labelled_source

source = labelled_source([np.zeros((8, 8, 3), np.uint8)], [0], ['a'], read=lambda image: image)
processes = ReadingProcesses(ImageReader(source, Resize(), (4, 4), True), 2)
processes.fill([ExampleRef(0)], np.zeros((1, 4, 4, 3), np.uint8))
assert 'jax' not in sys.modules
print(*[child.pid for child in psutil.Process().children()], flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.full
@pytest.mark.parametrize('ending', ['exit', signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_their_parent_however_it_ends(ending):
    command = [sys.executable, '-c', PARENT, '1' if ending == 'exit' else '100']
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as parent:
        started = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(started) == 2, parent.stderr.read()
        if ending != 'exit':
            parent.send_signal(ending)
        assert parent.wait(30) == (0 if ending == 'exit' else -ending)
        assert gone(started)
        assert parent.stderr.read() == b''


def test_what_reads_images_imports_no_jax():
    modules = 'reading_worker', 'reading_processes', 'sources.opening', 'sources.tfds'
    program = '; '.join(f'import vit_jax.data.{name}' for name in modules)
    program += '; import sys; assert not {"jax", "grain", "flax", "orbax"} & set(sys.modules)'
    subprocess.run([sys.executable, '-c', program], check=True, cwd=ROOT, timeout=60)


def unsendable():
    lock = threading.Lock()

    def read(index):
        with lock:
            return STORED[index], 0

    return source(multi_label=False, read=read)


def test_data_that_cannot_be_sent_are_refused():
    with pytest.raises(ValueError, match='^loader.processes=2: these data are read by what cannot'):
        loader(2, unsendable())


class Fatal:
    """What ends the process that unpickles it."""

    def __reduce__(self):
        return sys.exit, (3,)


@pytest.mark.full
def test_a_process_that_ends_at_its_start_says_how():
    fatal = Fatal()
    with pytest.raises(ValueError, match=r'^a process that reads images ended \(3\)'):
        ReadingProcesses(reader(source(read=lambda i: (STORED[i], fatal))), 1)


@pytest.mark.full
@pytest.mark.parametrize('seen', ['np.zeros((8, 8, 3), np.uint8)', 'missing[0]'])
def test_data_that_another_process_sees_differently_are_not_read_there(seen):
    program = f'lambda i: ({seen} if os.getpid() != {os.getpid()} else stored[i], 0)'
    read = eval(program, {'np': np, 'os': os, 'stored': STORED})
    with pytest.raises(Unsendable, match='another process (reads something else|cannot read)'):
        ReadingProcesses(reader(source(read=read)), 1)


def test_an_open_file_is_opened_again_where_it_is_sent(tmp_path):
    (tmp_path / 'a').write_bytes(b'abc')
    file = OpenFile(tmp_path / 'a')
    make, arguments = file.__reduce__()
    again = make(*arguments)
    assert again.descriptor != file.descriptor and os.pread(again.descriptor, 3, 0) == b'abc'


def test_what_is_evaluated_is_read_by_threads():
    assert loading._processes(reader(crop=CentralCrop()), loading.LoaderConfig(processes=2)) is None


def test_more_processes_than_there_can_be_is_one_sentence_and_those_that_began_end(monkeypatch):
    start, begun = subprocess.Popen, []

    def popen(*arguments, **options):
        if len(begun) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        begun.append(start(*arguments, **options))
        return begun[0]

    monkeypatch.setattr(reading_processes.subprocess, 'Popen', popen)
    message = 'loader.processes=2: Too many open files after 1 of them; take fewer'
    with pytest.raises(ValueError, match=message):
        loader(2)
    assert begun[0].poll() is not None


def test_where_there_can_be_no_processes_that_is_said(monkeypatch):
    monkeypatch.setattr(reading_processes.os, 'name', 'nt')
    with pytest.raises(ValueError, match='loader.processes=2: there are none on this system'):
        loader(2)
