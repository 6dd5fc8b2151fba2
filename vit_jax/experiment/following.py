"""The command that a training prints at its end: the next one to type, with all that it needs."""

import inspect
import operator
import os
import shlex

from vit_jax.config import EvalConfig, TrainConfig
from vit_jax.experiment.build import Experiment
from vit_jax.training.losses import LossConfig

# What fine-tuning on the same images takes over, if it is not the default.
_HELD_OUT = 'held_out.fraction', 'held_out.seed'
_FIELDS = 'train_split', 'classes', *_HELD_OUT, 'loader.on_unreadable', 'loader.max_pixels'


def after_pretraining(experiment: Experiment, workdir: str) -> str | None:
    """Returns the command that fine-tunes on the same images; None if no flag can name them."""
    config, default = experiment.config, TrainConfig(data='')
    if not isinstance(config.data, str):
        return None
    flags = {'start_from': workdir, 'data': config.data}
    if (split := _evaluation(config).split) != default.eval_split:
        flags['eval_split'] = split
    for name in _FIELDS:
        value_of = operator.attrgetter(name)
        if value_of(config) != value_of(default):
            flags[name] = value_of(config)
    loss = 'sigmoid' if experiment.train.source.multi_label else 'softmax'
    if isinstance(config.loss, LossConfig) and config.objective is None:
        loss = config.loss.kind
    if loss != 'softmax':
        flags['loss.kind'] = loss
    words = [f'--config.{name}={value}' for name, value in flags.items()]
    return _command(
        'finetune', '--config=configs/finetune/transfer.py', *words, f'--workdir={workdir}-finetune'
    )


def after_fine_tuning(experiment: Experiment, workdir: str) -> str | None:
    """Returns the command that predicts a test image, or evaluates data without image files.

    A model without classes is fine-tuned. None if no flag can name the data.
    """
    config = experiment.config
    if config.objective is not None:
        return after_pretraining(experiment, workdir)
    head = experiment.model.config.head
    flags = []
    if inspect.isfunction(head):  # which no checkpoint holds
        flags.append(f'--head={inspect.getfile(head)}:{head.__name__}')
    image = next(iter(experiment.evals.values())).source.name_of(0)
    if os.path.isfile(image):
        return _command('predict', workdir, image, *flags)
    if not isinstance(config.data, str):
        return None
    split = f'--split={_evaluation(config).split}'
    return _command('evaluate', workdir, f'--data={config.data}', split, *flags)


def _evaluation(config: TrainConfig) -> EvalConfig:
    """Returns the first evaluation on the data's own images and labels, or the default one."""
    own = (one for one in config.evaluations.values() if one.data in (None, config.data))
    return next((one for one in own if one.labels is None), EvalConfig())


def _command(program: str, *words: str) -> str:
    return shlex.join(['python', '-m', f'vit_jax.{program}', *words])
