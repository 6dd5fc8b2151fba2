"""What must not depend on the topology: python -m tests.topology OUT.json FSDP TENSOR STEPS FLAGS.

Writes digests of the first parameters and of ten batches, the losses of the steps, and what an
evaluation counted of uneven numbers of images. With --save=DIR it leaves a state there, and with
--restore=DIR,... it writes the digest of each that is there.
"""

import hashlib
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl import app as absl_app
from absl import flags

from tests import tiny
from vit_jax.checkpoints.store import Checkpoints
from vit_jax.command_line import app
from vit_jax.data import loading
from vit_jax.data.sources import opening
from vit_jax.evaluation import classification
from vit_jax.models import Regularization
from vit_jax.parallel import meshes
from vit_jax.parallel.meshes import MeshConfig
from vit_jax.parallel.processes import joined
from vit_jax.runs import setups
from vit_jax.training.duration import Duration, make_train_length

COUNTS, TOTAL = (1, 7, 50, 65), 200


def digest(tree, mesh):
    """Of the bits of all arrays, wherever they lie."""
    gather = jax.jit(lambda x: x, out_shardings=meshes.replicated(mesh))
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        total.update(np.asarray(gather(leaf)).tobytes())
    return total.hexdigest()


def measure(mesh_config, steps, save, restore):
    config = tiny.experiment(
        mesh=mesh_config,
        polyak_decay=0.9,
        regularization=Regularization(dropout=0.1),
        total=Duration(steps=TOTAL),
        eval_batch_size=8,
    )
    opened = opening.make_opener(config.held_out)
    model = setups.trained_model(config, None, tuple('0123456789'))
    length = make_train_length(config.total, batch_size=config.batch_size, images=1438)
    setup = setups.prepare(config, None, model, length=length)
    programs = setups.compile_training(setup)
    feed = setups.Feeds(setup, opened).training()
    state = programs.init()
    found = {'initial': digest(state, setup.mesh), 'batches': [], 'losses': []}
    for step, batch in enumerate(
        loading.training_batches(feed, steps=range(steps), batch_size=config.batch_size, seed=0)
    ):
        if step < 10:
            found['batches'].append(digest(batch, setup.mesh))
        state, metrics = programs.update(state, batch)
        found['losses'].append(float(metrics['loss']))
    test = setups.Feeds(setup, opened).evaluation('digits', 'test')
    found['evaluations'] = {
        count: classification.evaluate(
            programs.scores,
            state.eval_params,
            loading.sequential_batches(test, np.arange(count), batch_size=8),
            count=count,
        )['accuracy']
        * count
        for count in COUNTS
    }
    if save:
        checkpoints = Checkpoints(save, keep=1)
        checkpoints.save(TOTAL, *state.split(), {'step': TOTAL})
        checkpoints.wait()
        checkpoints.close()
        found['saved'] = digest(state.split(), setup.mesh)
    found['restored'] = {}
    for folder in filter(None, restore.split(',')):
        checkpoints = Checkpoints(folder, keep=1)
        there = checkpoints.restore(TOTAL, programs.like.split(), programs.shardings.split())
        found['restored'][folder] = digest(there, setup.mesh)
        checkpoints.close()
    return found


def main(arguments):
    _, out, fsdp, tensor, steps = arguments
    config = MeshConfig(
        fsdp=int(fsdp), tensor=int(tensor), fsdp_min_mb=0.0, max_replicated_fraction=0.5
    )
    with joined(launch(), app.report) as job:
        assert jnp.zeros(()).dtype == jnp.float32
        found = measure(config, int(steps), save.value, restore.value)
        if job.index == 0:
            pathlib.Path(out).write_text(json.dumps(found))


if __name__ == '__main__':
    launch = app.launch_flags()
    save = flags.DEFINE_string('save', None, '')
    restore = flags.DEFINE_string('restore', '', '')
    sys.exit(absl_app.run(main))
