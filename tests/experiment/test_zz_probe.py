import os

from tests.distributed import test_processes as t


def test_probe(tmp_path):
    with t.running(tmp_path, 'hang:5:1') as started:
        started[1].wait_for_text('hanging')
        print('PIDS', *[h.process.pid for h in started], flush=True)
        os._exit(3)
