"""Help about the fields of a configuration, and hints for wrong names and values."""

import collections.abc
import dataclasses
import difflib
import inspect
import re
import textwrap
import typing
from collections.abc import Collection, Sequence
from typing import Any

from vit_jax.base import records
from vit_jax.base.records import Record
from vit_jax.models import ViTConfig
from vit_jax.training.duration import Duration

_WIDTH = 96
# FIELD, or FIELD=VALUE: its names in timm, transformers, keras, big_vision and Lightning.
# A name that resembles the field needs no entry.
SYNONYMS = {
    'start_from': 'pretrained model_name arch checkpoint init_from model_init finetune weights',
    'image_size': 'img_size input_size resolution size',
    'held_out.fraction': 'validation_split val_split val_fraction test_size',
    'accumulation_steps': 'gradient_accumulation_steps grad_accum grad_accum_steps accum_iter',
    'total.epochs': 'num_train_epochs num_epochs max_epochs total_epochs n_epochs',
    'total.steps': 'max_steps total_steps num_steps num_train_steps iterations',
    'loss': 'criterion loss_fn class_weights class_weight',
    'loss.kind=sigmoid': 'bce bce_loss multi_label multilabel',
    'optimizer.kind': 'opt optim optimizer_name optax_name',
    'optimizer.weight_decay': 'decay wd l2_reg',
    'optimizer.b1': 'betas beta1 beta_1 adam_beta1',
    'optimizer.clip_norm': 'grad_clip clip_grad grad_clip_norm clipnorm max_grad_norm',
    'optimizer.layer_decay': 'llrd layer_lr_decay layerwise_lr_decay',
    'optimizer.trained_blocks=0': 'freeze freeze_backbone freeze_encoder linear_probe trainable',
    'schedule.kind': 'sched scheduler lr_scheduler lr_scheduler_type lr_schedule decay_type',
    'schedule.learning_rate': 'lr base_lr peak_lr max_lr',
    'schedule.warmup.fraction': 'warmup_ratio',
    'regularization.stochastic_depth': 'drop_path drop_path_rate stoch_depth stochdepth',
    'polyak_decay': 'ema ema_decay model_ema model_ema_decay use_ema',
    'augmentation.flip': 'hflip horizontal_flip random_flip',
    'augmentation.randaugment': 'aa auto_augment randaug rand_augment',
    'log_every_steps': 'logging_steps log_interval log_every log_every_n_steps log_training_steps',
    'eval_every_steps': 'evaluation_strategy eval_strategy eval_steps val_interval eval_interval',
    'checkpoint_every_steps': 'save_steps save_strategy save_every ckpt_steps checkpoint_steps',
    'keep_checkpoints': 'save_total_limit checkpoint_hist max_to_keep',
    'tensorboard': 'wandb use_wandb log_wandb report_to logger',
    'compute.dtype=bfloat16': 'mixed_precision precision amp bf16 fp16 half',
    'compute.remat': 'gradient_checkpointing grad_checkpointing activation_checkpointing',
    'loader.threads': 'num_workers workers dataloader_num_workers num_parallel_calls',
    'model.width': 'embed_dim hidden_size hidden_dim',
    'model.depth': 'num_layers num_hidden_layers',
    'model.mlp_dim': 'intermediate_size mlp_ratio',
    'model.pool': 'global_pool pooling',
}
# Names for which there is no field: what to do instead.
_NO_FIELD = {
    'resume resume_from resume_from_checkpoint auto_resume': 'run the same command again to resume',
    'early_stopping patience save_best save_best_only load_best_model_at_end': 'there is no best '
    'checkpoint; --config.keep_checkpoints=1000 keeps all that --config.checkpoint_every_steps '
    'saves, and WORKDIR/checkpoints/STEP is used as a checkpoint',
    'num_classes n_classes num_labels': 'leave it out: the number of classes is that of the data',
    'output_dir out_dir save_dir log_dir logdir default_root_dir': 'results go to --workdir=DIR',
    'device devices gpus gpu accelerator num_gpus n_gpu': 'all devices are used; choose with the '
    'environment: JAX_PLATFORMS=cpu, CUDA_VISIBLE_DEVICES=0',
}


def describe_fields(cls: type[Record]) -> str:
    """Returns types, defaults and meanings of all fields, in a section for each record."""
    return '\n\n'.join(_describe_record(kind, paths) for kind, paths in places(cls).items())


def comments(cls: type[Record]) -> dict[str, str]:
    """Returns the comments on the lines of each field of a record, inherited fields too."""
    texts: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        name = ''  # of the field that a line belongs to
        for line in inspect.getsource(owner).splitlines():
            if field := re.match(r' {4}(\w+): ', line):
                name = field[1]
            elif re.match(r' {4}[^ )]', line):
                name = ''
            comment = line.partition('  # ')[2]
            if name and comment:
                texts[name] = f'{texts.get(name, "")} {comment}'.strip()
    return texts


def paths(cls: type[Record]) -> list[str]:
    """Returns the path of each field within a record: `FIELD.FIELD`."""
    holders = [(path, kind) for kind, owned in places(cls).items() for path in owned]
    return [f'{path}.{name}' for path, kind in holders for name in records.hints(kind)]


def suggest(cls: type[Record] | None, name: str, known: Collection[str]) -> str:
    """Ends an error message about a name that is none of the `known` flags or fields.

    The name may be another program's name for a field of the record `cls`, a field elsewhere in
    it, or a misspelled one.
    """
    if cls is None:
        return records.nearest(name, known)
    if text := _translate(name, paths(cls)):
        return text
    # The first of several fields with the same name; a known name rather than a field elsewhere.
    flags = {path.rpartition('.')[2]: f'--{path}' for path in reversed(paths(cls))}
    flags |= {one: one for one in known}
    close = difflib.get_close_matches(name, flags, n=1)
    return f"did you mean '{flags[close[0]]}'?" if close else records.nearest(name, known)


def _translate(name: str, paths: Sequence[str]) -> str | None:
    """Ends an error message about another program's name for a field; None for other names."""
    word = name.lower().replace('-', '_')
    for words, advice in _NO_FIELD.items():
        if word in words.split():
            return advice
    for target, words in SYNONYMS.items():
        field, equals, value = target.partition('=')
        path = next((path for path in paths if path.endswith(f'.{field}')), None)
        if word in words.split() and path is not None:
            return f"did you mean '--{path}{equals}{value}'?"
    return None


def suggest_field(value: Any, kinds: Sequence[type[Record]], where: str) -> str:
    """Ends an error message about a number or a word in place of a record: what to set instead."""
    if len(kinds) > 1:
        choices = ' or '.join(f'--{where}={kind.__name__}' for kind in kinds)
        variant = '; in a file, model=vit_jax.models.variant(NAME) sets the architecture'
        return f': {choices}{variant if ViTConfig in kinds else ""}'
    fields = ', '.join(records.hints(kinds[0]))
    if kinds[0] is Duration:
        unit = 'fraction' if str(value).startswith('0.') else 'epochs'
        return f', for example --{where}.{unit}={value}; its units: {fields}'
    return f'; its fields, as in --{where}.FIELD=VALUE: {fields}'


def places(cls: type[Record]) -> dict[type[Record], list[str]]:
    """Returns each kind of record within this one, itself first, and the fields that hold it."""
    by_kind = {cls: ['config']}
    waiting = [cls]
    for holder in waiting:  # which grows
        for name, hint in records.hints(holder).items():
            for option in records.alternatives(hint):
                of_many = typing.get_origin(option) is dict
                kinds = records.record_types(typing.get_args(option) if of_many else [option])
                for kind in kinds.values():
                    if kind not in by_kind:
                        waiting.append(kind)
                    place = f'{by_kind[holder][0]}.{name}{".NAME" if of_many else ""}'
                    if place not in by_kind.setdefault(kind, []):
                        by_kind[kind].append(place)
    return by_kind


def _describe_record(kind: Any, paths: list[str]) -> str:
    """Returns the fields of a record with their types, defaults and comments."""
    lines = [textwrap.fill(', '.join(f'--{path}.FIELD' for path in paths), _WIDTH)]
    owners = [owner for owner in kind.__mro__ if issubclass(owner, Record) and owner is not Record]
    meaning = '\n\n'.join(inspect.cleandoc(owner.__doc__ or '') for owner in owners)
    lines += [textwrap.indent(f'{kind.__name__}: {meaning}', '  ')]
    meant, hints = comments(kind), records.hints(kind)
    for field in dataclasses.fields(kind):
        text = f'    {field.name}: {type_text(hints[field.name])}{_format_default(field)}'
        lines.append(f'{text:<44}  {meant.get(field.name, "")}'.rstrip())
    return '\n'.join(lines)


def type_text(hint: Any) -> str:
    """Returns a type as the command line writes it."""
    if hint is type(None):
        return 'none'
    if len(options := records.alternatives(hint)) > 1:
        return ' or '.join(map(type_text, options))
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return '|'.join(map(str, typing.get_args(hint)))
    if origin is collections.abc.Callable:
        return 'function'
    return re.sub(r'\b\w+\.', '', str(hint)) if origin else hint.__name__


def _format_default(field: 'dataclasses.Field[Any]') -> str:
    if field.default is not dataclasses.MISSING:
        return f' = {"none" if field.default is None else field.default}'
    return '' if field.default_factory is not dataclasses.MISSING else ', required'
