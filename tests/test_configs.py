"""Every file in configs/: its header, its values, and one traced update; nothing is computed."""

import ast
import importlib.util
import pathlib

import jax
import pytest

from tests import tiny
from vit_jax import config as configs
from vit_jax import records
from vit_jax import setup as setups
from vit_jax.training.duration import make_length
from vit_jax.training.optimizer import make_optimizer, make_schedule
from vit_jax.training.rules import make_rules
from vit_jax.training.update import make_init

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted((ROOT / 'configs').rglob('*.py'))


def loaded(path):
    spec = importlib.util.spec_from_file_location('experiment', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_config_says_how_it_is_run(path):
    header = ast.get_docstring(ast.parse(path.read_text()))
    assert f'--config={path.relative_to(ROOT)}' in header


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_config_fits_together(path):
    config = loaded(path)
    config.start_from = config.start_from or 'some/checkpoint'
    config = configs.checked(config)
    assert records.from_dict(configs.TrainConfig, records.to_dict(config), where='c') == config
    if config.total is None:
        return
    config.model = config.model or tiny.model(num_classes=None)
    length = make_length(config.total, batch_size=config.batch_size, images=1_281_167)
    model = setups.trained_model(config, None, tuple('0123456789'))
    setup = setups.prepare(config, None, model, length=length)
    rules = make_rules(config.optimizer, jax.eval_shape(setup.model.init, jax.random.key(0)))
    schedule = make_schedule(config.schedule, length)
    optimizer = make_optimizer(config.optimizer, schedule, rules)
    init = make_init(setup.model.init, optimizer, seed=0, averaged=False)
    assert jax.eval_shape(init).step.shape == ()


def test_every_field_of_a_config_is_read_somewhere():
    """A field that nothing reads is a promise that nothing keeps."""
    source = '\n'.join(path.read_text() for path in (ROOT / 'vit_jax').rglob('*.py'))
    attributes = {
        node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)
    }
    unread = [name for name in _fields(configs.TrainConfig) if name not in attributes]
    assert not unread


def _fields(kind):
    for name, hint in records.typing.get_type_hints(kind).items():
        yield name
        for record in records._record_types(hint):
            yield from _fields(record)
