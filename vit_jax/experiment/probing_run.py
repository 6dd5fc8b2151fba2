"""A run that evaluates a checkpoint's features, and trains nothing."""

import dataclasses
import pathlib
from typing import Any

import jax

from vit_jax.base import Path, UserError, records, write_json
from vit_jax.checkpoints.transfer import headless, transfer
from vit_jax.config import TrainConfig
from vit_jax.data.loading import check_memory, make_loaders
from vit_jax.data.sources.opening import make_opener
from vit_jax.distributed import meshes, sharding_rules
from vit_jax.distributed.processes import Job
from vit_jax.evaluation import feature_cache, probing
from vit_jax.experiment import data_record, fingerprint, workdirs
from vit_jax.experiment.build import make_mesh, open_start, reader_for
from vit_jax.experiment.compilation import compile_features
from vit_jax.experiment.reporter import console_of
from vit_jax.models import build
from vit_jax.models.compute import resolve_compute


def probe(
    config: TrainConfig, path: str, *, accept_changes: bool = False, job: Job | None = None
) -> tuple[dict[str, Any], Path]:
    """The result for the checkpoint `start_from`, and the file in `path` that it is written to.

    The preprocessing is the checkpoint's, whatever the configuration would train with.
    """
    job = job or Job()
    config = records.checked(config, where='config')
    job.require_same('this evaluation', fingerprint.of_run(config, path))
    if (fewshot := config.fewshot) is None:
        raise UserError('config.fewshot is none: expected shots, seeds and data to evaluate with')
    start = open_start(config)
    if start is None:
        raise UserError('config.start_from is none: expected the checkpoint to evaluate')
    job.require_same('start_from', fingerprint.of_start(start))
    preprocessing = start.card.preprocessing
    config = dataclasses.replace(config, preprocessing=preprocessing, start_from=start.path)
    size = config.image_size or start.card.model.image_size
    body = dataclasses.replace(headless(start.card.model), image_size=size)
    resolved = resolve_compute(config.compute, body, platform=jax.default_backend())
    compute = resolved.compute
    model = build(body, compute=compute)
    mesh, batch_size = make_mesh(config), config.eval_batch_size or config.batch_size
    check_memory(batch_size, size, 'config.eval_batch_size')
    reader = reader_for(config, preprocessing, size)
    sets = probing.open_probes(fewshot, config.data, make_opener(config.held_out), reader)
    values, console = records.to_dict(config), console_of(job)
    sources = data_record.find_sources(config, {}, sets) if job.count > 1 else {}
    with (
        workdirs.opened(path, values, job, accept_changes=accept_changes) as workdir,
        data_record.compare_data(workdir, sources, job),
    ):
        fresh = jax.eval_shape(model.init, jax.random.key(0))
        shardings = sharding_rules.shardings_for(fresh, mesh, config.mesh)
        abstract = sharding_rules.abstract(fresh, shardings)
        # GPUs and TPUs would round float32 to TF32 or bfloat16.
        with jax.default_matmul_precision('highest' if compute.dtype == 'float32' else None):
            features = compile_features(model, preprocessing, mesh, batch_size, abstract)
        params, report = transfer(start.read(), old=start.card.model, new=model.config, fresh=fresh)
        said = probing.episodes_outline(sets, start.card.class_names)
        lines = [f'start_from {start.path}', *start.report, *report, f'compute {resolved}', *said]
        console.print('\n'.join(lines))
        loader_of = make_loaders(config.loader, meshes.batch_sharding(mesh))
        placed = meshes.put(params, shardings)
        features_of = probing.make_features_of(features, placed, loader_of, batch_size, job)
        if fewshot.feature_cache is not None and job.count == 1:
            network = feature_cache.digest_of_network(
                model.config, params, preprocessing=preprocessing, dtype=compute.dtype
            )
            cache = pathlib.Path(fewshot.feature_cache)
            features_of = feature_cache.cached(features_of, cache, network)
        result = probing.evaluate(features_of, sets, preprocessing)
        result |= {'step': start.card.step, 'checkpoint': config.start_from}
        result |= fingerprint.of_start(start)
        if job.index == 0:
            workdir.check()
            write_json(workdir.folder / workdirs.FEWSHOT, result)
    return result, workdir.folder / workdirs.FEWSHOT
