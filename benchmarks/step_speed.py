"""Train steps of the same network, ours and its peers', in one run: ratios of CPU time.

    python -m benchmarks.step_speed [--vision_transformer=PATH] [--big_vision=PATH] [--model=S]

PATH is where the repository of that name lies. Each program has a process of its own, on one core;
they take turns, and of each the fastest round counts. All train on the same batch with momentum and
clipped gradients, in float32: the class token, 224 pixels, patches of 16.
"""

import argparse
import importlib
import json
import os
import pathlib
import resource
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

SIZES = {'Ti': (192, 12, 768, 3), 'S': (384, 12, 1536, 6), 'B': (768, 12, 3072, 12)}
CLASSES, PIXELS = 1000, 224
OURS: dict[str, dict[str, Any]] = {  # what `compute` says
    'ours': {},
    'ours, as in Flax': {'layout': 'batched', 'attention': 'xla'},
    'ours, nothing recomputed': {'remat': 'none'},
    'ours, unrolled': {'remat': 'none', 'unroll': 12},
}


def our_step(size: str, batch: int, compute: dict[str, Any]) -> Any:
    """The program of `vit_jax.train`: its update, compiled, with a state and a batch."""
    import jax
    import numpy as np

    from vit_jax.config import TrainConfig
    from vit_jax.models import Compute, ViTConfig
    from vit_jax.parallel import meshes
    from vit_jax.runs import compilation
    from vit_jax.runs.experiment import decide
    from vit_jax.runs.memory_plan import without_data
    from vit_jax.training.duration import Duration
    from vit_jax.training.optimizer import OptimizerConfig

    width, depth, mlp_dim, heads = SIZES[size]
    config = TrainConfig(
        data='digits',
        model=ViTConfig(width=width, depth=depth, mlp_dim=mlp_dim, num_heads=heads),
        total=Duration(steps=1000),
        batch_size=batch,
        optimizer=OptimizerConfig(kind='sgd', clip_norm=1.0),
        compute=Compute(**compute),
    )
    experiment = decide(without_data(config, num_classes=CLASSES, num_images=8 * batch))
    state = compilation.abstract_state(experiment)
    lowered = compilation.lower_update(experiment, state)
    shardings = compilation.shardings_of(state)

    def first() -> tuple[Any, Any]:
        rng, order = np.random.default_rng(0), np.arange(batch, dtype=np.int32)
        images = {
            'images': rng.integers(0, 256, (batch, PIXELS, PIXELS, 3), dtype=np.uint8),
            'labels': rng.integers(0, CLASSES, batch).astype(np.int32),
            'mask': np.ones(batch, bool),
            'epoch': 0 * order,
            'example': order,
        }
        made = jax.jit(experiment.init, out_shardings=shardings)()
        return made, jax.device_put(images, meshes.batch_sharding(experiment.mesh))

    return lowered, first


def peer_step(apply: Callable[..., Any], init: Callable[..., Any], batch: int) -> Any:
    """What the programs of both peers do in a step, by optax."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-3, momentum=0.9))

    def loss(params: Any, images: Any, targets: Any, key: Any) -> Any:
        logits = jax.nn.log_softmax(apply(params, images, key).astype(jnp.float32))
        return -jnp.mean(jnp.sum(logits * targets, axis=1))

    def update(state: Any, data: Any) -> Any:
        params, moments, key = state
        key, now = jax.random.split(key)
        value, gradient = jax.value_and_grad(loss)(params, *data, now)
        changes, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, changes), moments, key), value

    def start() -> Any:
        params = init(jax.random.key(0), jnp.zeros((1, PIXELS, PIXELS, 3)))['params']
        return params, optimizer.init(params), jax.random.key(1)

    rng = np.random.default_rng(0)
    images = rng.standard_normal((batch, PIXELS, PIXELS, 3), np.float32)
    data = images, np.eye(CLASSES, dtype=np.float32)[rng.integers(0, CLASSES, batch)]
    step = jax.jit(update, donate_argnums=0)
    return step.lower(jax.eval_shape(start), data), lambda: (jax.jit(start)(), data)


def vision_transformer(path: str, size: str, batch: int) -> Any:
    """Its network as its own programs build it."""
    sys.path.insert(0, path)
    models_vit: Any = importlib.import_module('vit_jax.models_vit')

    width, depth, mlp_dim, heads = SIZES[size]
    model = models_vit.VisionTransformer(
        num_classes=CLASSES,
        patches=types.SimpleNamespace(size=(16, 16)),
        hidden_size=width,
        transformer={
            'num_layers': depth,
            'mlp_dim': mlp_dim,
            'num_heads': heads,
            'dropout_rate': 0.0,
            'attention_dropout_rate': 0.0,
        },
        classifier='token',
    )

    def apply(params: Any, images: Any, key: Any) -> Any:
        return model.apply({'params': params}, images, train=True, rngs={'dropout': key})

    return peer_step(apply, lambda key, x: model.init(key, x, train=False), batch)


def big_vision(path: str, size: str, batch: int, *, scan: bool) -> Any:
    """Its network; modules of TensorFlow that its utilities import, and a step does not use, are
    stand-ins.
    """
    sys.path.insert(0, path)
    importlib.import_module('flax.training.checkpoints')  # looks whether TensorFlow is there
    for name in ('tensorflow', 'tensorflow.io', 'tensorflow.io.gfile'):
        sys.modules[name] = types.ModuleType(name)
    sys.modules['tensorflow'].io = sys.modules['tensorflow.io']  # type: ignore[attr-defined]
    sys.modules['tensorflow.io'].gfile = sys.modules[name]  # type: ignore[attr-defined]
    vit: Any = importlib.import_module('big_vision.models.vit')

    width, depth, mlp_dim, heads = SIZES[size]
    sizes = {'width': width, 'depth': depth, 'mlp_dim': mlp_dim, 'num_heads': heads}
    policy = 'dots_with_no_batch_dims_saveable'
    model = vit._Model(
        CLASSES, patch_size=(16, 16), pool_type='tok', scan=scan, remat_policy=policy, **sizes
    )

    def apply(params: Any, images: Any, key: Any) -> Any:
        return model.apply({'params': params}, images, train=True, rngs={'dropout': key})[0]

    return peer_step(apply, model.init, batch)


def work(name: str, path: str, size: str, batch: int) -> None:
    """Compiles; then, for each line read, makes so many steps. Prints JSON lines."""
    began = time.process_time()
    if name in OURS:
        lowered, first = our_step(size, batch, OURS[name])
    elif name == 'vision_transformer':
        lowered, first = vision_transformer(path, size, batch)
    else:
        lowered, first = big_vision(path, size, batch, scan='scan' in name)
    traced = time.process_time()
    step = lowered.compile()
    compiled = time.process_time()
    import jax

    state, data = first()
    state, _ = step(state, data)
    jax.block_until_ready(state)
    memory = step.memory_analysis().temp_size_in_bytes
    print(json.dumps([traced - began, compiled - traced, memory / 1e6]), flush=True)
    for line in sys.stdin:
        began = time.process_time()
        for _ in range(int(line)):
            state, _ = step(state, data)
            jax.block_until_ready(state)
        taken = (time.process_time() - began) / int(line)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(json.dumps([1e3 * taken, peak]), flush=True)


def main() -> None:
    """Prints a line for each program: relative speed, time of a step, memory, compilation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--vision_transformer')
    parser.add_argument('--big_vision')
    parser.add_argument('--model', choices=SIZES, default='S')
    parser.add_argument('--batch', type=int, default=8)
    parser.add_argument('--steps', type=int, default=1, help='in a round')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--work', help=argparse.SUPPRESS)
    parser.add_argument('--path', default='', help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        return work(asked.work, asked.path, asked.model, asked.batch)
    peers = {'vision_transformer': asked.vision_transformer, 'big_vision': asked.big_vision}
    peers |= {'big_vision, scan': asked.big_vision}
    programs = [*((name, path) for name, path in peers.items() if path), *((n, '') for n in OURS)]
    root, core = pathlib.Path(__file__).parents[1], min(os.sched_getaffinity(0))
    pinned = {'JAX_PLATFORMS': 'cpu', 'JAX_ENABLE_COMPILATION_CACHE': 'false'}
    running: list[tuple[str, Any, list[float]]] = []
    for name, path in programs:
        command = [sys.executable, '-P', __file__, f'--work={name}', f'--path={path}']
        command += [f'--model={asked.model}', f'--batch={asked.batch}']
        env = os.environ | pinned | {'PYTHONPATH': '' if path else str(root)}
        one = subprocess.Popen(
            ['taskset', '-c', str(core), *command],
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert one.stdin and one.stdout
        running.append((name, one, json.loads(one.stdout.readline())))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in programs}
    for _ in range(asked.rounds):
        for name, one, _ in running:
            one.stdin.write(f'{asked.steps}\n')
            one.stdin.flush()
            times[name].append(json.loads(one.stdout.readline()))
    base = min(ms for ms, _ in times[programs[0][0]])
    print(f'{asked.model}/16, batch {asked.batch}, one core; {programs[0][0]} = 1.00')
    for name, one, (traced, compiled, memory) in running:
        one.communicate()
        best = min(ms for ms, _ in times[name])
        print(
            f'{name:<26}{base / best:5.2f}  {best:7,.0f} ms  {memory:6,.0f} MB of temporaries  '
            f'{times[name][-1][1]:6,.0f} MB at most  compiled in {traced:.1f} + {compiled:.1f} s'
        )


if __name__ == '__main__':
    main()
