"""Finds what fits on sixteen TPU chips of each kind: python -m benchmarks.plan_tpu > RESULT.

Prints commands of `vit_jax.plan` and their output. It needs the TPU compiler (`pip install -e
'.[tpu]'`) but no TPU, and takes some minutes on one core for each command.
"""

import shlex
import subprocess
import sys

SLICES = 'v5e:4x4', 'v6e:4x4', 'v5p:2x2x4'
SHARDED = ['--config.mesh.data=1', '--config.mesh.fsdp=-1']
IMAGENET = ['--num_classes=1000', '--num_images=1281167']
JFT = ['--num_classes=18291', '--num_images=303000000']
MODELS = {
    'B/16': ['pretrain/augreg.py:i1k,B/16', *IMAGENET],
    'L/16': ['pretrain/augreg.py:i1k,L/16', *IMAGENET],
    'H/14': ['pretrain/vit.py:jft,H/14', *JFT, *SHARDED],
    'g/14': [
        'pretrain/scaling_vit.py:g/14',
        *JFT,
        '--config.batch_size=4096',
        '--config.compute.remat=none',
        *SHARDED,
    ],
}

if __name__ == '__main__':
    for network in sys.argv[1:] or MODELS:
        config, *flags = MODELS[network]
        for name in SLICES:
            command = ['-m', 'vit_jax.plan', f'--config=configs/{config}', f'--topology={name}']
            command += flags
            print(f'$ python {shlex.join(command)}', flush=True)
            subprocess.run([sys.executable, *command])
