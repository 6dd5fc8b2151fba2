"""The command that a training names at its end: the next one to type, with all that it needs."""

import os
import shlex

from vit_jax.config import EvalConfig, TrainConfig
from vit_jax.experiment.build import Experiment
from vit_jax.models.config import Head
from vit_jax.training.losses import LossConfig


def after_pretraining(experiment: Experiment, workdir: str) -> str | None:
    """Fine-tunes on the same images; None where a command line cannot name them."""
    config, usual = experiment.config, TrainConfig(data='')
    if not isinstance(config.data, str):
        return None
    several = experiment.train.source.multi_label
    loss = config.loss if config.objective is None else None
    own = loss.kind if isinstance(loss, LossConfig) else None
    fields = {
        'data': (config.data, None),
        'train_split': (config.train_split, usual.train_split),
        'eval_split': (_evaluated(config).split, usual.eval_split),
        'classes': (config.classes, usual.classes),
        'held_out.fraction': (config.held_out.fraction, usual.held_out.fraction),
        'held_out.seed': (config.held_out.seed, usual.held_out.seed),
        'loss.kind': (own or ('sigmoid' if several else 'softmax'), 'softmax'),
        'loader.on_unreadable': (config.loader.on_unreadable, usual.loader.on_unreadable),
        'loader.max_pixels': (config.loader.max_pixels, usual.loader.max_pixels),
    }
    words = ['--config=configs/finetune/transfer.py', f'--config.start_from={workdir}']
    words += [f'--config.{name}={value}' for name, (value, but) in fields.items() if value != but]
    return _command('finetune', *words, f'--workdir={workdir}-finetune')


def after_fine_tuning(experiment: Experiment, workdir: str) -> str | None:
    """Predicts a test image; measures all that are no files; None for data without a name.

    What has no classes is fine-tuned.
    """
    if experiment.config.objective is not None:
        return after_pretraining(experiment, workdir)
    config, one = experiment.config, _evaluated(experiment.config)
    image = next(iter(experiment.evals.values())).source.name_of(0)
    head = _own_head(experiment.model.config.head)
    if os.path.isfile(image):
        return _command('predict', workdir, image, *head)
    if not isinstance(config.data, str):
        return None
    words = [f'--data={config.data}', f'--split={one.split}']
    return _command('evaluate', workdir, *words, *head)


def _own_head(head: Head) -> list[str]:
    """The flag that hands over a head of one's own, which no checkpoint holds."""
    if not callable(head):
        return []
    file = getattr(getattr(head, '__code__', None), 'co_filename', 'FILE.py')
    name = getattr(head, '__name__', '<lambda>')
    return [f'--head={file}:{"FUNCTION" if name.startswith("<") else name}']


def _evaluated(config: TrainConfig) -> EvalConfig:
    """The first evaluation on the data's own images and labels, or that of a usual one."""
    own = (one for one in config.evaluations.values() if one.data in (None, config.data))
    return next((one for one in own if one.labels is None), EvalConfig())


def _command(program: str, *words: str) -> str:
    return shlex.join(['python', '-m', f'vit_jax.{program}', *words])
