"""The pure functions of an experiment: first state, training steps, and sums of evaluations.

The functions are made from the structure of the experiment, and take its values as an argument
(see `values`). One compilation then serves all values.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from vit_jax.base import Array, Batch, Key, Params
from vit_jax.checkpoints import transfer
from vit_jax.config import StepVariant, TrainConfig
from vit_jax.data.augmentation import augment
from vit_jax.data.image_preprocessing import Preprocessing, normalize
from vit_jax.distributed import meshes
from vit_jax.evaluation import evaluator
from vit_jax.evaluation.evaluator import EvalStep
from vit_jax.evaluation.features import make_feature_sums
from vit_jax.experiment.values import Values, contains_function, insert_values
from vit_jax.models import Compute, Model, ModelConfig, Regularization, abstract_params
from vit_jax.models.model import init_params as init_model_params
from vit_jax.tasks.base import LossSums, Task
from vit_jax.training import losses
from vit_jax.training.objectives import TASK_PARAMS
from vit_jax.training.optimizer import look_up, make_optimizer
from vit_jax.training.param_groups import ParamGroups
from vit_jax.training.sharpness import make_sharpener
from vit_jax.training.update import INITIALIZE, TrainState, key_for, make_update

Update = Callable[..., tuple[TrainState, losses.StepMetrics]]


class Structure(NamedTuple):
    """What the programs of an experiment depend on, besides the shapes of their arguments."""

    config: TrainConfig  # the result of `remove_values`
    model: ModelConfig  # the resolved architecture
    compute: Compute
    mesh: Mesh
    preprocessing: Preprocessing  # of pixels; its crop runs on the host
    task: Task

    def build_model(
        self, patch_size: int | None = None, regularization: Regularization | None = None
    ) -> Model:
        """Builds the model with a patch size; None: the size of the architecture."""
        return transfer.build_at_patch_size(
            self.model,
            patch_size,
            regularization=regularization,
            # Each patch size has the fastest attention for its number of tokens.
            compute=self.compute,
            platform=self.mesh.devices.flat[0].platform,
        )

    @property
    def normalize(self) -> Callable[..., Any]:
        """The function from pixels (0 to 255) to the input of the model."""
        return functools.partial(normalize, preprocessing=self.preprocessing)


class Functions:
    """The functions of a structure. jax traces them with the structure's mesh (see `with_mesh`).

    - init(values, params=None) -> state before the first step
    - init_params(values) -> initial parameters
    - update(variant) -> training step (state, batch, values, frozen=None, loss_limit=inf)
    - evaluate(patch_size) -> step (params, batch, values) of an evaluator
    - features() -> step (params, batch) of an evaluator of features
    """

    def __init__(self, structure: Structure, groups: ParamGroups):
        on_mesh = functools.partial(meshes.with_mesh, structure.mesh)
        init = make_init(structure, groups)

        def init_params(values: Values) -> Params:
            return init(values).params

        @functools.cache
        def update(variant: StepVariant) -> Update:
            return on_mesh(make_variant_update(structure, groups, variant))

        @functools.cache
        def evaluate(patch_size: int | None) -> EvalStep:
            return on_mesh(evaluator.as_step(make_eval_sums(structure, patch_size)))

        @functools.cache
        def features() -> EvalStep:
            sums = make_feature_sums(structure.build_model(), structure.preprocessing)
            return on_mesh(evaluator.as_step(sums))

        self.init = on_mesh(init)
        self.init_params = on_mesh(init_params)
        self.update = update
        self.evaluate = evaluate
        self.features = features


_FUNCTIONS: dict[Hashable, Functions] = {}  # of the newest structures
_MAX_STRUCTURES = 32  # most studies have fewer; the programs of each are kept in memory


def make_functions(structure: Structure, groups: ParamGroups) -> Functions:
    """Returns the functions of a structure. Equal structures get the same function objects.

    In a process, jax compiles the same function object only once for the same shapes. A structure
    that contains functions of the user always gets new objects, because these functions may change.
    """
    if contains_function((structure.config, structure.model)):
        return Functions(structure, groups)
    trained = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(groups.trained)]
    without_mesh = [field for field in structure if field is not structure.mesh]
    key = structure.mesh, ' '.join(map(repr, without_mesh)), tuple(trained)
    functions = _FUNCTIONS.pop(key, None) or Functions(structure, groups)
    _FUNCTIONS[key] = functions
    if len(_FUNCTIONS) > _MAX_STRUCTURES:
        del _FUNCTIONS[next(iter(_FUNCTIONS))]  # the oldest one
    return functions


def init_trained_params(
    task: Task, config: TrainConfig, model: ModelConfig, key: Key[Array, '']
) -> Params:
    """Initializes the parameters of a model and of the task."""
    return init_model_params(model, key) | _init_own_params(task, config, model, key)


def abstract_trained_params(task: Task, config: TrainConfig, model: ModelConfig) -> Params:
    """Returns shape and dtype of each trained parameter."""
    init = functools.partial(_init_own_params, task, config, model)
    return abstract_params(model) | jax.eval_shape(init, jax.random.key(0))


def _init_own_params(
    task: Task, config: TrainConfig, model: ModelConfig, key: Key[Array, '']
) -> Params:
    own = task.init_params(config, model, jax.random.fold_in(key, 0))
    return {TASK_PARAMS: own} if own else {}


def make_init(structure: Structure, groups: ParamGroups) -> Callable[..., TrainState]:
    """Makes the function (values, params=None) -> state before the first step."""

    def init(values: Values, params: Params | None = None) -> TrainState:
        config = insert_values(structure.config, values)
        optimizer = _make_optimizer(config, values, groups)
        if params is None:
            key = key_for(config.seed, INITIALIZE, 0)
            params = init_trained_params(structure.task, config, structure.model, key)
        return TrainState.initial(params, optimizer, with_ema=config.ema_decay is not None)

    return init


def make_variant_update(structure: Structure, groups: ParamGroups, variant: StepVariant) -> Update:
    """Makes the training step (state, batch, values, frozen=None, loss_limit=inf)."""
    targets = functools.partial(losses.make_targets, num_classes=structure.task.num_classes)

    def update(
        state: TrainState,
        batch: Batch,
        values: Values,
        frozen: Params | None = None,
        loss_limit: Any = jnp.inf,
    ) -> tuple[TrainState, losses.StepMetrics]:
        config = insert_values(structure.config, values)
        regularization = variant.regularize(config.regularization)
        model = structure.build_model(variant.patch_size, regularization)
        step = make_update(
            structure.task.train_sums(config, model, structure.normalize),
            _make_optimizer(config, values, groups),
            look_up(values.learning_rates),
            augment=functools.partial(augment, config=config.augmentation, targets_of=targets),
            stop_frozen_gradients=groups.stop_frozen_gradients,
            seed=config.seed,
            accumulation_steps=config.accumulation_steps,
            ema_rate=values.ema_rate,
            sharpen=make_sharpener(config.optimizer.sharpness, look_up(values.radii)),
        )
        return step(state, batch, frozen, loss_limit)

    return update


def _make_optimizer(
    config: TrainConfig, values: Values, groups: ParamGroups
) -> optax.GradientTransformation:
    groups = groups._replace(lr_factors=values.lr_factors)
    return make_optimizer(config.optimizer, look_up(values.learning_rates), groups)


def make_eval_sums(structure: Structure, patch_size: int | None) -> LossSums:
    """Makes the function (params, batch, values) -> sums of an evaluation."""
    model = structure.build_model(patch_size)

    def sums(params: Params, batch: Batch, values: Values) -> losses.BatchSums:
        config = insert_values(structure.config, values)
        return structure.task.eval_sums(config, model, structure.normalize)(params, batch)

    return sums
