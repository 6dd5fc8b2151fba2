"""The table of allowed imports: it is the architecture."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / 'vit_jax'

# A folder is a layer; a layer may import those in the lines below its own, and its own folder.
LAYERS = (
    {'programs'},
    {'cli', 'figures'},
    {'planning', 'studies'},
    {'experiment'},
    {'tasks'},
    {'config'},
    {'evaluation'},
    {'pretrained'},
    {'checkpoints'},
    {'analysis', 'training', 'data'},
    {'models', 'distributed'},
    {'base'},
)
DOORS = {'config', 'pretrained'}  # the only modules at the root that are no programs
# What has no other public door: a compiler for devices that are not here, kernels of TPUs, meshes
# whose axes share a side of the torus.
EXPERIMENTAL = {'ahead_of_time.py', 'attention.py', 'meshes.py'}

FILES = sorted(PACKAGE.rglob('*.py'))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{path}: relative import'
            if node.module == 'vit_jax':
                yield from (f'vit_jax.{alias.name}' for alias in node.names)
            else:
                yield node.module


def room(path):
    """The folder of a file; of a module at the root its name, or `programs`."""
    name = path.relative_to(PACKAGE).with_suffix('').parts[0]
    return name if name in DOORS or (PACKAGE / name).is_dir() else 'programs'


def allowed(own):
    layer = next(index for index, rooms in enumerate(LAYERS) if own in rooms)
    return {own}.union(*LAYERS[layer + 1 :])


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    for name in imports(path):
        parts = name.split('.')
        if parts[0] == 'vit_jax' and len(parts) > 1:
            there = room(PACKAGE.joinpath(*parts[1:]))
            assert there in allowed(room(path)), f'{room(path)} must not import {name}'
        assert parts[0] != 'configs'
        assert parts[0] != 'flax' or room(path) == 'models', 'flax is imported in models/ only'
        assert parts[0] != 'orbax' or room(path) == 'checkpoints'
        assert parts[:2] != ['jax', 'experimental'] or path.name in EXPERIMENTAL


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_says_what_it_owns(path):
    assert ast.get_docstring(ast.parse(path.read_text())), 'the first line says what the file owns'


def test_only_tasks_ask_what_the_task_is():
    """Loop, update, evaluator, reports and formats work with any task (see tasks/base.py)."""
    knowing = {'config.py', 'experiment/values.py'}  # hold and check the fields
    for path in FILES:
        name = str(path.relative_to(PACKAGE))
        if room(path) != 'tasks' and name not in knowing:
            nodes = ast.walk(ast.parse(path.read_text()))
            asked = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            assert not asked & {'objective', 'distillation'}, name


@pytest.mark.gate
def test_a_training_needs_no_tensorflow_and_its_model_and_update_no_library_of_data():
    """Nor a client of a network; the model runs without the libraries of its checkpoints."""
    program = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('cv2', 'sklearn', 'beartype', 'tensorboardX',
                                   'tensorflow', 'orbax'):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import jax
from vit_jax.models import build, variant
from vit_jax.training import losses, optimizer, update
model = build(variant('Ti/16', image_size=(32, 32), depth=1, num_classes=3))
params = jax.eval_shape(model.init, jax.random.key(0))
images = jax.ShapeDtypeStruct((2, 32, 32, 3), 'float32')
assert jax.eval_shape(model.apply, params, images).shape == (2, 3)
del sys.meta_path[0]
import vit_jax.train
assert not {"tensorflow", "torch", "requests", "huggingface_hub"} & {*sys.modules}
"""
    subprocess.run([sys.executable, '-c', program], check=True, cwd=PACKAGE.parent, timeout=120)


@pytest.mark.gate
def test_a_program_runs_as_a_file(tmp_path):
    """It finds the modules next to it before those of the standard library."""
    assert not {path.stem for path in PACKAGE.iterdir()} & sys.stdlib_module_names
    command = [sys.executable, PACKAGE / 'train.py', '--help']
    environment = os.environ | {'PYTHONPATH': str(PACKAGE.parent)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert run.returncode == 0 and run.stdout.startswith(b'usage: python -m'), run.stderr
