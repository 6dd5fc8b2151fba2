"""Compiles the functions of an experiment for the devices of its mesh, before anything runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vit_jax.base import Array, Batch, Bool, Float, Params, UserError
from vit_jax.data.image_preprocessing import Preprocessing, normalize
from vit_jax.distributed import meshes, sharding_rules
from vit_jax.experiment.build import Experiment
from vit_jax.models import Model, ViTConfig
from vit_jax.training.update import TrainState

Features = Callable[[Params, Batch], tuple[Float[Array, 'b d'], Bool[Array, 'b']]]


class Programs(NamedTuple):
    """The compiled functions of an experiment."""

    state: TrainState  # shape, type and sharding of each array
    update: Callable[..., Any]
    eval_steps: dict[str, Callable[..., Any]]
    features: Features | None  # for the few-shot evaluation


def compile_programs(experiment: Experiment, report: Callable[[str], Any]) -> Programs:
    """Compiles an experiment; calls `report` with a line about each array that is split."""
    state, mesh = abstract_state(experiment), experiment.mesh
    for line in sharding_rules.sharding_report(state, shardings_of(state), mesh):
        report(line)
    report(f'compile for {mesh.size} x {mesh.devices.flat[0].device_kind}')
    update = lower_update(experiment, state).compile()
    eval_steps, features = compile_eval_steps(experiment, state.eval_params), None
    if experiment.probes is not None:
        features = compile_features(
            experiment.model,
            experiment.preprocessing,
            mesh,
            experiment.eval_batch_size,
            state.eval_params,
        )
    return Programs(state, update, eval_steps, features)


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


def abstract_batch(
    mesh: Mesh, size: int, image_size: tuple[int, int], label_shape: tuple[int, ...] = ()
) -> Batch:
    """Shape, type and sharding of each array of a batch, as `data.loading` makes it."""
    shapes = {
        'images': ((size, *image_size, 3), jnp.uint8),
        'labels': ((size, *label_shape), jnp.int32),
        'mask': ((size,), jnp.bool_),
        'epoch': ((size,), jnp.int32),
        'example': ((size,), jnp.int32),
    }
    sharding = meshes.batch_sharding(mesh)
    return {name: jax.ShapeDtypeStruct(*x, sharding=sharding) for name, x in shapes.items()}


def lower_update(experiment: Experiment, state: TrainState) -> Any:
    """Traces the update step, which takes over the memory of its state; compiles nothing yet."""
    size, reader = experiment.config.batch_size, experiment.train
    batch = abstract_batch(experiment.mesh, size, reader.size, reader.source.label_shape)
    out_shardings = shardings_of(state), meshes.replicated(experiment.mesh)
    options = {'donate_argnums': 0, 'out_shardings': out_shardings}
    return meshes.jit_on(experiment.update, experiment.mesh, **options).lower(state, batch)


def compile_eval_steps(experiment: Experiment, params: Params) -> dict[str, Callable[..., Any]]:
    """The sums over a batch of each evaluation; those whose labels are alike share a program."""
    by_shape: dict[tuple[int, ...], Any] = {}
    mesh, size = experiment.mesh, experiment.eval_batch_size
    for name, reader in experiment.evals.items():
        shape = reader.source.label_shape
        if shape not in by_shape:
            batch = abstract_batch(mesh, size, reader.size, shape)
            function, everywhere = experiment.eval_steps[name], meshes.replicated(mesh)
            step = meshes.jit_on(function, mesh, out_shardings=everywhere)
            by_shape[shape] = step.lower(params, batch).compile()
    return {name: by_shape[r.source.label_shape] for name, r in experiment.evals.items()}


def compile_features(
    model: Model, preprocessing: Preprocessing, mesh: Mesh, batch_size: int, params: Params
) -> Features:
    """Features and mask of a batch, replicated on every device; `params` are abstract."""
    if isinstance(model.config, ViTConfig) and model.config.pool == 'none':
        raise UserError('fewshot: pool=none gives features of every token, not of the image')

    def features(params: Params, batch: Batch) -> tuple[Float[Array, 'b d'], Bool[Array, 'b']]:
        return model.features(params, normalize(batch['images'], preprocessing)), batch['mask']

    batch = abstract_batch(mesh, batch_size, model.config.image_size)
    program = meshes.jit_on(features, mesh, out_shardings=meshes.replicated(mesh))
    return program.lower(params, batch).compile()
