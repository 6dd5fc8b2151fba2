"""Compiles the functions of an experiment for the devices of its mesh, before anything runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from vit_jax.base import Params
from vit_jax.data.loading import abstract_batch
from vit_jax.distributed import meshes, sharding_rules
from vit_jax.evaluation.evaluator import Evaluator
from vit_jax.evaluation.features import make_feature_evaluator
from vit_jax.experiment.build import Experiment
from vit_jax.training.update import TrainState


class Programs(NamedTuple):
    """The compiled functions of an experiment."""

    state: TrainState  # shape, type and sharding of each array
    update: Callable[..., Any]
    evaluators: dict[str, Evaluator]
    features: Evaluator | None  # for the few-shot evaluation


def compile_programs(experiment: Experiment, report: Callable[[str], Any]) -> Programs:
    """Compiles an experiment; calls `report` with a line about each array that is split."""
    state, mesh = abstract_state(experiment), experiment.mesh
    for line in sharding_rules.sharding_report(state, shardings_of(state), mesh):
        report(line)
    report(f'compile for {mesh.size} x {mesh.devices.flat[0].device_kind}')
    update = lower_update(experiment, state).compile()
    evaluators, features = compile_evaluators(experiment, state.eval_params)
    return Programs(state=state, update=update, evaluators=evaluators, features=features)


def abstract_state(experiment: Experiment) -> TrainState:
    """Returns shape, type and sharding of each array of the state.

    Raises UserError if less of it can be split than the configuration demands.
    """
    state, config = jax.eval_shape(experiment.init), experiment.config.mesh
    shardings = sharding_rules.shardings_for(state, experiment.mesh, config)
    sharding_rules.check_split(state, shardings, experiment.mesh, config)
    return sharding_rules.abstract(state, shardings)


def shardings_of(abstract: Any) -> Any:
    """Returns the shardings of abstract arrays."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def lower_update(experiment: Experiment, state: TrainState) -> Any:
    """Traces the update step, which donates its state; compiles nothing yet."""
    size, reader = experiment.config.batch_size, experiment.train
    batch = abstract_batch(experiment.mesh, size, reader.size, reader.source.label_shape)
    out_shardings = shardings_of(state), meshes.replicated(experiment.mesh)
    options = {'donate_argnums': 0, 'out_shardings': out_shardings}
    return meshes.jit_on(experiment.update, experiment.mesh, **options).lower(state, batch)


def compile_evaluators(
    experiment: Experiment, params: Params
) -> tuple[dict[str, Evaluator], Evaluator | None]:
    """Compiles the evaluators, and that of features for the few-shot evaluation if there is one.

    A step that several evaluators share is compiled once for each shape of batches.
    """
    evaluators = {
        name: evaluator.compile(params, experiment.evals[name])
        for name, evaluator in experiment.evaluators.items()
    }
    if experiment.probes is None:
        return evaluators, None
    model, batches = experiment.model, experiment.eval_batches
    features = make_feature_evaluator(model, experiment.preprocessing, batches)
    return evaluators, features.compile(params, experiment.probes.example)
