"""Trains a Vision Transformer: python -m vit_jax.train --config=configs/FILE.py --workdir=DIR.

DIR receives checkpoints, metrics (metrics.jsonl) and the configuration (config.json). Run the same
command again to resume a run that was stopped.
"""

import argparse
import operator
import shlex
from typing import Any

from vit_jax.base import plural
from vit_jax.cli import app
from vit_jax.config import TrainConfig
from vit_jax.distributed.processes import Job
from vit_jax.evaluation import evaluator, probing
from vit_jax.experiment import reporter, training_run
from vit_jax.experiment.workdirs import METRICS
from vit_jax.tasks.making import needs_classes
from vit_jax.training.losses import LossConfig

# Fields that select images. `next_command` repeats the fields that differ from their defaults.
_HELD_OUT = 'held_out.fraction', 'held_out.seed'
_LOADER = 'loader.on_unreadable', 'loader.max_pixels'
_IMAGE_FIELDS = 'train_split', 'eval_split', 'classes', *_HELD_OUT, *_LOADER


def main(arguments: argparse.Namespace, job: Job) -> int:
    """Trains, then prints the final metrics, the written files and a suggested next command."""
    result = training_run.train(
        arguments.config,
        arguments.workdir,
        accept_changes=arguments.accept_config_changes,
        accept_data=arguments.accept_data_changes,
        job=job,
        profile=arguments.profile_steps or range(0),
    )
    if job.index != 0:
        return 0
    reached = evaluator.summarize_evals(result.evals, result.experiment.shown)
    if result.fewshot:
        reached += f'; {probing.summarize(result.fewshot)}'
    print(f'\nreached    {reached}')
    skipped = result.reporter.skipped_images
    if skipped:
        times = plural(skipped, 'time')
        print(f'skipped    unreadable training images were skipped {times}')
    print(f'checkpoint {result.checkpoint}')
    used = result.folder  # programs take the newest checkpoint of a work directory
    best = result.selection
    if best and best.step is not None:
        used = result.checkpoint.with_name(str(best.step))
        print(f'best       {best} at step {best.step}: {used}')
        note = describe_test_selection(result.experiment.config)
        if note:
            print(f'note       {note}')
    elif best:
        print(f'best       none: {best.name} was never finite')
    print(f'metrics    {result.folder / METRICS}')
    print(f'time       {reporter.format_seconds(result.reporter.clock.seconds)}')
    earlier = result.reporter.earlier_seconds
    if earlier:
        print(f'earlier    {reporter.format_seconds(earlier)}')
    source = result.experiment.train_reader.source
    command = next_command(
        result.experiment.config,
        str(result.folder),
        str(used),
        has_classes=bool(source.class_names),
        multi_label=source.multi_label,
    )
    if command:
        print(f'next       {command}')
    return 0


def describe_test_selection(config: TrainConfig) -> str | None:
    """Explains what the best value means, if `config.keep_best` selects on a test split."""
    name = (config.keep_best or '').partition('/')[0]
    evaluation = config.evaluations[name]
    split = evaluation.split
    if 'test' not in split:
        return None
    field = f'evals.{name}.split' if config.evals else 'eval_split'
    remedy = f"train with --config.train_split='train[:90%]' --config.{field}='train[90%:]'"
    if evaluation.data not in (None, config.data):
        remedy = f'set --config.{field} to another split'
    reason = f'the best step was selected on {split}, so expect a worse value for new images'
    return f'{reason}; to keep {split} for a final evaluation, {remedy}'


def next_command(
    config: TrainConfig,
    workdir: str,
    checkpoint: str,
    *,
    has_classes: bool = True,
    multi_label: bool = False,
) -> str | None:
    """Suggests the command to run next; None if `config.data` cannot be written as a flag.

    After pre-training, the command fine-tunes on the same images. If these have no classes, DATA
    stands for other images. After fine-tuning, it evaluates the checkpoint on the split that the
    run evaluated, or on `test` if `keep_best` selected the checkpoint on training images.

    Args:
      config: The configuration of the run.
      workdir: Its work directory.
      checkpoint: The checkpoint to use: the best one, or the work directory for its newest one.
      has_classes: Whether the images of `config.data` have classes.
      multi_label: Whether they may have several classes.
    """
    if not isinstance(config.data, str):
        return None
    if config.start_from is not None and needs_classes(config):
        words = ['evaluate', checkpoint, f'--data={config.data}']
        name = (config.keep_best or '').partition('/')[0]
        if name and config.evaluations[name].split.startswith('train'):
            words.append('--split=test')  # the run selected a checkpoint on training images
    else:
        fields = {'start_from': checkpoint, 'data': 'DATA'}
        if has_classes:
            fields |= {'data': config.data, **_changed_image_fields(config)}
        if multi_label or (isinstance(config.loss, LossConfig) and config.loss.kind == 'sigmoid'):
            fields['loss.kind'] = 'sigmoid'  # images may have several classes
        words = ['finetune', '--config=configs/finetune/transfer.py']
        words += [f'--config.{name}={value}' for name, value in fields.items()]
        words.append(f'--workdir={workdir}-finetune')
    return shlex.join(['python', '-m', f'vit_jax.{words[0]}', *words[1:]])


def _changed_image_fields(config: TrainConfig) -> dict[str, Any]:
    defaults = TrainConfig(data='')
    fields = dict[str, Any]()
    for name in _IMAGE_FIELDS:
        value_of = operator.attrgetter(name)
        value = value_of(config)
        if value != value_of(defaults):
            is_list = isinstance(value, tuple) and not any(',' in item for item in value)
            fields[name] = ','.join(value) if is_list else value
    return fields


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    return app.new_job_parser('train', __doc__)


if __name__ == '__main__':
    app.run_job(main, make_parser())
