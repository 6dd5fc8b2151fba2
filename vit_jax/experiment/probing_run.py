"""Runs the few-shot evaluation of a checkpoint in a work directory, without training."""

import dataclasses
import functools
from typing import Any

import jax
from rich.console import Console

from vit_jax.base import Path, UserError, records, write_json
from vit_jax.checkpoints.transfer import remove_head, transfer
from vit_jax.config import TrainConfig
from vit_jax.data.loading import check_memory
from vit_jax.data.sources.opening import make_opener
from vit_jax.distributed import meshes, sharding_rules
from vit_jax.distributed.processes import Job
from vit_jax.evaluation import features, probing
from vit_jax.evaluation.linear_probe import LinearProbe
from vit_jax.experiment import data_manifest, workdirs
from vit_jax.experiment.build import make_batch_source, make_mesh, make_readers, open_start
from vit_jax.experiment.reporter import make_console
from vit_jax.models import Compute, Model, ModelConfig, abstract_params, build
from vit_jax.models.compute import resolve_compute, with_highest_precision


def probe(
    config: TrainConfig, path: str, *, accept_changes: bool = False, job: Job | None = None
) -> tuple[dict[str, Any], Path]:
    """Evaluates the features of the checkpoint `config.start_from` with few-shot probes.

    The preprocessing is the checkpoint's; `config.preprocessing` is ignored.

    Args:
      config: The experiment; `fewshot` and `start_from` must be set.
      path: The work directory.
      accept_changes: Whether the directory may have another configuration.
      job: This process of a multi-process job; None: a single process, whose data is not compared.

    Returns:
      The result, and the path of the file that contains it.
    """
    job = job or Job()
    config = records.validate_copy(config, where='config')
    job.require_equal('this evaluation', workdirs.collect_settings(config, path))
    fewshot = config.fewshot
    if fewshot is None:
        raise UserError('config.fewshot is not set; pass --config.fewshot=FewshotConfig')
    start = open_start(config)
    if start is None:
        raise UserError('config.start_from is not set; expected the checkpoint to evaluate')
    origin = {'origin': list(start.origin)}
    job.require_equal('start_from', origin)
    card = start.card
    preprocessing = card.preprocessing
    config = dataclasses.replace(config, preprocessing=preprocessing, start_from=start.path)

    size = config.image_size or card.model.image_size
    mesh = make_mesh(config)
    body = dataclasses.replace(remove_head(card.model), image_size=size)
    compute = resolve_compute(config.compute, body, platform=jax.default_backend())
    check_memory(config.eval_batch_size or config.batch_size, size, 'config.eval_batch_size')
    reader_of = make_readers(config, preprocessing, size)
    batches = make_batch_source(config, mesh)
    probes = probing.open_probes(fewshot, config.data, make_opener(config.held_out), reader_of)
    model = _build_exact(body, compute)
    console = make_console(job)
    evaluator = features.make_feature_evaluator(model, preprocessing, batches)
    linear_probe = None
    if fewshot.linear_probe is not None:
        linear_probe = LinearProbe(
            fewshot.linear_probe, model, preprocessing, batches, console.print, job.tick_each
        )

    recorded = records.to_dict(config)
    sources = data_manifest.name_sources(None, [], probes) if job.count > 1 else {}
    with workdirs.open_workdir(path, recorded, job, accept_changes=accept_changes) as workdir:
        with data_manifest.compare_data(workdir, sources, job):
            fresh = abstract_params(body)
            shardings = sharding_rules.shardings_for(fresh, mesh, config.mesh)
            abstract = sharding_rules.abstract_arrays(fresh, shardings)
            evaluator = evaluator.compile(abstract, probes.example)
        params, report = transfer(start.read(), old=card.model, new=body, fresh=fresh)
        lines = [f'start_from {start.path}', *start.report, *report, f'compute {compute}']
        console.print('\n'.join(lines))
        placed = meshes.put(params, shardings)
        features_of = features.make_feature_function(evaluator, placed, wrap=job.tick_each)
        train_linear = None
        if linear_probe is not None:
            train_linear = functools.partial(linear_probe.evaluate, placed)
        result = probing.evaluate(features_of, probes, preprocessing, train_linear)
        result |= {'step': card.step, 'checkpoint': start.path} | origin
        if job.index == 0:
            workdir.check_held()
            _write_result(workdir.folder / workdirs.FEWSHOT, result, console)
    return result, workdir.folder / workdirs.FEWSHOT


def _write_result(path: Path, result: dict[str, Any], console: Console) -> None:
    """Writes the result. Prints a line if it replaces an earlier one."""
    if path.exists():
        console.print(f'{path}: replaced')
    write_json(path, result)


def _build_exact(config: ModelConfig, compute: Compute) -> Model:
    """Builds a model without a head. With dtype=float32, its products have full precision."""
    model = build(config, compute=compute)
    if compute.dtype != 'float32':
        return model
    exact = {name: with_highest_precision(getattr(model, name)) for name in ('features', 'capture')}
    return model._replace(**exact)
