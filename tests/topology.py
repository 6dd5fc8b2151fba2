"""What must not depend on the topology: python -m tests.topology OUT.json FSDP TENSOR STEPS FLAGS.

Writes digests of the first parameters and of ten batches, the losses of the steps, and what an
evaluation counted of uneven numbers of images. With --save=DIR it leaves a state there, and with
--restore=DIR,... it writes the digest of each that is there.
"""

import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from tests import tiny
from vit_jax.checkpoints.store import Checkpoints
from vit_jax.command_line import app
from vit_jax.data import loading
from vit_jax.evaluation import classification
from vit_jax.models import Regularization
from vit_jax.parallel import meshes
from vit_jax.parallel.meshes import MeshConfig
from vit_jax.parallel.processes import joined_job
from vit_jax.runs import compilation
from vit_jax.training.duration import Duration

COUNTS, TOTAL = (1, 7, 50, 65), 200


def digest(tree, mesh):
    """Of the bits of all arrays, wherever they lie."""
    gather = jax.jit(lambda x: x, out_shardings=meshes.replicated(mesh))
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        total.update(np.asarray(gather(leaf)).tobytes())
    return total.hexdigest()


def measure(job, mesh_config, steps, save, restore):
    config = tiny.experiment(
        mesh=mesh_config,
        polyak_decay=0.9,
        regularization=Regularization(dropout=0.1),
        total=Duration(steps=TOTAL),
        eval_batch_size=8,
        eval_split='test',
    )
    experiment, state, update = tiny.compiled(config)
    abstract = compilation.abstract_state(experiment)
    (eval_step,) = compilation.compile_eval_steps(experiment, abstract.eval_params).values()
    loader_of = loading.make_loaders(config.loader, meshes.batch_sharding(experiment.mesh))
    job.barrier('compiled')  # gloo waits for 30 s only where devices first work together
    found = {'initial': digest(state, experiment.mesh), 'batches': [], 'losses': []}
    for step, batch in enumerate(
        loading.training_batches(
            loader_of(experiment.train), steps=range(steps), batch_size=config.batch_size, seed=0
        )
    ):
        if step < 10:
            found['batches'].append(digest(batch, experiment.mesh))
        state, metrics = update(state, batch)
        found['losses'].append(metrics.means['loss'])
    test = loader_of(experiment.evals['test'])
    found['evaluations'] = {
        count: classification.evaluate(
            eval_step,
            state.eval_params,
            loading.sequential_batches(test, np.arange(count), batch_size=8),
            count=count,
        )[0]['accuracy']
        * count
        for count in COUNTS
    }
    if save:
        checkpoints = Checkpoints(save, keep=1)
        checkpoints.save(TOTAL, *state.split(), {'step': TOTAL}, {})
        checkpoints.wait()
        checkpoints.close()
        found['saved'] = digest(state.split(), experiment.mesh)
    found['restored'] = {}
    for folder in filter(None, restore.split(',')):
        checkpoints = Checkpoints(folder, keep=1)
        params, training, _ = checkpoints.restore(
            TOTAL, abstract.split(), compilation.shardings_of(abstract).split()
        )
        found['restored'][folder] = digest((params, training), experiment.mesh)
        checkpoints.close()
    return found


def main(arguments):
    config = MeshConfig(
        fsdp=arguments.fsdp, tensor=arguments.tensor, fsdp_min_mb=0.0, max_replicated_fraction=0.5
    )
    with joined_job(app.launch(arguments), app.reporter(arguments)) as job:
        assert jnp.zeros(()).dtype == jnp.float32
        found = measure(job, config, arguments.steps, arguments.save, arguments.restore)
        if job.index == 0:
            pathlib.Path(arguments.out).write_text(json.dumps(found))
    return 0


if __name__ == '__main__':
    parser = app.new_parser('topology', __doc__)
    parser.add_argument('out')
    for name in 'fsdp', 'tensor', 'steps':
        parser.add_argument(name, type=int)
    parser.add_argument('--save')
    parser.add_argument('--restore', default='')
    app.add_launch(parser)
    app.run(main, parser)
