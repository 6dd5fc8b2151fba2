"""The file behind --config: where it is looked for, what it may do, and how its errors look."""

import configparser
import dataclasses
import pathlib
import sys
import typing

import pytest

from tests import tiny
from vit_jax.base import UserError, records
from vit_jax.cli import app
from vit_jax.cli.config_files import read
from vit_jax.cli.config_flags import load
from vit_jax.config import write_config

ROOT = pathlib.Path(__file__).parents[2]


def message(given):
    with pytest.raises(UserError) as error:
        read(str(given))
    return str(error.value)


def test_other_errors_of_a_configuration_are_not_hidden(tmp_path, capsys):
    file = tmp_path / 'own.py'
    file.write_text("def get_config():\n    return {}['row']\n")
    with pytest.raises(KeyError) as error:
        read(str(file))
    assert app.report(error.value) == 1
    shown = capsys.readouterr().err
    assert f'File "{file}", line 2, in get_config' in shown and shown.endswith("KeyError: 'row'\n")


IMPORTS = """
from vit_jax.config import EvalConfig, TrainConfig
from vit_jax.distributed.meshes import MeshConfig
c = TrainConfig(data='digits')
def get_config(*names):
    return """


@pytest.mark.parametrize(
    'line, said',
    [
        ('MeshConfig(fsdp=0)', 'line 6: MeshConfig.data=-1 x fsdp=0'),
        ('TrainConfig(batchsize=3)', "TrainConfig.batchsize: .*; did you mean 'batch_size'?"),
        ('EvalConfig(splt="test")', "line 6: EvalConfig.splt: .*; did you mean 'split'?"),
        (
            'made()\ndef made():\n  c.batchsize = 3',
            "line 8: TrainConfig.batchsize: .*'batch_size'?",
        ),
        ('made()\ndef made():\n  c.batch_size = "3"\n  return c', ": config.batch_size='3': exp"),
        ('3', r'get_config\(\) returned int; expected TrainConfig'),
        ('3\ndel get_config', r'it defines no get_config\(\)'),
        ('3\nget_config = lambda: 3', r'get_config\(\) takes no argument'),
    ],
)
def test_what_a_user_can_mend_is_one_line(tmp_path, line, said):
    file = tmp_path / 'own.py'
    file.write_text(IMPORTS + line)
    given = f'{file}:argument' if 'takes no' in said else file
    with pytest.raises(UserError, match=f'^--config={file}.*{said}') as error:
        read(str(given))
    assert '\n' not in str(error.value)


def test_an_argument_that_is_needed_is_asked_for(tmp_path):
    file = tmp_path / 'own.py'
    file.write_text("ARGUMENTS = 'B/16', 'L/16'\ndef get_config(size): return 3")
    assert 'needs an argument, --config=FILE:ARGUMENT; known: B/16, L/16' in message(file)


def test_an_unknown_argument_is_named_with_the_nearest_one():
    text = message('configs/pretrain/vit.py:imagenet,B/17')
    assert text.endswith("no argument 'imagenet,B/17'; did you mean 'imagenet,B/16'?")


def test_functions_and_classes_of_a_configuration_work_after_it_was_read(tmp_path):
    """Of a module that is gone neither dataclasses nor typing find the names."""
    file = tmp_path / 'own.py'
    file.write_text(
        'from __future__ import annotations\n'
        'import dataclasses\n'
        'from tests import tiny\n'
        'SCALE = 3.0\n'
        'class Number(float): pass\n'
        'def made():\n'
        '    @dataclasses.dataclass\n'
        '    class Scaled:\n'
        '        by: Number = Number(SCALE)\n'
        '    return Scaled()\n'
        'class Loss:\n'
        '    scale: Number\n'
        '    def __call__(self, logits, targets): return made().by\n'
        'def get_config():\n'
        '    return tiny.experiment(loss=Loss())\n'
    )
    loss = load(str(file), ['seed=1']).loss
    assert loss(None, None) == 3.0
    assert typing.get_type_hints(type(loss))['scale'].__name__ == 'Number'
    assert [*tmp_path.iterdir()] == [file]  # nothing is written beside it


def test_a_configuration_imports_what_lies_beside_it(tmp_path, monkeypatch):
    (tmp_path / 'beside_it.py').write_text('from tests import tiny\nSEED = 7\n')
    file = tmp_path / 'own.py'
    file.write_text(
        'import beside_it\n'
        'def get_config(): return beside_it.tiny.experiment(seed=beside_it.SEED)\n'
    )
    monkeypatch.setattr('sys.path', [*sys.path])
    monkeypatch.setattr('sys.dont_write_bytecode', True)
    assert read(str(file)).seed == 7


def test_a_configuration_that_came_with_the_package_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read('configs/quickstart.py').total.steps == 1200
    text = message('configs/quikstart.py')
    assert 'no such file, here or in ' in text
    assert text.endswith("did you mean 'configs/quickstart.py'?")
    assert message('folder.py').endswith("did you mean 'configs/finetune/folder.py'?")
    assert message('pretrain/vit_22').endswith("did you mean 'configs/pretrain/vit_22b.py'?")
    both = "did you mean 'configs/finetune/vit.py' or 'configs/pretrain/vit.py'?"
    assert message('vit.py').endswith(both)
    assert read('quickstart.py') == read('configs/quickstart.py')
    own = tmp_path / 'configs/quickstart.py'
    own.parent.mkdir()
    own.write_text('from tests import tiny\ndef get_config(): return tiny.experiment()')
    assert read('configs/quickstart.py') == tiny.experiment()
    assert ' configs/quickstart.py' in message('configs')


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
    assert read(str(file)) == config
    own = dataclasses.replace(config, loss=len)
    write_config(file, records.to_dict(own))
    with pytest.raises(UserError, match='builtins:len is not in the file'):
        read(str(file)).loss(None, None)
    for damaged in '[]', '{"format": 3, "data": 3}', '{', '{"format": 3, "batchsize": 3}':
        file.write_text(damaged)
        assert message(file).startswith(f'--config={file}: ')
