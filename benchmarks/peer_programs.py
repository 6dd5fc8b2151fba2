"""Runs the same train step in different programs; `benchmarks.peers` starts each in a process.

A program gets the sizes of a model, a batch size and a precision, and runs train steps on random
images on the device: forward pass, backward pass, gradient clipping, optimizer. It prints a line of
JSON.
"""

import functools
import importlib
import json
import os
import resource
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

CLASSES = 1000
PIXELS = 224
RATE = 1e-3
COMPUTE_BY_NAME: dict[str, dict[str, Any]] = {  # values of `config.compute`
    'ours': {},
    'ours, computed as in Flax': {'layout': 'batched', 'attention': 'xla'},
    'ours, remat=none': {'remat': 'none'},
    'ours, last_block=whole': {'last_block': 'whole'},
}
SCAN = 'big_vision, scan'


def python_path(folder: str | os.PathLike[str]) -> str:
    """Returns PYTHONPATH with `folder` in front, and with its current folders."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get('PYTHONPATH')])])


class Workload(NamedTuple):
    """The workload that all programs run."""

    width: int
    depth: int
    mlp_dim: int
    heads: int
    patch: int
    pool: str  # cls or gap
    batch: int
    precision: str  # float32 or bfloat16: of matrix products; parameters are float32
    optimizer: str  # sgd, with momentum, or adamw
    steps: int

    @classmethod
    def of(
        cls, model: Any, *, batch: int, precision: str, optimizer: str, steps: int = 1
    ) -> 'Workload':
        """Returns the workload of a ViTConfig. A peer's interpreter may not have that class."""
        sizes = model.width, model.depth, model.mlp_dim, model.num_heads, model.patch_size[0]
        return cls(*sizes, model.pool, batch, precision, optimizer, steps)


def trace_vit_jax(work: Workload, compute: dict[str, Any]) -> Any:
    """Returns the traced update of `vit_jax.train`, and a function that makes state and batch."""
    from benchmarks.our_step import trace_step
    from vit_jax.config import TrainConfig
    from vit_jax.models import Compute, ViTConfig
    from vit_jax.training.duration import Duration
    from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

    kind: Any = work.optimizer
    config = TrainConfig(
        data='digits',
        model=ViTConfig(
            width=work.width,
            depth=work.depth,
            mlp_dim=work.mlp_dim,
            num_heads=work.heads,
            patch_size=(work.patch, work.patch),
            pool=work.pool,  # type: ignore[arg-type]
        ),
        total=Duration(steps=1000),
        batch_size=work.batch,
        optimizer=OptimizerConfig(
            kind=kind, clip_norm=1.0, weight_decay=0.1 if kind == 'adamw' else 0.0
        ),
        schedule=ScheduleConfig(kind='constant'),  # as in the other programs
        compute=Compute(dtype=work.precision, **compute),  # type: ignore[arg-type]
    )
    step = trace_step(config, num_classes=CLASSES)
    return step.lowered, step.make_inputs


def trace_with_optax(
    apply: Callable[..., Any], init: Callable[..., Any], work: Workload, *, with_norms: bool
) -> Any:
    """Returns the traced step of a JAX peer, and a function that makes state and batch.

    `with_norms` also computes norms, as big_vision does.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    kinds = {'sgd': optax.sgd(RATE, momentum=0.9), 'adamw': optax.adamw(RATE, weight_decay=1e-4)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), kinds[work.optimizer])

    def loss(params: Any, images: Any, targets: Any, key: Any) -> Any:
        logits = jax.nn.log_softmax(apply(params, images, key).astype(jnp.float32))
        return -jnp.mean(jnp.sum(logits * targets, axis=1))

    def update(state: Any, data: Any) -> Any:
        params, moments, key = state
        key, step_key = jax.random.split(key)
        value, gradient = jax.value_and_grad(loss)(params, *data, step_key)
        changes, moments = optimizer.update(gradient, moments, params)
        params = optax.apply_updates(params, changes)
        measured_trees = (gradient, params, changes) if with_norms else ()
        return (params, moments, key), (value, *map(optax.tree.norm, measured_trees))

    def initialize() -> Any:
        params = init(jax.random.key(0), jnp.zeros((1, PIXELS, PIXELS, 3)))['params']
        return params, optimizer.init(params), jax.random.key(1)

    def make_inputs() -> tuple[Any, Any]:
        rng = np.random.default_rng(0)
        images = rng.standard_normal((work.batch, PIXELS, PIXELS, 3), np.float32)
        targets = np.eye(CLASSES, dtype=np.float32)[rng.integers(0, CLASSES, work.batch)]
        return jax.jit(initialize)(), jax.device_put((images, targets))

    data = (work.batch, PIXELS, PIXELS, 3), (work.batch, CLASSES)
    shapes = tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in data)
    return jax.jit(update, donate_argnums=0).lower(jax.eval_shape(initialize), shapes), make_inputs


def trace_vision_transformer(path: str, work: Workload) -> Any:
    """Returns the step of vision_transformer, with the model as its programs build it."""
    sys.path.insert(0, path)
    models_vit: Any = importlib.import_module('vit_jax.models_vit')
    model = models_vit.VisionTransformer(
        num_classes=CLASSES,
        patches=types.SimpleNamespace(size=(work.patch, work.patch)),
        hidden_size=work.width,
        transformer={
            'num_layers': work.depth,
            'mlp_dim': work.mlp_dim,
            'num_heads': work.heads,
            'dropout_rate': 0.0,
            'attention_dropout_rate': 0.0,
        },
        classifier='token' if work.pool == 'cls' else 'gap',
    )

    def apply(params: Any, images: Any, key: Any) -> Any:
        return model.apply({'params': params}, images, train=True, rngs={'dropout': key})

    init = functools.partial(model.init, train=False)
    return trace_with_optax(apply, init, work, with_norms=False)


def trace_big_vision(path: str, work: Workload, *, scan: bool) -> Any:
    """Returns the step of big_vision.

    The modules of TensorFlow that it imports, but a step does not use, are replaced by stubs.
    """
    sys.path.insert(0, path)
    importlib.import_module('flax.training.checkpoints')  # checks whether TensorFlow is installed
    for name in ('tensorflow', 'tensorflow.io', 'tensorflow.io.gfile'):
        sys.modules[name] = types.ModuleType(name)
    sys.modules['tensorflow'].io = sys.modules['tensorflow.io']  # type: ignore[attr-defined]
    sys.modules['tensorflow.io'].gfile = sys.modules[name]  # type: ignore[attr-defined]
    vit: Any = importlib.import_module('big_vision.models.vit')
    model = vit._Model(
        CLASSES,
        patch_size=(work.patch, work.patch),
        width=work.width,
        depth=work.depth,
        mlp_dim=work.mlp_dim,
        num_heads=work.heads,
        pool_type='tok' if work.pool == 'cls' else 'gap',
        scan=scan,
        remat_policy='dots_with_no_batch_dims_saveable',
        dtype_mm=work.precision,
    )

    def apply(params: Any, images: Any, key: Any) -> Any:
        return model.apply({'params': params}, images, train=True, rngs={'dropout': key})[0]

    return trace_with_optax(apply, model.init, work, with_norms=True)


def run_in_jax(name: str, path: str, work: Workload) -> dict[str, Any]:
    """Compiles one of the programs above, and runs the steps."""
    began = time.process_time()
    if name in COMPUTE_BY_NAME:
        lowered, make_inputs = trace_vit_jax(work, COMPUTE_BY_NAME[name])
    elif name == 'vision_transformer':
        lowered, make_inputs = trace_vision_transformer(path, work)
    else:
        lowered, make_inputs = trace_big_vision(path, work, scan=name == SCAN)
    traced = time.process_time()
    step = lowered.compile()
    compiled = time.process_time()
    import jax

    state, *inputs = make_inputs()
    carry = [state]

    def run_steps(steps: int) -> None:
        for _ in range(steps):
            carry[0], _ = step(carry[0], *inputs)
        jax.block_until_ready(carry[0])

    del state  # the first step reuses its memory
    device = jax.devices()[0]
    seconds = time_steps(run_steps, work.steps, on_cpu=device.platform == 'cpu')
    stats = device.memory_stats() or {}
    return {
        'seconds': seconds,
        'trace_seconds': traced - began,
        'compile_seconds': compiled - traced,
        'temporary_bytes': step.memory_analysis().temp_size_in_bytes,
        'peak_bytes': stats.get('peak_bytes_in_use', peak_bytes()),
        'device': device.device_kind,
        'versions': {'jax': jax.__version__},
    }


def run_timm(work: Workload) -> dict[str, Any]:
    """Runs the steps with timm's model, compiled by torch."""
    timm, torch = _imported('timm'), _imported('torch')
    models = _imported('timm.models.vision_transformer')
    has_gpu = torch.cuda.is_available()
    device = torch.device('cuda' if has_gpu else 'cpu')
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_float32_matmul_precision('high')  # TF32, as jax uses by default
    model = models.VisionTransformer(
        img_size=PIXELS,
        patch_size=work.patch,
        num_classes=CLASSES,
        embed_dim=work.width,
        depth=work.depth,
        num_heads=work.heads,
        mlp_ratio=work.mlp_dim / work.width,
        class_token=work.pool == 'cls',
        global_pool='token' if work.pool == 'cls' else 'avg',
    ).to(device)
    kinds: dict[str, Any] = {
        'sgd': lambda p: torch.optim.SGD(p, RATE, momentum=0.9),
        'adamw': lambda p: torch.optim.AdamW(p, RATE, weight_decay=1e-4, fused=has_gpu),
    }
    optimizer = kinds[work.optimizer](model.parameters())
    images = torch.randn(work.batch, 3, PIXELS, PIXELS, device=device)
    labels = torch.randint(0, CLASSES, (work.batch,), device=device)
    compiled_model = torch.compile(model)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=work.precision == 'bfloat16')

    def run_steps(steps: int) -> None:
        for _ in range(steps):
            with autocast:
                logits = compiled_model(images)
            loss = torch.nn.functional.cross_entropy(logits.float(), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if has_gpu:
            torch.cuda.synchronize()

    began = time.process_time()
    run_steps(1)
    compiled = time.process_time()
    return {
        'seconds': time_steps(run_steps, work.steps, on_cpu=not has_gpu),
        'trace_seconds': 0.0,
        'compile_seconds': compiled - began,  # includes the first step
        'temporary_bytes': None,
        'peak_bytes': torch.cuda.max_memory_allocated() if has_gpu else peak_bytes(),
        'device': torch.cuda.get_device_name() if has_gpu else 'cpu',
        'versions': {'torch': torch.__version__, 'timm': timm.__version__},
    }


def run_matmul(work: Workload) -> dict[str, Any]:
    """Measures operations per second of large matrix products, an upper bound for train steps."""
    import jax
    import jax.numpy as jnp

    platform = jax.devices()[0].platform
    on_cpu = platform == 'cpu'
    side, count = (1024, 8) if on_cpu else (8192, 32)
    dtype = jnp.dtype(work.precision)
    matrix = jax.random.normal(jax.random.key(0), (side, side), jnp.float32).astype(dtype)

    @jax.jit
    def chain(left: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, x: (x @ matrix) / side**0.5, left)

    def run_steps(steps: int) -> None:
        x = matrix
        for _ in range(steps):
            x = chain(x)
        jax.block_until_ready(x)

    seconds = time_steps(run_steps, work.steps, on_cpu=on_cpu)
    return {'platform': platform, 'operations_per_second': 2 * side**3 * count / seconds}


def _imported(name: str) -> Any:
    return importlib.import_module(name)


def time_steps(make: Callable[[int], None], steps: int, *, on_cpu: bool) -> float:
    """Returns seconds per step. On a CPU these are CPU seconds, which other work affects little."""
    clock = time.process_time if on_cpu else time.perf_counter
    make(1 if on_cpu else 3)  # the first steps allocate memory and load kernels
    began = clock()
    make(steps)
    return (clock() - began) / steps


def peak_bytes() -> int:
    """Returns the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == '__main__':
    program = sys.argv[1]
    folder = sys.argv[2]
    work = Workload(**json.loads(sys.argv[3]))
    if program == 'timm':
        result = run_timm(work)
    elif program == 'matmul':
        result = run_matmul(work)
    else:
        result = run_in_jax(program, folder, work)
    print(json.dumps(result))
