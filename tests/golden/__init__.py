"""Every configuration as text, so that a changed default is a visible difference.

python -m tests.golden writes the texts anew; what they then differ in is what users will get.
"""

import importlib.util
import json
import pathlib

from vit_jax.base import records

ROOT = pathlib.Path(__file__).parent.parent.parent
TEXTS = pathlib.Path(__file__).parent / 'configs'
FILES = sorted((ROOT / 'configs').rglob('*.py'))


def module(path):
    spec = importlib.util.spec_from_file_location('experiment', path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def arguments(path):
    """What a file can be given after the colon; None where it takes nothing."""
    return getattr(module(path), 'ARGUMENTS', (None,))


def config(path, argument):
    get = module(path).get_config
    return get() if argument is None else get(argument)


def text(path):
    """The whole of the first configuration, and what differs in each of the others."""
    first, *others = arguments(path)
    whole = records.to_dict(config(path, first))
    lines = [f'{path.relative_to(ROOT)}:{first}' if first else str(path.relative_to(ROOT))]
    lines += json.dumps(whole, indent=1).splitlines()
    for other in others:
        lines.append(f'{path.relative_to(ROOT)}:{other}')
        found = records.differences(whole, records.to_dict(config(path, other)))
        lines += [f'  {line}' for line in found]
    return '\n'.join(lines) + '\n'


def golden(path):
    return TEXTS / ('-'.join(path.relative_to(ROOT / 'configs').with_suffix('').parts) + '.txt')
