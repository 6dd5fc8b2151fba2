"""The ViTs that people use do all that a plain one does: python -m pytest -m nightly FILE

Each has options that the paper's have not: other tokens, norms, positions, activations.
"""

import numpy as np
import pytest

import vit_jax
from tests import reference, tiny
from tests.networks import loaded
from vit_jax import visualize
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.experiment import training_run
from vit_jax.models import Compute, ViTConfig
from vit_jax.training.duration import Duration

DEVICES = 8
pytestmark = pytest.mark.nightly
# Which differ by what tokens there are and which are pooled.
FIGURES = (
    'filters,positions,attention_distance,rollout,attention_maps,residuals,localization,'
    'features,outliers'
)
TPU = Compute(remat='block', layout='batched', attention='xla')  # as on a TPU
TOKENS = 'deit_hf_dist', 'dinov3_hf', 'siglip_timm_remainder'  # each has others
# A norm before the blocks, registers, SwiGLU, LayerScale, rotations and attention pooling.
ALL_OPTIONS = tiny.model(
    pre_norm=True,
    registers=2,
    gelu=None,
    layer_scale=0.1,
    positions='rope',
    qk_norm=True,
    pool='map',
)


def experiment(start, **changes):
    return tiny.experiment(model=None, start_from=start, total=Duration(steps=4), **changes)


def test_a_fine_tuning_is_the_same_on_devices_that_share_everything(tmp_path):
    """Batch, parameters, heads and hidden layers; what was trained is loaded as any network."""
    start = str(tmp_path / 'all')
    vit_jax.save(loaded(ALL_OPTIONS), start, 'vit_jax')
    alone = training_run.train(experiment(start, mesh=MeshConfig(data=8)), str(tmp_path / 'alone'))
    mesh = MeshConfig(data=2, fsdp=2, tensor=2, fsdp_min_mb=0.0)
    shared = training_run.train(experiment(start, mesh=mesh, compute=TPU), str(tmp_path / 'shared'))
    loss, same = (result.evals['test']['loss'] for result in (alone, shared))
    assert np.isfinite(loss) and abs(loss - same) < 1e-4  # sums in another order
    network = vit_jax.load(tmp_path / 'shared')
    assert isinstance(network.config, ViTConfig) and network.config.num_classes == tiny.CLASSES
    begun = vit_jax.load(start, num_classes=None)
    assert network.preprocessing == begun.preprocessing
    assert network.params.keys() >= begun.params.keys() - {'pre_logits'}


@pytest.mark.parametrize('name', TOKENS)
def test_figures_are_drawn(name, tmp_path, capsys):
    words = [reference.family(name), '--images=digits', '--num_images=8', f'--figures={FIGURES}']
    arguments = visualize.make_parser().parse_args([*words, f'--out={tmp_path}'])
    assert visualize.main(arguments) == 0
    without_table = name == 'dinov3_hf'  # of positions
    assert capsys.readouterr().out.count('skipped: ') == without_table
