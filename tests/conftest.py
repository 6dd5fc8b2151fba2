"""Eight devices on one CPU, one compilation cache, and every shape annotation checked."""

import os
import pathlib

# Before jax is imported. Tests that want another number of devices start a process of their own.
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
os.environ['JAX_PLATFORMS'] = 'cpu'
ROOT = pathlib.Path(__file__).parent.parent
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(ROOT / '.cache' / 'jax'))
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'

import jaxtyping  # noqa: E402  (the hook comes before what it checks)

with jaxtyping.install_import_hook('vit_jax', 'beartype.beartype'):
    import vit_jax.experiment  # noqa: F401
    import vit_jax.program  # noqa: F401
