"""Counts the programs that another program compiles: python -m tests.counted CACHE PROGRAM FLAGS.

CACHE is the folder of the compilation cache. The last line of the output has both counts.
"""

import collections
import runpy
import sys

import jax
import jax.monitoring

if __name__ == '__main__':
    cache, program = sys.argv[1:3]
    del sys.argv[1:3]
    jax.config.update('jax_compilation_cache_dir', cache)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    events = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
    try:
        runpy.run_module(program, run_name='__main__', alter_sys=True)
    finally:
        compiled, loaded = (
            events[f'/jax/compilation_cache/cache_{name}'] for name in ('misses', 'hits')
        )
        print(f'compiled {compiled}, loaded {loaded}')
