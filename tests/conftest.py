"""Several devices on one CPU, one compilation cache, one temporary folder, checked shapes."""

import faulthandler
import importlib.metadata
import os
import pathlib
import pkgutil
import signal
import sys

import pytest

pytest_plugins = ['tests.temporary']
if sys.flags.optimize:
    raise pytest.UsageError(
        'PYTHONOPTIMIZE is set, which disables the assertions of the tests; unset it'
    )

# Before jax is imported. The fixture `_devices` shows most tests two of the eight devices.
# Eight devices share the threads of XLA, and a thread that waits in a collective is not free for
# the device that it waits for. With two threads, one test deadlocked in half of its runs: NPROC
# gives XLA more threads, and all devices run their collectives in one order.
flags = [
    '--xla_force_host_platform_device_count=8',
    '--xla_cpu_enable_concurrency_optimized_scheduler=false',
    # Half of the time went into compiling. LLVM does not optimize; XLA does.
    '--xla_backend_optimization_level=0',
    '--xla_llvm_disable_expensive_passes=true',
]
if importlib.metadata.version('jaxlib').startswith('0.10.'):
    # The older emitters compile twice as fast. Later releases lack them, and XLA exits on a flag
    # that it does not know.
    flags.append('--xla_cpu_use_fusion_emitters=false')
if 'PYTEST_XDIST_WORKER' not in os.environ:  # a worker has them from the process that began it
    os.environ['XLA_FLAGS'] = ' '.join(flags)
for name in [name for name in os.environ if name.startswith('JAX_')]:
    if name != 'JAX_COMPILATION_CACHE_DIR':
        del os.environ[name]
os.environ['NPROC'] = '32'
os.environ['JAX_CPU_ENABLE_ASYNC_DISPATCH'] = '0'
os.environ['JAX_PLATFORMS'] = 'cpu'
for name in 'no_proxy', 'NO_PROXY':  # the servers of the tests need no proxy
    os.environ[name] = f'127.0.0.1,localhost,{os.environ.get(name, "")}'
# Behind nohup, and in the background of a script, these are ignored, and the processes that the
# tests start would ignore them too.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)
ROOT = pathlib.Path(__file__).parent.parent
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(ROOT / '.cache' / 'jax'))
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'


def pytest_addoption(parser):
    text = 'check the shapes and types of all annotations of vit_jax'
    parser.addoption('--shape-checks', action='store_true', help=text)


def pytest_configure(config):
    """Imports vit_jax with jaxtyping's hook. xdist's parent process runs no test and needs none."""
    waits = config.getoption('numprocesses', None) and not hasattr(config, 'workerinput')
    if waits or not config.getoption('shape_checks'):
        return
    # Under the hook whatever is imported would be compiled anew, other people's code too.
    theirs = 'flax', 'matplotlib.pyplot', 'optax', 'orbax.checkpoint', 'scipy.stats'
    # Records check what they are given themselves, at each assignment: checked twice, the
    # configurations alone took ten seconds of each process.
    for name in (*theirs, 'vit_jax.base.records'):
        importlib.import_module(name)
    import jaxtyping

    with jaxtyping.install_import_hook('vit_jax', 'beartype.beartype'):
        import vit_jax

        for module in pkgutil.walk_packages(vit_jax.__path__, 'vit_jax.'):
            importlib.import_module(module.name)


# The longest files, longest first, so that all workers end together; and whether each of their
# tests may run in any worker. All tests of another file run in one worker, so that what they share
# is built once.
LONGEST = {
    'tests/experiment/test_training_run.py': False,
    'tests/test_documentation.py': True,
    'tests/test_deploy.py': True,
    'tests/laws/test_training.py': False,
    'tests/test_benchmarks.py': True,
    'tests/test_gpu_programs.py': True,
    'tests/test_torch_references.py': True,
    'tests/studies/test_planned_runs.py': True,
    'tests/test_configs.py': True,
    'tests/test_fields.py': False,
    'tests/experiment/test_hosts.py': False,
    'tests/experiment/test_buckets.py': False,
    'tests/experiment/test_bucket_data.py': True,
    'tests/distributed/test_processes.py': False,
    'tests/experiment/test_stopping.py': False,
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition('::')[0]
            return nodeid if LONGEST.get(file) else file

    return Scheduling(config, log)


def pytest_collection_modifyitems(items):
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(str(item.path.relative_to(ROOT)), len(rank)))


def pytest_runtest_setup(item):
    both = item.get_closest_marker('gate') and item.get_closest_marker('nightly')
    assert not both, f'{item.nodeid}: has the marks gate and nightly; expected only one of them'


def pytest_collection_finish(session):
    # With the hook, runpy compiles vit_jax with checks and saves the result as the ordinary .pyc.
    # Processes without the hook would load that file and fail.
    sys.dont_write_bytecode = session.config.getoption('shape_checks')


@pytest.fixture(autouse=True)
def _ends():
    """A test that hangs ends its process, which says where each thread was."""
    faulthandler.dump_traceback_later(900, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope='module', autouse=True)
def _devices(request):
    """Gives each module of tests two devices, or as many as its constant DEVICES, at most eight."""
    import jax

    count = getattr(request.module, 'DEVICES', 2)
    devices = jax.devices()[:count]
    assert len(devices) == count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, 'devices', lambda backend=None: list(devices))
        yield


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
    """An empty gs://bucket without faults, for this process and those that it starts."""
    _bucket.clear()
    yield _bucket
    _bucket.clear()
