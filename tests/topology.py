"""What must not depend on the topology: python -m tests.topology OUT.json FSDP TENSOR FLAGS.

Trains, and writes digests of the first parameters and of ten batches, the losses of the steps, what
an evaluation counted of uneven numbers of images, and the digests of the state that it leaves in
--save=DIR and of those that others left in --restore=DIR,...
"""

import functools
import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from tests import tiny
from vit_jax.checkpoints.store import Checkpoints
from vit_jax.cli import app
from vit_jax.data import loading
from vit_jax.distributed import meshes
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.distributed.processes import joined_job
from vit_jax.experiment import training_run
from vit_jax.models import Regularization
from vit_jax.training.duration import Duration

COUNTS, STEPS = (1, 7, 50, 65), 40


@functools.cache
def gather_on(mesh):
    return jax.jit(lambda tree: tree, out_shardings=meshes.replicated(mesh))


def digest(tree, mesh):
    """Of the bits of all arrays, wherever they lie."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(gather_on(mesh)(tree)):
        total.update(np.asarray(leaf).tobytes())
    return total.hexdigest()


def trained(job, experiment, state, update, folder):
    abstract = training_run.abstract_state(experiment)
    evaluators = training_run.compile_evaluators(experiment, abstract.eval_params)
    evaluator, loader_of = evaluators['test'], experiment.loader_of
    job.barrier('compiled')  # gloo waits for 30 s only where devices first work together
    found = {'initial': digest(state, experiment.mesh), 'batches': [], 'losses': []}
    for step, batch in enumerate(
        loading.training_batches(
            loader_of(experiment.train),
            steps=range(STEPS),
            batch_size=experiment.config.batch_size,
            seed=0,
        )
    ):
        if step < 10:
            found['batches'].append(digest(batch, experiment.mesh))
        state, metrics = update(state, batch)
        found['losses'].append(metrics.means['loss'])
    test, params = experiment.evals['test'], state.eval_params
    found['evaluations'] = {
        count: evaluator.evaluate(params, test, np.arange(count)).means['accuracy'] * count
        for count in COUNTS
    }
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(STEPS, *state.split(), {'step': STEPS}, {})
    checkpoints.wait()
    checkpoints.close()
    found['saved'] = digest(state.split(), experiment.mesh)
    return found


def restored(job, experiment, abstract, folder):
    checkpoints = Checkpoints(folder, keep=1)
    params, training, _ = checkpoints.restore(
        STEPS, abstract.split(), training_run.shardings_of(abstract).split()
    )
    job.barrier('restored')
    checkpoints.close()
    return digest((params, training), experiment.mesh)


def main(arguments):
    mesh = MeshConfig(
        fsdp=arguments.fsdp, tensor=arguments.tensor, fsdp_min_mb=0.0, max_replicated_fraction=0.5
    )
    config = tiny.experiment(
        mesh=mesh,
        polyak_decay=0.9,
        regularization=Regularization(dropout=0.1),
        total=Duration(steps=2 * STEPS),
        eval_batch_size=8,
        eval_split='test',
    )
    with joined_job(app.launch(arguments), app.report) as job:
        assert jnp.zeros(()).dtype == jnp.float32
        experiment, state, update = tiny.compiled(config)
        abstract = training_run.abstract_state(experiment)
        folders = filter(None, arguments.restore.split(','))
        others = {folder: restored(job, experiment, abstract, folder) for folder in folders}
        found = trained(job, experiment, state, update, arguments.save) | {'restored': others}
        if job.index == 0:
            pathlib.Path(arguments.out).write_text(json.dumps(found))
    return 0


if __name__ == '__main__':
    parser = app.new_parser('topology', __doc__)
    parser.add_argument('out')
    for name in 'fsdp', 'tensor':
        parser.add_argument(name, type=int)
    parser.add_argument('--save')
    parser.add_argument('--restore')
    app.add_launch(parser)
    app.run(main, parser, on_devices=False)
