"""Each configuration has a task, and each task is complete."""

import pytest

from tests import tiny
from vit_jax.base import records
from vit_jax.config import EvalConfig, TrainConfig
from vit_jax.experiment.build import build_experiment
from vit_jax.tasks.making import make_task
from vit_jax.training.metrics import METRICS
from vit_jax.training.objectives import Distillation

OBJECTIVES = records.record_types(
    records.union_members(records.field_types(TrainConfig)['objective'])
)
SMALL = {'MaskedAutoencoder': {'decoder_depth': 1, 'decoder_width': 8, 'decoder_heads': 2}}
CONFIGS = {
    'one class': {},
    'a teacher': {'distillation': Distillation(teacher='x')},
    **{name: {'objective': cls(**SMALL.get(name, {}))} for name, cls in OBJECTIVES.items()},
}


@pytest.mark.parametrize('changes', CONFIGS.values(), ids=CONFIGS)
def test_each_configuration_has_a_task_with_known_metrics(changes):
    """A new objective needs a line of `_OF_OBJECTIVES` in vit_jax/tasks/making.py."""
    task = make_task(tiny.experiment(**changes), num_classes=3)
    assert {*task.shown, *task.measured} <= METRICS.keys()


@pytest.mark.parametrize('name', OBJECTIVES)
def test_fields_that_an_objective_does_not_use_exist(name):
    config = tiny.experiment(**CONFIGS[name], evals={'test': EvalConfig()}, eval_split='test')
    for path in config.objective.unused:
        fields = list(records.find_fields(config, path))
        assert fields, path
        for _, record, field in fields:
            assert field in records.field_types(type(record)), path
    assert build_experiment(config).train_reader.source.class_names  # labels do no harm
