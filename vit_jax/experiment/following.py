"""The next command to type after a training."""

import operator
import shlex

from vit_jax.config import TrainConfig
from vit_jax.training.losses import LossConfig

# Fields that select images. Fine-tuning keeps their values, unless they are the defaults.
_HELD_OUT = 'held_out.fraction', 'held_out.seed'
_LOADER = 'loader.on_unreadable', 'loader.max_pixels'
_FIELDS = 'train_split', 'eval_split', 'classes', *_HELD_OUT, *_LOADER


def next_command(config: TrainConfig, workdir: str) -> str | None:
    """Returns the command to continue with; None if no flag can name the data.

    After pre-training it fine-tunes on the same images. After fine-tuning it evaluates, by default
    on the split that the run evaluated.
    """
    if not isinstance(config.data, str):
        return None
    values = {'start_from': workdir, 'data': config.data}
    if config.start_from is not None and config.objective is None:
        words = ['evaluate', workdir, f'--data={config.data}']
    else:
        for name in _FIELDS:
            value_of = operator.attrgetter(name)
            if value_of(config) != value_of(TrainConfig(data='')):
                values[name] = value_of(config)
        if isinstance(config.loss, LossConfig) and config.loss.kind == 'sigmoid':
            values['loss.kind'] = 'sigmoid'  # images may have several classes
        words = ['finetune', '--config=configs/finetune/transfer.py']
        words += [f'--config.{name}={value}' for name, value in values.items()]
        words.append(f'--workdir={workdir}-finetune')
    return shlex.join(['python', '-m', f'vit_jax.{words[0]}', *words[1:]])
