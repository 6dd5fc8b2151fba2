"""Every field of a configuration matters: with another value there is another program or batch.

A program is seen in its jaxpr and in where its arrays are, a batch in its bytes. What changes
neither is named in ELSEWHERE, with the test that sees its effect.
"""

import functools
import hashlib
import itertools
import pathlib
import re
import typing

import jax
import numpy as np
import pytest

from tests import tiny
from vit_jax.base import records
from vit_jax.base.records import Record
from vit_jax.config import EvalConfig, TrainConfig
from vit_jax.data.augmentation import Augmentation, RandAugment
from vit_jax.data.image_preprocessing import (
    CentralCrop,
    InceptionCrop,
    Preprocessing,
    RandomCrop,
    Resize,
)
from vit_jax.data.loading import abstract_batch, training_batches
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.experiment import training_run
from vit_jax.experiment.build import build_experiment
from vit_jax.models import Backbone, ResNetConfig
from vit_jax.training.duration import Duration
from vit_jax.training.masked_patches import MaskedPatches
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

ROOT = pathlib.Path(__file__).parent.parent


def base(**changes):
    model = tiny.model(num_classes=None, depth=2)
    return tiny.experiment(**({'model': model} | changes))


def with_model(**values):
    return base(model=tiny.model(num_classes=None, depth=2, **values))


def with_optimizer(**values):
    return base(optimizer=OptimizerConfig(**values))


def with_augmentation(**values):
    return base(augmentation=Augmentation(**values))


def with_objective():
    return base(objective=MaskedPatches())


def with_mesh(**values):
    return base(mesh=MeshConfig(**({'fsdp': 8, 'fsdp_min_mb': 0.0001} | values)))


RESNET = ResNetConfig(image_size=(8, 8), backbone=Backbone(blocks=(1,), width=32))
SIGMA = Duration(fraction=0.5)
# The field, another value for it, and the experiment in which it matters.
CHANGES = [
    ('train_split', 'train[:100]', base()),
    ('eval_split', 'test[:8]', base()),
    ('classes', ('3', '5'), base()),
    ('model', RESNET, base()),
    ('model.image_size', (16, 8), base()),
    ('model.patch_size', (2, 4), base()),
    ('model.width', 32, base()),
    ('model.depth', 3, base()),
    ('model.mlp_dim', 64, base()),
    ('model.num_heads', 4, base()),
    ('model.pool', 'gap', base()),
    ('model.final_norm', 'after_pool', base()),
    ('model.representation_size', 8, base()),
    ('model.positions', 'sincos2d', base()),
    ('model.positions_at', 'every_layer', base()),
    ('model.class_tokens', 2, base()),
    ('model.registers', 2, base()),
    ('model.pre_norm', True, base()),
    ('model.layer_scale', 0.1, base()),
    ('model.gelu', None, base()),
    ('model.blocks_without_skips', (1,), base()),
    ('model.gelu', 'exact', base()),
    ('model.layer_norm_epsilon', 1e-3, base()),
    ('model.norm', 'rms', base()),
    ('model.qkv_bias', False, base()),
    ('model.qk_norm', True, base()),
    ('model.parallel', True, base()),
    ('model.head_bias', -10.0, base()),
    ('model.backbone', Backbone(blocks=(), width=32), with_model(patch_size=(1, 1))),
    ('model.backbone.blocks', (2,), base(model=RESNET)),
    ('model.backbone.width', 64, base(model=RESNET)),
    ('image_size', (16, 8), base()),
    ('preprocessing', Preprocessing(crop=CentralCrop(scale=2.0)), base()),
    ('preprocessing.mean', (1.0, 2.0, 3.0), base(preprocessing=Preprocessing())),
    ('preprocessing.std', (1.0, 2.0, 3.0), base(preprocessing=Preprocessing())),
    (
        'preprocessing.crop.scale',
        2.0,
        base(preprocessing=Preprocessing(crop=CentralCrop(scale=1.5))),
    ),
    (
        'preprocessing.crop.keep_aspect',
        False,
        base(image_size=(16, 8), preprocessing=Preprocessing(crop=CentralCrop(scale=1.5))),
    ),
    (
        'preprocessing.crop.rounding',
        'timm',
        base(image_size=(16, 8), preprocessing=Preprocessing(crop=CentralCrop(scale=1.45))),
    ),
    (
        'preprocessing.crop.resize',
        'bicubic_antialias',
        base(image_size=(16, 8), preprocessing=Preprocessing(crop=Resize())),
    ),
    (
        'preprocessing.crop.resize',
        'bicubic_antialias',
        base(image_size=(16, 8), preprocessing=Preprocessing(crop=CentralCrop())),
    ),
    ('model.head_bias', -10.0, base(model=RESNET)),
    ('model.image_size', (16, 8), base(model=RESNET)),
    ('augmentation.crop', InceptionCrop(), base()),
    ('augmentation.crop.area', (0.9, 1.0), with_augmentation(crop=InceptionCrop())),
    ('augmentation.crop.aspect', (1.0, 1.0), with_augmentation(crop=InceptionCrop())),
    ('augmentation.crop.scale', 2.0, with_augmentation(crop=RandomCrop())),
    (
        'augmentation.crop.keep_aspect',
        False,
        base(image_size=(16, 8), augmentation=Augmentation(crop=RandomCrop())),
    ),
    ('augmentation.shift_pixels', 1, base()),
    ('augmentation.flip', True, base()),
    ('augmentation.randaugment.layers', 1, base()),
    (
        'augmentation.randaugment.magnitude',
        15.0,
        with_augmentation(randaugment=RandAugment(layers=1)),
    ),
    (
        'augmentation.randaugment.contrast',
        'pixel_count',
        with_augmentation(randaugment=RandAugment(layers=1)),
    ),
    ('augmentation.erasing', 0.5, base()),
    ('augmentation.mixup', 0.5, base()),
    ('augmentation.cutmix', 0.5, base()),
    ('total', Duration(steps=20), base()),
    *((f'total.{unit}', 50, base()) for unit in ('steps', 'epochs', 'examples')),
    ('schedule.warmup.fraction', 0.5, base()),
    ('batch_size', 24, base()),
    ('accumulation_steps', 2, base()),
    ('objective', MaskedPatches(), base()),
    ('objective.fraction', 0.25, with_objective()),
    ('objective.masked', 0.5, with_objective()),
    ('objective.replaced', 0.2, with_objective()),
    ('objective.target', 'pixels', with_objective()),
    ('loss.kind', 'sigmoid', base()),
    ('loss.label_smoothing', 0.1, base()),
    ('optimizer.kind', 'sgd', base()),
    ('optimizer.b1', 0.5, base()),
    ('optimizer.b2', 0.5, base()),
    ('optimizer.epsilon', 1e-3, base()),
    ('optimizer.momentum', 0.5, with_optimizer(kind='sgd')),
    ('optimizer.clip_norm', 0.1, base()),
    ('optimizer.moment_dtype', 'bfloat16', base()),
    ('optimizer.weight_decay', 0.2, base()),
    ('optimizer.head_weight_decay', 3.0, base()),
    ('optimizer.decay_pattern', '.*', base()),
    ('optimizer.layer_decay', 0.5, base()),
    ('optimizer.lr_multipliers', (('head/.*', 10.0),), base()),
    ('optimizer.trained_blocks', 1, base()),
    ('optimizer.frozen', ('pos_embedding',), base()),
    ('schedule.kind', 'constant', base()),
    ('schedule.learning_rate', 0.5, base()),
    ('schedule.warmup', Duration(steps=1), base()),
    ('schedule.linear_end', 1e-3, base(schedule=ScheduleConfig(kind='linear'))),
    ('schedule.rsqrt_timescale', Duration(steps=7), base(schedule=ScheduleConfig(kind='rsqrt'))),
    ('schedule.cooldown', Duration(steps=3), base()),
    ('regularization.dropout', 0.1, base()),
    ('regularization.stochastic_depth', 0.1, base()),
    ('polyak_decay', 0.9, base()),
    ('seed', 1, base()),
    ('eval_batch_size', 24, base()),
    ('evals', {'other': EvalConfig(split='train[:9]')}, base(eval_split='test')),
    ('compute.dtype', 'bfloat16', base()),
    ('compute.remat', 'block', base()),  # dots is what a CPU has anyway
    ('compute.unroll', 2, base()),
    ('compute.layout', 'batched', base()),
    ('compute.last_block', 'whole', base()),
    ('mesh.data', 8, with_mesh(data=4, fsdp=-1)),
    ('mesh.fsdp', 4, with_mesh(fsdp=2)),
    ('mesh.tensor', 2, base(mesh=MeshConfig(max_replicated_fraction=1.0))),
    ('mesh.fsdp_min_mb', 0.001, with_mesh(max_replicated_fraction=1.0)),
    ('mesh.rules', (('encoder/block/mlp/dense1/bias', (None, None)),), with_mesh()),
]

# Fields whose effect is no program and no batch here: the record, its fields, and who sees them.
RUN, PROBING = 'tests/experiment/test_training_run.py', 'tests/evaluation/test_probing.py'
OPENING, FORMATS = 'tests/data/sources/test_opening.py', 'tests/checkpoints/formats/test_opening.py'
LOADING, PROBES = 'tests/data/test_loading.py', 'tests/evaluation/test_probes.py'
EPISODES = 'tests/evaluation/test_episodes.py'
PROTOCOL = 'test_the_few_shot_file_holds_the_whole_protocol'
SETS = 'test_every_set_has_its_result_and_one_that_is_missing_is_named'
EVALS = 'test_several_evaluations_in_one_run_each_with_its_own_labels'
ELSEWHERE = [
    ('TrainConfig', 'data', RUN, 'test_a_folder_of_images_trains_and_its_classes_are_kept'),
    ('TrainConfig', 'start_from', RUN, 'test_fine_tuning_begins_with_the_body_of_the_checkpoint'),
    (
        'TrainConfig',
        'reuse_head',
        RUN,
        'test_more_photos_and_a_new_class_start_from_the_head_of_the_old_ones',
    ),
    (
        'TrainConfig',
        'fewshot log_every_steps eval_every_steps tensorboard',
        RUN,
        'test_a_run_leaves_its_numbers_its_configuration_and_a_card',
    ),
    (
        'TrainConfig',
        'head',
        'tests/test_pretrained.py',
        'test_a_head_of_ones_own_is_trained_from_a_checkpoint_and_handed_over_to_use_it',
    ),
    ('TrainConfig', 'checkpoint_every_steps', RUN, 'test_ten_steps_are_five_and_crashes_and_five'),
    ('TrainConfig', 'keep_checkpoints', RUN, 'test_only_as_many_checkpoints_are_kept_as_asked_for'),
    (
        'TrainConfig',
        'max_skipped_steps',
        RUN,
        'test_poisoned_batches_are_skipped_and_counted_and_training_goes_on',
    ),
    ('EvalConfig', 'data split labels every_steps', RUN, EVALS),
    (
        'ViTConfig ResNetConfig',
        'num_classes',
        RUN,
        'test_values_that_do_not_fit_are_named_before_anything_is_written',
    ),
    (
        'ViTConfig ResNetConfig',
        'channels',
        'tests/test_pretrained.py',
        'test_grey_images_give_the_same_logits_with_one_channel_or_five',
    ),
    (
        'ViTConfig',
        'patch_outputs',
        'tests/models/test_masked_patches.py',
        'test_a_head_of_patches_and_a_mask_token_leave_features_and_logits_as_they_are',
    ),
    (
        'ViTConfig',
        'position_resize',
        'tests/checkpoints/test_resize.py',
        'test_each_way_of_resizing_is_that_of_its_library',
    ),
    (
        'ViTConfig ResNetConfig',
        'head',
        'tests/models/test_heads.py',
        'test_a_function_gives_the_head_and_logits_are_what_it_computes',
    ),
    (
        'Compute',
        'attention',
        'tests/models/test_compute.py',
        'test_a_long_sequence_has_a_fused_kernel_where_there_is_one',
    ),
    (
        'MeshConfig',
        'max_replicated_fraction',
        'tests/distributed/test_meshes.py',
        'test_a_state_that_stays_replicated_although_it_should_be_split_is_an_error',
    ),
    (
        'Preprocessing',
        'exif_rotation',
        'tests/data/test_image_preprocessing.py',
        'test_each_door_turns_an_image_or_leaves_it',
    ),
    (
        'HeldOut',
        'fraction seed',
        OPENING,
        'test_a_folder_without_splits_holds_out_a_share_of_every_class',
    ),
    ('Hints', 'grid', FORMATS, 'test_an_ambiguous_grid_is_an_error_that_names_what_settles_it'),
    ('Hints', 'num_heads', FORMATS, 'test_heads_that_the_arrays_do_not_show_are_asked_for'),
    (
        'Hints',
        'gelu layer_norm_epsilon',
        FORMATS,
        'test_what_a_file_cannot_say_is_said_when_it_is_written',
    ),
    (
        'LoaderConfig',
        'placement device_mb threads',
        LOADING,
        'test_batches_gathered_on_the_device_are_those_read_on_the_host',
    ),
    (
        'InceptionCrop',
        'reduced',
        'tests/data/test_jpeg_regions.py',
        'test_a_large_image_is_decoded_at_a_fraction_that_leaves_two_pixels_for_each',
    ),
    (
        'LoaderConfig',
        'on_unreadable',
        RUN,
        'test_an_unreadable_image_stops_training_unless_it_may_be_skipped',
    ),
    ('LoaderConfig', 'max_pixels', RUN, 'test_an_image_above_the_bound_cannot_be_read'),
    ('FewshotConfig', 'shots seeds l2', RUN, PROTOCOL),
    ('FewshotConfig', 'every_steps', RUN, 'test_nothing_is_compiled_after_the_first_evaluation'),
    ('FewshotConfig', 'sets neighbours logistic episodes', PROBING, SETS),
    (
        'EpisodesConfig',
        'ways shots queries episodes classes',
        EPISODES,
        'test_a_report_has_the_classes_to_draw_from_and_each_number_of_shots',
    ),
    (
        'EpisodesConfig',
        'seed',
        EPISODES,
        'test_the_first_episodes_of_many_are_those_of_few_and_a_seed_changes_them',
    ),
    (
        'EpisodesConfig',
        'classifier',
        EPISODES,
        'test_what_is_apart_is_told_apart_and_what_is_not_is_chance',
    ),
    ('FewshotConfig', 'crop', PROBING, 'test_the_crop_of_the_evaluation_is_told'),
    (
        'FewshotConfig',
        'feature_cache',
        PROBING,
        'test_kept_features_give_the_same_results_and_are_checked',
    ),
    ('ProbeSet', 'data train_split test_split', PROBING, SETS),
    (
        'LogisticConfig',
        'l2 validation_fraction',
        PROBES,
        'test_the_strength_is_chosen_on_a_part_of_the_training_images',
    ),
    ('LogisticConfig', 'max_iterations tolerance', PROBES, 'test_a_fit_that_was_stopped_says_so'),
]


def fields(cls):
    """(record, field) of a record and of those that it may hold; one that is a record is none."""
    for name, hint in records.hints(cls).items():
        options = [
            o for option in records.alternatives(hint) for o in (option, *typing.get_args(option))
        ]
        within = [o for o in options if isinstance(o, type) and issubclass(o, Record)]
        if not within or type(None) in options:
            yield cls.__name__, name
        for option in within:
            yield from fields(option)


def holder_of(config, field):
    *parents, name = field.split('.')
    return functools.reduce(getattr, parents, config), name


def changed(config, field, value):
    """A copy with another value, as the command line assigns it."""
    config = records.checked(config, where='config')
    holder, name = holder_of(config, field)
    holder.override(name, value)
    return config


def effects(config):
    """The programs, where their arrays are, and the first batches, as text."""
    experiment = build_experiment(config)
    state = training_run.abstract_state(experiment)
    size, reader = experiment.model.config.image_size, experiment.train
    batch = abstract_batch(experiment.mesh, experiment.config.batch_size, size)
    programs = [
        jax.make_jaxpr(experiment.init)(),
        jax.make_jaxpr(experiment.update)(state, batch),
        *(
            jax.make_jaxpr(evaluator.step)(
                state.eval_params, evaluator.batches.abstract(experiment.evals[name])
            )
            for name, evaluator in experiment.evaluators.items()
        ),
    ]
    batches = training_batches(
        experiment.loader_of(reader),
        steps=range(2),
        batch_size=experiment.config.batch_size,
        seed=config.seed,
    )
    digest = hashlib.sha256()
    for array in jax.tree.leaves([*batches]):
        digest.update(np.asarray(array).tobytes())
    evaluated = {name: len(one.source) for name, one in experiment.evals.items()}
    constants = [str(c) for program in programs for c in program.consts]
    text = f'{programs} {constants} {state} {digest.hexdigest()} {evaluated} {experiment.length}'
    return re.sub(r'0x[0-9a-f]+', '', text)


_BEFORE = {}


def before(config):
    """The effects of an experiment, computed once for all that are written alike."""
    name = repr(config)
    if name not in _BEFORE:
        _BEFORE[name] = effects(records.checked(config, where='config'))
    return _BEFORE[name]


@pytest.mark.full
@pytest.mark.parametrize(
    'field, value, config', CHANGES, ids=lambda value: value if isinstance(value, str) else ''
)
def test_another_value_is_another_program_or_batch(field, value, config):
    assert effects(changed(config, field, value)) != before(config)


def test_the_same_values_are_the_same_programs_and_batches():
    """Of what is compared above: nothing in it is new each time."""
    assert effects(base()) == effects(base())


def test_no_field_is_forgotten():
    holders = (holder_of(config, field) for field, _, config in CHANGES)
    seen = {(type(holder).__name__, name) for holder, name in holders}
    for kinds, names, file, test in ELSEWHERE:
        seen |= set(itertools.product(kinds.split(), names.split()))
        assert f'def {test}(' in (ROOT / file).read_text(), test
    assert not set(fields(TrainConfig)) - seen
