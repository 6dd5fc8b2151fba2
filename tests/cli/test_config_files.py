"""The file behind --config: where it is looked for, what it may do, and how its errors look."""

import configparser
import dataclasses
import pathlib
import re
import subprocess
import sys
import typing

import pytest

from tests import tiny
from vit_jax.base import UserError, records
from vit_jax.cli import app, config_files
from vit_jax.cli.config_files import read_config_file
from vit_jax.cli.config_flags import load
from vit_jax.config import write_config

ROOT = pathlib.Path(__file__).parents[2]


def message(given):
    with pytest.raises(UserError) as error:
        read_config_file(str(given))
    return str(error.value)


def test_other_errors_of_a_configuration_are_not_hidden(tmp_path, capsys, monkeypatch):
    file = tmp_path / 'own.py'
    file.write_text("def get_config():\n    return {}['row']\n")
    with pytest.raises(UserError) as error:
        read_config_file(str(file))
    assert app.report(error.value) == 1
    shown = capsys.readouterr().err
    assert f"--config={file}, line 2: KeyError: 'row'" in shown and shown.count('\n') == 1
    monkeypatch.setattr(sys, 'argv', ['train', '--traceback'])
    app.report(error.value)
    assert f'{file}", line 2' in capsys.readouterr().err


MISSPELLED = {
    'models.load()': "line 3: module 'vit_jax.models' has no attribute 'load'$",
    'ViTConfig(depth=-3)': 'line 3: ViTConfig.depth=-3',
    'VitConfig()': "line 3: .*'VitConfig'.*did you mean 'ViTConfig'",
    'models.VitConfig()': "line 3: .*'VitConfig'; did you mean 'ViTConfig'",
    'ViTConfig().dept': "line 3: .*'dept'; did you mean 'depth'",
    'beside_it.get()': 'beside_it.py, line 2: ZeroDivisionError',
    'ViTConfig(depth=2,': 'line 3: .*never closed: c = ViTConfig',
}
IMPORTS = {
    'from vit_jax.models import VitConfig': "line 1: .*did you mean 'ViTConfig'",
    'from vit_jax.training.durations import Duration': "line 1: .*did you mean 'duration'",
    'import vit_jax.model': "line 1: .*did you mean 'models'",
    'import broken_it': 'broken_it.py, line 1: invalid syntax: x = = 1',
    'import unknown_module': "line 1: No module named 'unknown_module'",
}


def test_a_misspelled_field_gets_a_suggestion(tmp_path):
    """In a separate process: the tests check types, which changes Python's message."""
    begin = 'from vit_jax.config import TrainConfig; from vit_jax.models import ViTConfig\n'
    (file := tmp_path / 'own.py').write_text(f'{begin}c = TrainConfig(model=ViTConfig(dept=2))')
    code = f'from vit_jax.cli.config_files import read_config_file as read; read({str(file)!r})'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    expected = f"--config={file}, line 2: ViTConfig has no field 'dept'; did you mean 'depth'?"
    assert done.stderr.splitlines()[-1].endswith(expected)


@pytest.mark.parametrize('line', [*MISSPELLED, *IMPORTS])
def test_a_misspelled_name_in_a_configuration_gets_a_suggestion(line, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, 'path', [*sys.path])
    (tmp_path / 'beside_it.py').write_text('def get():\n    return 1 / 0\n')
    (tmp_path / 'broken_it.py').write_text('x = = 1\n')
    begin = 'from vit_jax import models; from vit_jax.models import ViTConfig\nimport beside_it\n'
    file = tmp_path / 'own.py'
    file.write_text(line if line in IMPORTS else f'{begin}c = {line}')
    text = message(file)
    assert re.search((MISSPELLED | IMPORTS)[line], text) and text.startswith(f'--config={file}')
    assert '\n' not in text and 'vit_jax/cli' not in text
    sys.modules.pop('beside_it', None)


FILE = """
from vit_jax.config import TrainConfig
from vit_jax.distributed.meshes import MeshConfig
ARGUMENTS = 'B/16', 'L/16'
c = TrainConfig(data='digits')
def change():
    c.batchsize = 3
def get_config(size=None):
    return """


@pytest.mark.parametrize(
    'line, argument, names',
    [
        ('MeshConfig(fsdp=0)', '', 'line 9: MeshConfig.data=-1 x fsdp=0'),
        ('change()', '', "line 7: TrainConfig.batchsize: .*'batch_size'"),
        ('setattr(c, "batch_size", "3") or c', '', "config.batch_size='3'"),
        ('3', '', 'TrainConfig'),
        ('3\ndel get_config', '', 'get_config'),
        ('3\nget_confg = get_config\ndel get_config', '', 'get_confg'),
        ('3\nget_config = lambda: 3', ':B/16', 'argument'),
        ('3\ndef get_config(size): return 3', '', 'B/16, L/16'),
        ('{}[size]', ':B/17', "'B/17'.*'B/16'"),
    ],
)
def test_an_error_names_the_file_its_line_and_the_value(tmp_path, line, argument, names):
    file = tmp_path / 'own.py'
    file.write_text(FILE + line)
    with pytest.raises(UserError, match=f'^--config={file}.*{names}') as error:
        read_config_file(f'{file}{argument}')
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'given, names', [('run', r"a folder.*'.*run/config.json'"), ('a.jpg', 'not a Python file')]
)
def test_what_is_no_configuration_file_is_named(tmp_path, given, names):
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run/config.json').write_text('{}')
    (tmp_path / 'a.jpg').write_bytes(b'\xff\0')
    with pytest.raises(UserError, match=f'^--config={tmp_path}/{given}: .*{names}'):
        read_config_file(str(tmp_path / given))


@pytest.mark.parametrize(
    'given, names', [('head.py', 'FILE.py:FUNCTION'), ('no.py:f', 'no such'), ('a.npz:f', 'Python')]
)
def test_what_is_no_function_in_a_file_is_named(tmp_path, given, names):
    for name in 'head.py', 'a.npz':
        (tmp_path / name).write_bytes(b'\0')
    with pytest.raises(UserError, match=f'^--head={tmp_path}.*{names}'):
        config_files.load_function(str(tmp_path / given))


LATER = """
import json
def loss(logits):
    return logist
def read(text):
    return json.loads(text)
def ours(text):
    return load(text)
from vit_jax.base.files import parse_json as load
"""


@pytest.mark.parametrize(
    'name, described',
    [('loss', "own.py, line 4: .*'logits'"), ('read', 'own.py, line 6: '), ('ours', None)],
)
def test_an_error_in_a_function_of_the_user_is_told_by_its_line(tmp_path, name, described):
    (file := tmp_path / 'own.py').write_text(LATER)
    function = config_files.load_function(f'{file}:{name}')
    with pytest.raises((NameError, ValueError)) as error:
        function('{')
    found = str(config_files.describe_error_of_user(error.value))
    assert re.search(described or '^None$', found)
    assert found.count('--traceback') == (described is not None)


OWN = """
from __future__ import annotations
import dataclasses
import beside_it
class Number(float): pass
def made():
    @dataclasses.dataclass
    class Scaled:
        by: Number = Number(beside_it.SCALE)
    return Scaled()
class Loss:
    scale: Number
    def __call__(self, logits, targets): return made().by
def get_config():
    return beside_it.tiny.experiment(loss=Loss())
"""


def test_a_configuration_is_a_module_that_imports_files_of_its_folder(tmp_path, monkeypatch):
    """dataclasses and typing find its names after it was read."""
    monkeypatch.setattr('sys.path', [*sys.path])
    (tmp_path / 'beside_it.py').write_text('from tests import tiny\nSCALE = 3.0\n')
    (tmp_path / 'own.py').write_text(OWN)
    loss = load(str(tmp_path / 'own.py'), ['seed=1']).loss
    assert loss(None, None) == 3.0
    assert typing.get_type_hints(type(loss))['scale'].__name__ == 'Number'
    assert not [*tmp_path.rglob('own*.pyc')]


def test_a_configuration_of_the_package_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_config_file('configs/quickstart.py') == read_config_file('quickstart.py')
    assert "'configs/quickstart.py'" in message('configs/quikstart.py')
    for name in "'configs/finetune/vit.py'", "'configs/pretrain/vit.py'":
        assert name in message('vit.py')
    own = tmp_path / 'configs/quickstart.py'
    own.parent.mkdir()
    own.write_text('from tests import tiny\ndef get_config(): return tiny.experiment()')
    assert read_config_file('configs/quickstart.py') == tiny.experiment()


def test_every_configuration_is_a_part_of_the_package():
    """As setup.cfg says; a wheel would otherwise leave out those of a new folder."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / 'setup.cfg')
    patterns = setup['options.package_data']['vit_jax'].split(', ')
    packed = {file for pattern in patterns for file in (ROOT / 'vit_jax').glob(pattern)}
    there = (ROOT / 'configs').rglob('*.py')
    assert {ROOT / 'vit_jax' / file.relative_to(ROOT) for file in there} <= packed


def test_the_configuration_of_a_work_directory_is_one(tmp_path):
    file, config = tmp_path / 'config.json', tiny.experiment()
    write_config(file, records.to_dict(config))
    assert read_config_file(str(file)) == config
    own = dataclasses.replace(config, loss=len)
    write_config(file, records.to_dict(own))
    with pytest.raises(UserError, match='builtins:len'):
        read_config_file(str(file)).loss(None, None)
    for damaged in '[]', '{"format": 3, "data": 3}', '{', '{"format": 3, "batchsize": 3}':
        file.write_text(damaged)
        assert message(file).startswith(f'--config={file}: ')
