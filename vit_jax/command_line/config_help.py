"""Help about the fields of a configuration, and hints for wrong names and values."""

import ast
import collections.abc
import dataclasses
import difflib
import functools
import inspect
import io
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Collection, Sequence
from typing import Any

from vit_jax.base import records
from vit_jax.base.records import Record
from vit_jax.models import ViTConfig
from vit_jax.training.duration import Duration

_WIDTH = 96
# Names that timm, transformers, keras, big_vision and Lightning have for a field or its value.
SYNONYMS = {
    'start_from': 'pretrained model_name arch checkpoint init_from model_init finetune weights',
    'data': 'dataset data_dir data_path train_dir train_data_dir',
    'image_size': 'img_size input_size resolution size',
    'held_out.fraction': 'validation_split val_split val_fraction test_size',
    'batch_size': 'train_batch_size per_device_train_batch_size',
    'eval_batch_size': 'val_batch_size validation_batch_size per_device_eval_batch_size',
    'accumulation_steps': 'gradient_accumulation_steps grad_accum grad_accum_steps accum_iter',
    'total.epochs': 'num_train_epochs num_epochs max_epochs total_epochs n_epochs',
    'total.steps': 'max_steps total_steps num_steps num_train_steps iterations',
    'loss': 'criterion loss_fn',
    'loss.kind=sigmoid': 'bce bce_loss multi_label multilabel',
    'loss.label_smoothing': 'smoothing label_smooth',
    'optimizer.kind': 'opt optim optimizer_name optax_name',
    'optimizer.weight_decay': 'decay wd l2_reg',
    'optimizer.b1': 'betas beta1 beta_1 adam_beta1',
    'optimizer.b2': 'beta2 beta_2 adam_beta2',
    'optimizer.epsilon': 'eps opt_eps adam_epsilon',
    'optimizer.clip_norm': 'grad_clip clip_grad grad_clip_norm clipnorm max_grad_norm '
    'gradient_clip_val clip_gradients',
    'optimizer.layer_decay': 'llrd layer_lr_decay layerwise_lr_decay',
    'optimizer.trained_blocks=0': 'freeze freeze_backbone freeze_encoder linear_probe trainable',
    'schedule.kind': 'decay sched scheduler lr_scheduler lr_scheduler_type lr_schedule decay_type',
    'schedule.learning_rate': 'lr base_lr peak_lr max_lr',
    'schedule.warmup.epochs': 'warmup_epochs',
    'schedule.warmup.steps': 'warmup_steps num_warmup_steps',
    'schedule.warmup.fraction': 'warmup_ratio',
    'regularization.stochastic_depth': 'drop_path drop_path_rate stoch_depth stochdepth',
    'regularization.dropout': 'drop drop_rate dropout_rate hidden_dropout_prob',
    'polyak_decay': 'ema ema_decay model_ema model_ema_decay use_ema',
    'augmentation.flip': 'hflip horizontal_flip random_flip',
    'augmentation.randaugment': 'aa auto_augment randaug rand_augment',
    'augmentation.erasing': 'reprob random_erasing',
    'augmentation': 'aug augment augmentations transform transforms',
    'seed': 'random_seed random_state',
    'log_every_steps': 'logging_steps log_interval log_every log_every_n_steps log_training_steps',
    'eval_every_steps': 'evaluation_strategy eval_strategy eval_steps val_interval eval_interval '
    'check_val_every_n_epoch',
    'checkpoint_every_steps': 'save_steps save_strategy save_every ckpt_steps checkpoint_steps',
    'keep_checkpoints': 'save_total_limit checkpoint_hist max_to_keep',
    'compute.dtype=bfloat16': 'mixed_precision precision amp bf16 fp16 half',
    'compute.remat': 'gradient_checkpointing grad_checkpointing activation_checkpointing',
    'loader.threads': 'num_workers workers dataloader_num_workers num_parallel_calls',
    'model.width': 'embed_dim hidden_size hidden_dim',
    'model.depth': 'num_layers num_hidden_layers',
    'model.num_heads': 'heads num_attention_heads',
    'model.mlp_dim': 'intermediate_size mlp_ratio',
    'model.pool': 'global_pool pooling',
}
_NO_BEST = (
    'there is no early stopping and no best checkpoint: --config.eval_every_steps=epoch '
    '--config.checkpoint_every_steps=epoch --config.keep_checkpoints=1000 keep all of them, and '
    'WORKDIR/checkpoints/STEP is used as a checkpoint'
)
# Names for which there is no field, and what to do instead.
_NO_FIELD = {
    'resume resume_from resume_from_checkpoint auto_resume restore': 'run the same command again '
    'to resume',
    'early_stopping early_stop patience': _NO_BEST,
    'save_best save_best_only load_best_model_at_end monitor metric_for_best_model': _NO_BEST,
    'wandb use_wandb log_wandb report_to logger': 'Weights & Biases is not supported; '
    '--config.tensorboard=true writes event files, and WORKDIR/metrics.jsonl has all numbers',
    'k_fold kfold folds n_folds n_splits cross_validation': 'there is no cross-validation; run '
    'once for each part, held out by a column split of a table or by --config.held_out.seed',
    'class_weights class_weight weighted_loss sample_weight weighted_sampler balanced': 'there are '
    'no class weights; --config.loss may be a function of yours',
    'num_classes n_classes num_labels': 'leave it out: the number of classes is that of the data',
    'output_dir out_dir save_dir log_dir logdir default_root_dir': 'results go to --workdir=DIR',
    'device devices gpus gpu accelerator num_gpus n_gpu': 'all devices are used; choose with the '
    'environment: JAX_PLATFORMS=cpu, CUDA_VISIBLE_DEVICES=0',
    'shuffle': 'training images are always shuffled, by --config.seed',
    'tta test_time_augmentation': 'there is no test-time augmentation',
}


def names(cls: type[Record]) -> str:
    """The names of all fields, a paragraph for each kind of record."""
    parts = []
    for kind, paths in places(cls).items():
        fields = f'{", ".join(paths)} ({kind.__name__}): {", ".join(records.hints(kind))}'
        parts.append(textwrap.fill(fields, _WIDTH, initial_indent='  ', subsequent_indent=' ' * 6))
    return '\n'.join(parts)


def meanings(cls: type[Record]) -> str:
    """Types, defaults and meanings of all fields, a section for each kind of record."""
    return '\n\n'.join(_section(kind, paths) for kind, paths in places(cls).items())


def comments(cls: type[Record]) -> dict[str, str]:
    """The comments on the lines of each field of a record in its source, inherited fields too."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        tree, texts = _parsed(owner.__module__)
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for node in classes[owner.__name__].body:
            if isinstance(node, ast.AnnAssign):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                said = [texts[line] for line in lines if line in texts]
                found[ast.unparse(node.target)] = ' '.join(said)
    return found


@functools.cache
def _parsed(module: str) -> tuple[ast.Module, dict[int, str]]:
    """The source of a module, and the comment on each of its lines."""
    source = inspect.getsource(sys.modules[module])
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = {t.start[0]: t.string.lstrip('# ') for t in tokens if t.type == tokenize.COMMENT}
    return ast.parse(source), texts


def paths(cls: type[Record]) -> list[str]:
    """Where each field within a record is: `FIELD.FIELD`."""
    found = [(path, kind) for kind, places in places(cls).items() for path in places]
    return [f'{path}.{name}' for path, kind in found for name in records.hints(kind)]


def suggest(cls: type[Record], name: str, here: Collection[str]) -> str:
    """Ends an error message about a name that is none of the fields `here`.

    It may be another program's name for a field, a field elsewhere in the record, a misspelled
    one, or the initials of one (`wd`).
    """
    # Of several fields with the same name, the first.
    fields = {path.rpartition('.')[2]: path for path in reversed(paths(cls))}
    if name not in fields or name == 'num_classes':
        if text := translate_synonym(cls, name, here):
            return text
    close = [name] if name in fields else difflib.get_close_matches(name, here)
    if not close:
        close = [field for field in fields if _initials(field) == name]
        close += difflib.get_close_matches(name, fields)
    elsewhere = next((fields[one] for one in close if one in fields and one not in here), None)
    return f'did you mean {elsewhere!r}?' if elsewhere else records.nearest(name, here)


def translate_synonym(cls: type[Record], name: str, here: Collection[str] = ()) -> str | None:
    """Ends an error message about another program's name for a field; None for other names.

    If a name has several meanings, fields in `here` are preferred.
    """
    word = name.lower().replace('-', '_')
    for words, text in _NO_FIELD.items():
        if word in words.split():
            return text
    targets = [target for target, words in SYNONYMS.items() if word in words.split()]
    near = [t for t in targets if t.partition('=')[0].rpartition('.')[2] in here]
    known, meant = paths(cls), []
    for target in near or targets:
        field, equals, value = target.partition('=')
        path = next((path for path in known if path.endswith(f'.{field}')), None)
        meant += [f"'{path}{equals}{value}'"] if path else []
    return f'did you mean {" or ".join(meant)}?' if meant else None


def _initials(field: str) -> str:
    return ''.join(word[0] for word in field.split('_'))


def suggest_field(value: Any, kinds: Sequence[type[Record]], where: str) -> str:
    """Ends an error message about a number or a word in place of a record: what to set instead."""
    if len(kinds) > 1:
        names = [kind.__name__ for kind in kinds]
        meant = [name for name in names if str(value).lower() in name.lower()]
        example = f', for example --{where}={(meant or names)[0]}'
        variant = '; in a file, model=vit_jax.models.variant(NAME) sets the architecture'
        return example + (variant if ViTConfig in kinds else '')
    fields = ', '.join(records.hints(kinds[0]))
    if kinds[0] is Duration:
        unit = 'fraction' if str(value).startswith('0.') else 'epochs'
        return f', for example --{where}.{unit}={value}; its units: {fields}'
    return f'; its fields, as in --{where}.FIELD=VALUE: {fields}'


def places(cls: type[Record]) -> dict[type[Record], list[str]]:
    """Each kind of record within this one, itself first, with the fields that may hold it."""
    found = {cls: ['config']}
    waiting = [(cls, 'config')]
    while waiting:
        holder, path = waiting.pop(0)
        for name, hint in records.hints(holder).items():
            for option in records.alternatives(hint):
                of_many = typing.get_origin(option) is dict
                kinds = records.record_types(typing.get_args(option) if of_many else [option])
                for kind in kinds.values():
                    place = f'{path}.{name}.NAME' if of_many else f'{path}.{name}'
                    if kind not in found:
                        waiting.append((kind, place))
                    if place not in found.setdefault(kind, []):
                        found[kind].append(place)
    return found


def _section(kind: Any, paths: list[str]) -> str:
    """The fields of a record, with what its source says of them."""
    lines = [textwrap.fill(', '.join(f'--{path}.FIELD' for path in paths), _WIDTH)]
    owners = [owner for owner in kind.__mro__ if issubclass(owner, Record) and owner is not Record]
    meaning = '\n\n'.join(inspect.cleandoc(owner.__doc__ or '') for owner in owners)
    lines += [textwrap.indent(f'{kind.__name__}: {meaning}', '  ')]
    meant, hints = comments(kind), records.hints(kind)
    for field in dataclasses.fields(kind):
        text = f'    {field.name}: {type_text(hints[field.name])}{_default(field)}'
        lines.append(f'{text:<44}  {meant[field.name]}'.rstrip())
    return '\n'.join(lines)


def type_text(hint: Any) -> str:
    """A type as the command line takes it."""
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


def _default(field: 'dataclasses.Field[Any]') -> str:
    if field.default is not dataclasses.MISSING:
        return f' = {"none" if field.default is None else field.default}'
    return '' if field.default_factory is not dataclasses.MISSING else ', required'
