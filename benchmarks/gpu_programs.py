"""Compiles the programs of many models for one H200, without a GPU; prints the name of each.

    PYTHONPATH=.:.cache/gpu_compiler-VERSION python -m benchmarks.gpu_programs [NAME ...]

XLA aborts the process where a check of its own fails: the last name is that of the program.
`tests/test_gpu_programs.py` runs this. The folder in PYTHONPATH holds jax's plugin for GPUs, in
the VERSION of jax; `.ci/run` and `.ci/nightly` make it with

    pip install --no-deps --target .cache/gpu_compiler-VERSION \
      jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax

from vit_jax.base import Batch, Params
from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation, augreg
from vit_jax.distributed import meshes
from vit_jax.evaluation import linear_probe
from vit_jax.evaluation.features import make_feature_evaluator
from vit_jax.evaluation.linear_probe import LinearProbe, LinearProbeConfig
from vit_jax.evaluation.probing import FewshotConfig
from vit_jax.experiment import training_run
from vit_jax.experiment.build import Experiment, build_experiment
from vit_jax.models import (
    Backbone,
    Compute,
    Regularization,
    ResNetConfig,
    ViTConfig,
    variant,
)
from vit_jax.planning import ahead_of_time, memory_plan
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.objectives import MaskedAutoencoder, MaskedPatches
from vit_jax.training.optimizer import OptimizerConfig
from vit_jax.training.sharpness import Sam
from vit_jax.training.update import TrainState

Step = Literal['train', 'eval', 'features', 'linear probe']


class Program(NamedTuple):
    """One step of one model."""

    model: ViTConfig | ResNetConfig
    compute: Compute = Compute()
    step: Step = 'train'
    changes: dict = {}  # of the experiment


VIT = ViTConfig(
    image_size=(48, 48),  # 36 patches and the class token
    patch_size=(8, 8),
    width=96,
    depth=1,
    mlp_dim=192,
    num_heads=3,
)
PAIR = Backbone(blocks=(1, 1), width=32)
HYBRID = dataclasses.replace(VIT, backbone=PAIR, patch_size=(1, 1), depth=1, pool='gap')
RESNET = ResNetConfig(image_size=(48, 48), backbone=PAIR)


def vit(**changes: Any) -> ViTConfig:
    """Returns VIT with changes."""
    return dataclasses.replace(VIT, **changes)


def hybrid(blocks: tuple[int, ...], **changes: Any) -> ViTConfig:
    """Returns HYBRID with another ResNet."""
    return dataclasses.replace(HYBRID, backbone=Backbone(blocks=blocks, width=32), **changes)


def odd(model: ViTConfig | ResNetConfig) -> Any:
    """The feature map of its first stage is 9x9 in place of 12x12."""
    return dataclasses.replace(model, image_size=(36, 36))


DINO = {'gelu': None, 'layer_scale': 1e-5, 'registers': 4, 'pool': 'cls_gap', 'positions': 'rope'}
VIT_22B = {'norm': 'rms', 'qk_norm': True, 'parallel': True, 'positions': 'learned2d'}
NOISE = {
    'regularization': Regularization(dropout=0.1, stochastic_depth=0.1),
    'augmentation': augreg('medium2'),
}
MASKED = {'objective': MaskedPatches()}
AUTOENCODER = {'objective': MaskedAutoencoder()}
VIT_5 = {
    'norm': 'rms',
    'qk_norm': True,
    'layer_scale': 1e-4,
    'registers': 4,
    'positions': 'learned_rope',
}
RECIPE = {
    'regularization': Regularization(stochastic_depth=0.1, patch_dropout=0.5),
    'patch_dropout_until': Duration(fraction=0.9),
    'spike_deviations': 6.0,
    'augmentation': Augmentation(three_augment=True, color_jitter=0.3, mixup=0.8, cutmix=1.0),
    'loss': LossConfig(kind='sigmoid', binary_targets=True),
    'optimizer': OptimizerConfig(kind='lamb', weight_decay=0.05, sharpness=Sam()),
}
FLEXIBLE = {'patch_sizes': (4, 8), 'evals': {}}
# B/16 as it is trained. The other programs are small; unrelated options share one.
PROGRAMS = {
    'B/16': Program(variant('B/16')),
    'vit, cudnn, dropout and RandAugment': Program(
        vit(depth=2), Compute(attention='cudnn'), changes=NOISE
    ),
    'vit, blockwise, as in DINOv3': Program(vit(**DINO), Compute(attention='blockwise')),
    'vit, xla, batched, as in ViT-22B': Program(
        vit(**VIT_22B), Compute(layout='batched', attention='xla')
    ),
    'vit, float32, attention pooling, heads of 12, relative positions': Program(
        vit(width=48, num_heads=4, pool='map', positions='relative'), Compute(dtype='float32')
    ),
    'vit, masked autoencoder': Program(VIT, changes=AUTOENCODER),
    'vit, remat=dots, masked patches': Program(VIT, Compute(remat='dots'), changes=MASKED),
    'vit, as in ViT-5, LAMB, SAM and PatchDropout': Program(vit(**VIT_5), changes=RECIPE),
    'vit, features': Program(VIT, step='features'),
    'vit, two patch sizes': Program(VIT, changes=FLEXIBLE),
    'vit, cosine head, eval': Program(vit(head='cosine:64'), step='eval'),
    'vit, linear probe': Program(vit(depth=4), step='linear probe'),
    'hybrid, Muon': Program(HYBRID, changes={'optimizer': OptimizerConfig(kind='muon')}),
    'hybrid, odd, float32': Program(odd(HYBRID), Compute(dtype='float32')),
    'hybrid of one stage, batched': Program(
        hybrid((1,), patch_size=(2, 2)), Compute(layout='batched')
    ),
    'hybrid of a root': Program(hybrid((), patch_size=(2, 2))),
    'hybrid, odd, features': Program(odd(HYBRID), step='features'),
    'resnet': Program(RESNET),
    'resnet, odd, batched, remat=dots': Program(
        odd(RESNET), Compute(layout='batched', remat='dots')
    ),
    'resnet, odd, eval': Program(odd(RESNET), step='eval'),
}


def lower_probe(experiment: Experiment, params: Params) -> Any:
    """Lowers a step of the linear probe: the frozen model, and the update of all heads."""
    config = LinearProbeConfig(batch_size=32)
    batches = experiment.batches
    probe = LinearProbe(config, experiment.model, experiment.preprocessing, batches, print)
    state = linear_probe.init_state(config, jax.random.key(0), VIT.width, 10)

    def step(params: Params, state: Any, batch: Batch) -> Any:
        vectors = probe.compute_vectors(params, batch['images'])
        return linear_probe.update(config, state, vectors, jax.nn.one_hot(batch['labels'], 10))

    abstract = jax.eval_shape(lambda: state)
    jitted = meshes.jit_on(step, experiment.mesh)
    return jitted.lower(params, abstract, batches.abstract(experiment.train_reader))


def prepare(program: Program, devices: Sequence[jax.Device]) -> tuple[Experiment, TrainState]:
    """Builds the experiment and the abstract state of a program for the given devices."""
    optimizer = OptimizerConfig(weight_decay=0.1, clip_norm=1.0)
    config = TrainConfig(
        data='digits',
        model=program.model,
        total=Duration(steps=100),
        batch_size=32,
        compute=program.compute,
        fewshot=FewshotConfig(),
        **({'optimizer': optimizer} | program.changes),
    )
    config = memory_plan.with_dummy_data(config, num_classes=10, num_images=1000)
    experiment = build_experiment(config, devices=devices)
    return experiment, training_run.abstract_state(experiment)


def compile_program(program: Program, where: ahead_of_time.Topology) -> None:
    """Compiles a program with the options of a run."""
    experiment, state = prepare(program, where.devices)
    with ahead_of_time.assume_cudnn():
        if program.step == 'train':
            for step_variant in experiment.config.step_variants:
                lowered = training_run.lower_update(experiment, state, step_variant)
                ahead_of_time.compile_for(where, lowered)
            return
        if program.step == 'linear probe':
            ahead_of_time.compile_for(where, lower_probe(experiment, state.eval_params))
            return
        if program.step == 'eval':
            for name, evaluator in experiment.evaluators.items():
                evaluator.compile(state.eval_params, experiment.eval_readers[name])
        else:
            evaluator = make_feature_evaluator(
                experiment.model, experiment.preprocessing, experiment.batches
            )
            evaluator.compile(state.eval_params, experiment.train_reader)


def main(names: list[str]) -> None:
    """Compiles the named programs, or all."""
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_enable_compilation_cache', False)  # it asks the devices
    where = ahead_of_time.find_topology('h200:1x1')
    for name in names or PROGRAMS:
        print(name, flush=True)
        compile_program(PROGRAMS[name], where)


if __name__ == '__main__':
    main(sys.argv[1:])
