"""Writes the hashes, or prints how one configuration differs from another revision of git."""

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile

from tests import golden
from vit_jax.base import records

parser = argparse.ArgumentParser(prog='python -m tests.golden', description=__doc__)
parser.add_argument('name', nargs='?', metavar='FILE.py[:ARGUMENT]', help='such as in hashes.txt')
parser.add_argument('--since', default='HEAD', metavar='REVISION', help='of git (HEAD)')
parser.add_argument('--print', action='store_true', help='print all values instead')
arguments = parser.parse_args()
if arguments.name is None:
    golden.HASHES.write_text('\n'.join(golden.hashes()) + '\n')
    sys.exit()
text = json.dumps(records.to_dict(golden.config(arguments.name)), indent=1)
if arguments.print:
    sys.exit(print(text))
with tempfile.TemporaryDirectory() as folder:
    command = f'git archive {arguments.since} | tar -x -C {folder}'
    subprocess.run(['bash', '-o', 'pipefail', '-c', command], cwd=golden.ROOT, check=True)
    before = subprocess.run(
        [sys.executable, '-m', 'tests.golden', '--print', arguments.name],
        cwd=folder,
        env=os.environ | {'PYTHONPATH': folder},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
lines = before.splitlines(), text.splitlines()
print(*difflib.unified_diff(*lines, arguments.since, 'now', lineterm='', n=3), sep='\n')
