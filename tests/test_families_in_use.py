"""The ViTs that people use do all that a plain one does: python -m pytest -m full FILE

Each has options that the paper's have not: other tokens, norms, positions, activations.
"""

import numpy as np
import pytest

import vit_jax
from tests import reference, tiny
from vit_jax import visualize
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.evaluation.probing import FewshotConfig
from vit_jax.experiment import probing_run, training_run
from vit_jax.models import Compute, ViTConfig
from vit_jax.planning import ahead_of_time, memory_plan
from vit_jax.training.duration import Duration

pytestmark = pytest.mark.full
# Which differ by what tokens there are and which are pooled.
FIGURES = 'filters,positions,attention_distance,rollout,attention_maps,residuals,localisation'
TPU = Compute(remat='block', layout='batched', attention='xla')  # as on a TPU
NAMES = {
    'clip_openclip': 'a norm before the blocks, QuickGELU, a projection',
    'deit_hf_dist': 'a distillation token, two heads',
    'dinov2_timm_swiglu': 'SwiGLU, LayerScale',
    'dinov3_hf': 'rotated queries and keys, registers',
    'siglip_timm_remainder': 'attention pooling, pixels that fill no patch',
}
TOKENS = 'deit_hf_dist', 'dinov3_hf', 'siglip_timm_remainder'  # each has others


def experiment(name, **changes):
    start = reference.family(name)
    return tiny.experiment(model=None, start_from=start, total=Duration(steps=4), **changes)


@pytest.mark.parametrize('name', NAMES)
def test_a_fine_tuning_is_the_same_on_devices_that_share_everything(name, tmp_path):
    """Batch, parameters, heads and hidden layers; what was trained is loaded as any network."""
    alone = training_run.train(experiment(name, mesh=MeshConfig(data=8)), str(tmp_path / 'alone'))
    mesh = MeshConfig(data=2, fsdp=2, tensor=2, fsdp_min_mb=0.0)
    shared = training_run.train(experiment(name, mesh=mesh, compute=TPU), str(tmp_path / 'shared'))
    loss, same = (result.evals['test']['loss'] for result in (alone, shared))
    assert np.isfinite(loss) and abs(loss - same) < 1e-4  # sums in another order
    network = vit_jax.load(tmp_path / 'shared')
    assert isinstance(network.config, ViTConfig) and network.config.num_classes == tiny.CLASSES
    begun = vit_jax.load(reference.family(name), num_classes=None)
    assert network.preprocessing == begun.preprocessing
    assert network.params.keys() >= begun.params.keys() - {'pre_logits'}


@pytest.mark.parametrize('name', NAMES)
def test_features_are_probed(name, tmp_path):
    fewshot = FewshotConfig(shots=(2,), seeds=(0,))
    found, _ = probing_run.probe(experiment(name, fewshot=fewshot), str(tmp_path))
    assert found['checkpoint'] == reference.family(name)


@pytest.mark.parametrize('name', TOKENS)
def test_figures_are_drawn(name, tmp_path, capsys):
    words = [reference.family(name), '--images=digits', '--num_images=8', f'--figures={FIGURES}']
    arguments = visualize.make_parser().parse_args([*words, f'--out={tmp_path}'])
    assert visualize.main(arguments) == 0
    without_table = name == 'dinov3_hf'  # of positions
    assert capsys.readouterr().out.count('left out') == without_table


@pytest.mark.parametrize('name', TOKENS)
def test_a_fine_tuning_is_planned(name):
    pytest.importorskip('libtpu', reason="no TPU compiler: pip install -e '.[tpu]'")
    config = memory_plan.without_data(experiment(name), num_classes=10, num_images=100)
    found = memory_plan.compile_step(config, ahead_of_time.find_topology('v5e:2x4'))
    assert found.peak > found.state > 0
