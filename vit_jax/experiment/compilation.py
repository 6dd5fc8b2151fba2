"""From pure functions to programs for the devices of a mesh, compiled before anything runs."""

import contextlib
import ctypes
from typing import Any

import jax

from vit_jax.base import Params
from vit_jax.data.loading import abstract_batch
from vit_jax.distributed import meshes, sharding_rules
from vit_jax.evaluation.evaluator import Evaluator
from vit_jax.evaluation.features import make_feature_evaluator
from vit_jax.experiment.build import Experiment
from vit_jax.training.update import TrainState


def abstract_state(experiment: Experiment) -> TrainState:
    """Shape, type and sharding of each array of the state.

    Raises UserError where less of it can be split than the configuration demands.
    """
    state, config = jax.eval_shape(experiment.init), experiment.config.mesh
    shardings = sharding_rules.shardings_for(state, experiment.mesh, config)
    sharding_rules.check_split(state, shardings, experiment.mesh, config)
    return sharding_rules.abstract(state, shardings)


def shardings_of(abstract: Any) -> Any:
    """The shardings of abstract arrays."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def lower_update(experiment: Experiment, state: TrainState) -> Any:
    """The update step, traced and not compiled yet; it takes over the memory of its state."""
    size, reader = experiment.config.batch_size, experiment.train
    batch = abstract_batch(experiment.mesh, size, reader.size, reader.source.label_shape)
    out_shardings = shardings_of(state), meshes.replicated(experiment.mesh)
    given = {'donate_argnums': 0, 'out_shardings': out_shardings}
    update = meshes.jit_on(experiment.update, experiment.mesh, **given)
    return update.lower(state, batch)


def compile_evaluators(
    experiment: Experiment, params: Params
) -> tuple[dict[str, Evaluator], Evaluator | None]:
    """Compiles the evaluators, and that of features for the few-shot evaluation if there is one.

    jax compiles a step that evaluators share once for batches of one shape.
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


def give_back_memory() -> None:
    """Gives the system what compiling took of the host's memory, and freed: some 200 MB.

    glibc would keep it for this process. Elsewhere nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
