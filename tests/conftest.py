"""Eight devices on one CPU, one compilation cache, and every shape annotation checked."""

import faulthandler
import importlib
import os
import pathlib
import pkgutil
import signal

import pytest

# Before jax is imported. Tests that want another number of devices start a process of their own.
# Eight devices share few threads, and a thread that waits in a collective is not free for the
# device that it waits for. Two cores' worth of threads stopped dead in about every other run of
# one test: more threads (NPROC is read by XLA), and collectives in one order on all devices.
flags = [
    '--xla_force_host_platform_device_count=8',
    '--xla_cpu_enable_concurrency_optimized_scheduler=false',
    # Half of the time went into compiling. LLVM does not optimize; XLA does.
    '--xla_backend_optimization_level=0',
    '--xla_llvm_disable_expensive_passes=true',
]
if 'PYTEST_XDIST_WORKER' not in os.environ:  # a worker has them from the process that began it
    os.environ['XLA_FLAGS'] = ' '.join(flags)
os.environ['NPROC'] = '32'
os.environ['JAX_CPU_ENABLE_ASYNC_DISPATCH'] = '0'
os.environ['JAX_PLATFORMS'] = 'cpu'
# Behind nohup, and in the background of a script, these are ignored, and the processes that the
# tests start would ignore them too.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)
ROOT = pathlib.Path(__file__).parent.parent
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(ROOT / '.cache' / 'jax'))
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'


def pytest_configure(config):
    """The hook comes before what it checks; a process that only waits for workers needs neither."""
    if config.getoption('numprocesses', None) and not hasattr(config, 'workerinput'):
        return
    # Under the hook whatever is imported would be compiled anew, other people's code too.
    theirs = 'flax', 'grain', 'matplotlib.pyplot', 'optax', 'orbax.checkpoint', 'scipy.stats'
    # Records check what they are given themselves, at each assignment: checked twice, the
    # configurations alone took ten seconds of each process.
    for name in (*theirs, 'vit_jax.base.records'):
        importlib.import_module(name)
    import jaxtyping

    with jaxtyping.install_import_hook('vit_jax', 'beartype.beartype'):
        import vit_jax

        for module in pkgutil.walk_packages(vit_jax.__path__, 'vit_jax.'):
            importlib.import_module(module.name)


LONGEST = [  # by the seconds that they take
    'test_documentation.py',
    'experiment/test_training_run.py',
    'laws/test_training.py',
    'test_benchmarks.py',
    'studies/test_planned_runs.py',
    'test_gpu_programs.py',
    'experiment/test_hosts.py',
    'experiment/test_buckets.py',
]


def pytest_collection_modifyitems(items):
    """The longest files first: each goes whole to one worker, and all shall end together."""
    rank = {name: place for place, name in enumerate(LONGEST)}
    tests = pathlib.Path(__file__).parent
    items.sort(key=lambda item: rank.get(str(item.path.relative_to(tests)), len(rank)))


@pytest.fixture(autouse=True)
def _ends():
    """A test that hangs ends its process, which says where each thread was."""
    faulthandler.dump_traceback_later(900, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope='session')
def _bucket():
    """One for all tests of a process: clients keep the address of the first that they meet."""
    from tests.servers.gcs import serving

    with serving() as bucket, pytest.MonkeyPatch.context() as patch:
        for name, value in bucket.environment().items():
            patch.setenv(name, value)
        yield bucket


@pytest.fixture
def bucket(_bucket):
    """An empty gs://bucket, for this process and those that it starts."""
    _bucket.objects.clear()
    _bucket.fault = lambda method, path: None
    return _bucket
