"""The next command to type after a training, with all that it needs."""

import inspect
import operator
import os
import shlex

from vit_jax.config import TrainConfig
from vit_jax.experiment.build import Experiment

# What fine-tuning on the same images keeps, if it is not the default.
_HELD_OUT = 'held_out.fraction', 'held_out.seed'
_FIELDS = 'train_split', 'classes', *_HELD_OUT, 'loader.on_unreadable', 'loader.max_pixels'


def next_command(experiment: Experiment, workdir: str) -> str | None:
    """Returns the command to continue with; None if no flag can name the data.

    After pre-training it fine-tunes on the same images. After fine-tuning it predicts a test image,
    or evaluates data without image files.
    """
    config, default = experiment.config, TrainConfig(data='')
    own = [one for one in config.evaluations.values() if one.data is None and one.labels is None]
    split = own[0].split if own else default.eval_split
    head, flags = experiment.model.config.head, list[str]()
    if inspect.isfunction(head):  # which no checkpoint holds
        flags.append(f'--head={inspect.getfile(head)}:{head.__name__}')
    image = next(iter(experiment.evals.values())).source.name_of(0)
    is_fine_tuned = config.start_from is not None and config.objective is None
    if is_fine_tuned and os.path.isfile(image):
        words = ['predict', workdir, image, *flags]
    elif not isinstance(config.data, str):
        return None
    elif is_fine_tuned:
        words = ['evaluate', workdir, f'--data={config.data}', f'--split={split}', *flags]
    else:
        values = {'start_from': workdir, 'data': config.data}
        if split != default.eval_split:
            values['eval_split'] = split
        for name in _FIELDS:
            value_of = operator.attrgetter(name)
            if value_of(config) != value_of(default):
                values[name] = value_of(config)
        if experiment.train.source.multi_label:
            values['loss.kind'] = 'sigmoid'
        words = ['finetune', '--config=configs/finetune/transfer.py']
        words += [f'--config.{name}={value}' for name, value in values.items()]
        words.append(f'--workdir={workdir}-finetune')
    return shlex.join(['python', '-m', f'vit_jax.{words[0]}', *words[1:]])
