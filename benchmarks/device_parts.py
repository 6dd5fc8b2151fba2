"""Runs a part of `benchmarks.device`, and prints a line of JSON for each measurement.

python -m benchmarks.device_parts PART '{"seconds": 60}'
"""

import collections
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import cv2
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import peers
from benchmarks.input_speed import make_batches
from benchmarks.our_step import Step, make_config, trace_step
from benchmarks.peer_programs import SCAN, Workload
from benchmarks.step_program import Kernel, list_kernels
from configs.pretrain import cifar10_gpu, cifar10_hybrid
from vit_jax.base.array_types import Array
from vit_jax.checkpoints.card import Card
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.image_preprocessing import InceptionCrop, Preprocessing
from vit_jax.data.loading import LoaderConfig, count_cores
from vit_jax.models import (
    Backbone,
    Compute,
    ModelConfig,
    Regularization,
    ResNetConfig,
    ViTConfig,
    abstract_params,
    build,
    variant,
)
from vit_jax.models.attention import Implementation, attend, supports_cudnn
from vit_jax.pretrained import LoadedModel, save
from vit_jax.training.objectives import Distillation
from vit_jax.training.optimizer import OptimizerConfig
from vit_jax.training.sharpness import Sam

ROOT = pathlib.Path(__file__).parents[1]
CLASSES = 1000
STEPS = 20
PROFILED_STEPS = 3  # steps
NUM_KERNELS = 30  # kernels
TINY = ViTConfig(image_size=(32, 32), patch_size=(8, 8), width=48, depth=2, mlp_dim=96, num_heads=3)
TINY_BACKBONE = Backbone(blocks=(1, 1), width=32)
# Each option is tried alone and compared with no option. An option that this XLA does not have is
# reported and skipped.
XLA_OPTIONS: list[dict[str, Any]] = [
    {'xla_gpu_enable_triton_gemm': False},
    {'xla_gpu_enable_cublaslt': True},
    {'xla_gpu_cudnn_gemm_fusion_level': 2},
    {'xla_gpu_exhaustive_tiling_search': True},
    {'xla_gpu_enable_latency_hiding_scheduler': True},
    {'xla_gpu_graph_min_graph_size': 1},
    {'xla_gpu_enable_command_buffer': ''},
]

# Target throughput relative to training without the option: SAM 1 / 2.05, PatchDropout 1.7.
TRAINING_OPTIONS: dict[str, dict[str, Any]] = {
    'SAM': {'optimizer': OptimizerConfig(weight_decay=0.1, clip_norm=1.0, sharpness=Sam())},
    'PatchDropout of 0.5': {'regularization': Regularization(patch_dropout=0.5)},
    '3-Augment and color jitter': {
        'augmentation': Augmentation(three_augment=True, color_jitter=0.3)
    },
}


def emit(text: str, **numbers: Any) -> None:
    """Prints a line of JSON with a text for people and numbers for programs."""
    print(json.dumps({'text': text} | numbers), flush=True)


def on_cpu() -> bool:
    """Returns whether jax has no accelerator."""
    return jax.default_backend() == 'cpu'


def model_and_batch() -> tuple[ViTConfig, int]:
    """Returns the model and the batch size of most parts."""
    if on_cpu():
        return TINY, 8
    model = variant('B/16', pool='gap')
    assert isinstance(model, ViTConfig)
    return model, 256


@dataclasses.dataclass
class RunningStep:
    """A compiled step and its newest state."""

    step: Any
    state: Any
    constants: Sequence[Any]  # other arguments than state and batch
    metrics: Any = None

    def run_steps(self, steps: int, batches: Iterator[Any]) -> float:
        """Runs steps, and returns the mean seconds per step."""
        began = time.perf_counter()
        for _ in range(steps):
            self.state, self.metrics = self.step(self.state, next(batches), *self.constants)
        jax.block_until_ready(self.metrics)
        return (time.perf_counter() - began) / steps


def repeat(batch: Any) -> Iterator[Any]:
    """Yields the same batch without end."""
    while True:
        yield batch


def measure(traced: Step, steps: int = STEPS, options: dict[str, Any] | None = None) -> dict:
    """Compiles a step, runs it several times, and returns the measurements."""
    began = time.perf_counter()
    compiled = traced.lowered.compile(options)
    compile_seconds = time.perf_counter() - began
    state, batch, *constants = traced.make_inputs()
    running = RunningStep(compiled, state, constants)
    batches = repeat(batch)
    running.run_steps(3, batches)
    seconds = min(running.run_steps(max(1, steps // 2), batches) for _ in range(2))
    return {
        'compile_seconds': round(compile_seconds, 2),
        'step_ms': round(1e3 * seconds, 3),
        'images_per_second': round(traced.experiment.config.batch_size / seconds, 1),
        'loss': running.metrics.means['loss'],
        'temporary_bytes': compiled.memory_analysis().temp_size_in_bytes,
    }


def describe(numbers: dict[str, Any]) -> str:
    """Formats the numbers of `measure` in one line."""
    return (
        f'{numbers["images_per_second"]:>10,.1f} images/s, {numbers["step_ms"]:,.2f} ms per step, '
        f'compiled in {numbers["compile_seconds"]:.1f} s, loss {numbers["loss"]:.3f}'
    )


def part_device(options: dict[str, Any]) -> None:
    """Reports the device, software and command of this run."""
    device = jax.devices()[0]
    names = 'jax', 'jaxlib', 'flax', 'optax', 'numpy'
    versions = {name: importlib.metadata.version(name) for name in names}
    head = subprocess.run(
        ['git', 'rev-parse', '--short', 'HEAD'], cwd=ROOT, text=True, capture_output=True
    )
    software = ', '.join(f'{name} {version}' for name, version in versions.items())
    emit(
        f'{device.device_kind}, {count_cores()} cores; {software}',
        device=device.device_kind,
        platform_version=getattr(device.client, 'platform_version', ''),
        cores=count_cores(),
        versions=versions,
        commit=head.stdout.strip(),
        command=options['command'],
    )


def part_compile(options: dict[str, Any]) -> None:
    """Compiles and trains each model, to find models that abort or do not train."""
    implementations: tuple[Implementation, ...] = ('xla', 'blockwise')
    hybrid = dataclasses.replace(cifar10_hybrid.get_config(), data='photos', batch_size=256)
    programs = {'hybrid of CIFAR-10': dataclasses.replace(hybrid, fewshot=None)}
    if on_cpu():
        model = dataclasses.replace(TINY, backbone=TINY_BACKBONE, patch_size=(1, 1))
        programs = {'hybrid': make_config(model, 8)}
        resnet: ModelConfig = ResNetConfig(image_size=(32, 32), backbone=TINY_BACKBONE)
        vit: ModelConfig = TINY
        batch_size = 8
    else:
        implementations = ('cudnn', 'xla', 'blockwise')
        resnet = variant('R50x1')
        vit = variant('B/16')
        batch_size = 128
    programs['ResNet'] = make_config(resnet, batch_size)
    for kind in implementations:
        programs[f'ViT, {kind}'] = make_config(vit, batch_size, compute=Compute(attention=kind))
    for name, config in programs.items():
        try:
            numbers = measure(trace_step(config, num_classes=10))
        except Exception as error:  # the other models may still work
            emit(f'{name}: failed: {first_line(error)}', name=name, error=str(error)[:2000])
            continue
        emit(f'{name:<22}{describe(numbers)}', name=name, batch=config.batch_size, **numbers)


def first_line(error: Exception) -> str:
    """Returns the first line of an error message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def part_peers(options: dict[str, Any]) -> None:
    """Runs the programs of `benchmarks.peers`.

    This process uses the CPU, so that its children have the whole GPU.
    """
    platform = detect_platform()
    jax.config.update('jax_platforms', 'cpu')
    sizes = {'B/16': 256, 'L/16': 128, 'S/16': 512, 'H/14': 64}
    if platform == 'cpu':
        sizes = {'Ti/16': 2}
    paths = {'big_vision': options['big_vision'], SCAN: options['big_vision']}
    paths['timm'] = options['timm']
    programs = {'ours': ''} | {name: path for name, path in paths.items() if path}
    matmul: dict[str, dict[str, Any]] = {}
    for name, batch in sizes.items():
        model = variant(name, pool='gap', num_classes=CLASSES)
        assert isinstance(model, ViTConfig)
        steps = 1 if platform == 'cpu' else 30
        precision = 'float32' if platform == 'cpu' else 'bfloat16'
        work = Workload.of(model, batch=batch, precision=precision, optimizer='adamw', steps=steps)
        if not matmul:  # the same for all sizes
            matmul = peers.run_rounds({'matmul': ''}, work, rounds=1, platform=platform)
        results = dict(matmul)
        for program, path in programs.items():
            results |= peers.run_rounds({program: path}, work, rounds=1, platform=platform)
            # The last line has the matrix product.
            *_, row, line = peers.format_table(results, work, model)
            emit(f'{name} {row}', model=name, work=work._asdict(), name=program, **results[program])
    emit(line, **matmul)


def detect_platform() -> str:
    """Returns jax's platform without reserving device memory."""
    command = [sys.executable, '-c', 'import jax; print(jax.default_backend())']
    return subprocess.run(command, text=True, capture_output=True).stdout.split()[-1]


def part_profile(options: dict[str, Any]) -> None:
    """Reports the share of each kernel in the time of a step."""
    model, batch_size = model_and_batch()
    traced = trace_step(make_config(model, batch_size), num_classes=CLASSES)
    compiled = traced.lowered.compile()
    state, batch, *constants = traced.make_inputs()
    running = RunningStep(compiled, state, constants)
    running.run_steps(3, repeat(batch))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            seconds = running.run_steps(PROFILED_STEPS, repeat(batch))
        durations = read_durations(next(pathlib.Path(folder).rglob('*.xplane.pb')))
    total = sum(durations.values())
    emit(
        f'{1e3 * seconds:.2f} ms per step, {total / 1e6 / PROFILED_STEPS:.2f} ms in kernels',
        step_ms=1e3 * seconds,
        kernels_ms=total / 1e6 / PROFILED_STEPS,
    )
    for kind, group in group_kernels(durations, compiled.as_text()):
        share = group['ms'] * 1e6 * PROFILED_STEPS / total
        rates = [f'{group[unit]:8,.1f} {unit}' for unit in ('TFLOP/s', 'GB/s') if group[unit]]
        text = f'{group["ms"]:8.3f} ms {share:6.1%} {group["times"]:>5.0f} x {kind:<60}'
        emit(text + ' '.join(rates), kind=kind, share=share, **group)


def read_durations(profile: pathlib.Path) -> dict[str, float]:
    """Returns the nanoseconds of each HLO operation in a profile, by name."""
    durations: dict[str, float] = collections.defaultdict(float)
    planes = [*jax.profiler.ProfileData.from_file(str(profile)).planes]
    gpu_planes = [plane for plane in planes if plane.name.startswith('/device:GPU')]
    for plane in gpu_planes or planes:
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get('hlo_op')
                if name is not None:
                    durations[str(name)] += event.duration_ns
    return durations


def group_kernels(durations: dict[str, float], text: str) -> list[tuple[str, dict[str, float]]]:
    """Returns the slowest kinds of kernels and their throughput, summed over blocks."""
    by_name: dict[str, Kernel] = {kernel.name: kernel for kernel in list_kernels(text)}
    groups: dict[str, dict[str, float]] = {}
    for name, nanoseconds in durations.items():
        kernel = by_name.get(name)
        result = '' if kernel is None else re.sub(r'\{.*?\}', '', kernel.result)[:48]
        kind = f'{re.sub(r"[.0-9]+$", "", name)} {result}'.strip()
        zeros = {'ms': 0.0, 'times': 0.0, 'bytes': 0.0, 'operations': 0.0}
        group = groups.setdefault(kind, zeros)
        group['ms'] += nanoseconds / 1e6 / PROFILED_STEPS
        if kernel is not None:
            group['times'] += kernel.times
            group['bytes'] += kernel.times * (kernel.moved or 0)
            group['operations'] += kernel.times * (kernel.operations or 0)
    for group in groups.values():
        seconds = max(group['ms'], 1e-9) / 1e3
        group['GB/s'] = group['bytes'] / seconds / 1e9
        group['TFLOP/s'] = group['operations'] / seconds / 1e12
    return sorted(groups.items(), key=lambda item: -item[1]['ms'])[:NUM_KERNELS]


def part_files(options: dict[str, Any]) -> None:
    """Measures training from JPEG files, and how long a step waits for its batch."""
    model, batch_size = model_and_batch()
    crop = Augmentation(crop=InceptionCrop(), flip=True)
    config = make_config(model, batch_size, augmentation=crop)
    traced = trace_step(config, num_classes=CLASSES)
    compiled = traced.lowered.compile()
    state, batch, *constants = traced.make_inputs()
    running = RunningStep(compiled, state, constants)
    running.run_steps(3, repeat(batch))
    repeated = running.run_steps(STEPS, repeat(batch))
    emit(f'repeated batch {batch_size / repeated:,.0f} images/s', step_ms=1e3 * repeated)
    with tempfile.TemporaryDirectory() as folder:
        photos = options['photos'] or make_photos(folder)
        origin = 'given photos' if options['photos'] else 'generated photos of 500 x 375 pixels'
        loader = LoaderConfig(placement='host')
        batches = make_batches(photos, model.image_size, batch_size, loader)
        waits: list[float] = []
        running.run_steps(3, batches)
        seconds = running.run_steps(STEPS, time_waits(batches, waits))
        mean_wait = sum(waits) / STEPS
        emit(
            f'{count_cores()} threads {batch_size / seconds:>8,.0f} images/s, '
            f'{mean_wait / seconds:6.1%} of the time waiting for data; {origin}',
            name='threads',
            count=count_cores(),
            images_per_second=batch_size / seconds,
            wait_share=mean_wait / seconds,
        )
        del batches


def make_photos(folder: str) -> str:
    """Writes 64 JPEG files of smooth noise, about 60 kB each, and returns the folder."""
    rng = np.random.default_rng(0)
    for number in range(64):
        coarse = rng.integers(0, 256, (47, 63, 3), dtype=np.uint8)
        pixels = cv2.resize(coarse, (500, 375), interpolation=cv2.INTER_CUBIC)
        noisy = np.clip(pixels + rng.normal(0, 8, pixels.shape), 0, 255).astype(np.uint8)
        cv2.imwrite(f'{folder}/{number}.jpg', noisy)
    return folder


def time_waits(batches: Iterator[Any], waits: list[float]) -> Iterator[Any]:
    """Yields the same batches, and appends the seconds that each took to a list."""
    while True:
        began = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - began)
        yield batch


def part_cifar10(options: dict[str, Any]) -> None:
    """Trains the ViT and the hybrid of cifar10_gpu.py and reports each evaluation."""
    if options['cifar10'] is None:
        emit('not measured: --cifar10=FOLDER names the images')
        return
    for model in cifar10_gpu.ARGUMENTS:
        train_cifar10(model, options['cifar10'], tiny=detect_platform() == 'cpu')


def train_cifar10(model: str, data: str, *, tiny: bool) -> None:
    """Trains one model of cifar10_gpu.py, for six steps if `tiny`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, '-m', 'vit_jax.train', f'--workdir={folder}/run']
        command += [f'--config=configs/pretrain/cifar10_gpu.py:{model}', f'--config.data={data}']
        if tiny:
            command += ['--config.total.steps=6', '--config.eval_every_steps=3']
            command += ['--config.batch_size=8', '--config.eval_batch_size=8']
            command += ['--config.model.depth=1', '--config.image_size=(32,32)']
            command += ['--config.model.backbone.blocks=(1,)'] if model == 'hybrid' else []
        began = time.monotonic()
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        reported = 0
        while child.poll() is None or reported < len(read_evaluations(folder)):
            for line in read_evaluations(folder)[reported:]:
                reported += 1
                seconds = time.monotonic() - began
                emit(
                    f'{model}: {line["accuracy"]:.2%} of the test images after {line["step"]:,} '
                    f'steps, {seconds:.0f} s including compilation',
                    model=model,
                    step=line['step'],
                    accuracy=line['accuracy'],
                    seconds=seconds,
                )
            time.sleep(0.2)
        if child.returncode:
            raise SystemExit(child.returncode)  # the child printed the reason


def read_evaluations(folder: str) -> list[dict[str, Any]]:
    """Reads the evaluations of a run that is in progress."""
    path = pathlib.Path(folder, 'run', 'metrics.jsonl')
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith('\n')]
    return [values for values in map(json.loads, lines) if values['kind'] == 'test']


def part_optimizers(options: dict[str, Any]) -> None:
    """Compares the step with Muon to the step with AdamW."""
    models = {'B/16': 256, 'L/16': 128}
    programs = {name: (variant(name, pool='gap'), batch) for name, batch in models.items()}
    if on_cpu():
        programs = {'tiny': (TINY, 8)}
    for name, (model, batch) in programs.items():
        base = None
        for kind in 'adamw', 'muon':
            optimizer = OptimizerConfig(kind=kind, weight_decay=0.1, clip_norm=1.0)
            config = dataclasses.replace(make_config(model, batch), optimizer=optimizer)
            numbers = measure(trace_step(config, num_classes=CLASSES))
            base = base or numbers['step_ms']
            ratio = numbers['step_ms'] / base
            text = f'{name:<5}{kind:<6}{ratio:6.3f} {describe(numbers)}'
            emit(text, model=name, batch=batch, name=kind, ratio=ratio, **numbers)


def part_options(options: dict[str, Any]) -> None:
    """Measures the throughput with each XLA or training option, relative to no option."""
    model, batch_size = model_and_batch()
    traced = trace_step(make_config(model, batch_size), num_classes=CLASSES)
    candidates = [{'xla_backend_optimization_level': 1}] if on_cpu() else XLA_OPTIONS
    base = None
    for xla_options in [{}, *candidates]:
        name = ', '.join(f'{key}={value}' for key, value in xla_options.items()) or 'no option'
        try:
            numbers = measure(traced, options=xla_options)
        except Exception as error:  # an option that this XLA does not know
            emit(f'{name}: failed: {first_line(error)}', name=name, error=str(error)[:2000])
            continue
        base = base or numbers['images_per_second']
        ratio = numbers['images_per_second'] / base
        emit(f'{name:<50}{ratio:6.3f} {describe(numbers)}', name=name, ratio=ratio, **numbers)
    if base is None:
        return
    for name, changes in list(TRAINING_OPTIONS.items())[: 1 if on_cpu() else None]:
        config = dataclasses.replace(make_config(model, batch_size), **changes)
        numbers = measure(trace_step(config, num_classes=CLASSES))
        ratio = numbers['images_per_second'] / base
        emit(f'{name:<50}{ratio:6.3f} {describe(numbers)}', name=name, ratio=ratio, **numbers)


def part_distillation(options: dict[str, Any]) -> None:
    """Compares a step with a teacher to a step without, plus a forward pass of the teacher."""
    student = variant('S/16')
    teacher = variant('B/16', num_classes=CLASSES)
    batch_size = 256
    if on_cpu():
        student = TINY
        batch_size = 8
        teacher = dataclasses.replace(TINY, width=96, num_classes=CLASSES)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: 0.02 * rng.normal(size=leaf.shape).astype(np.float32), abstract_params(teacher)
    )
    card = Card(model=teacher, grid=teacher.grid, preprocessing=Preprocessing())
    dtype: Literal['float32', 'bfloat16'] = 'float32' if on_cpu() else 'bfloat16'
    model = build(teacher, compute=Compute(dtype=dtype))
    images = jnp.zeros((batch_size, *teacher.image_size, 3))
    placed = jax.device_put(jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), params))
    forward = jax.jit(model.apply)
    jax.block_until_ready(forward(placed, images))
    began = time.perf_counter()
    for _ in range(STEPS):
        logits = forward(placed, images)
    jax.block_until_ready(logits)
    forward_ms = 1e3 * (time.perf_counter() - began) / STEPS
    with tempfile.TemporaryDirectory() as folder:
        save(LoadedModel(card, params), f'{folder}/teacher', 'vit_jax')
        results = {}
        for path in None, f'{folder}/teacher':
            config = make_config(student, batch_size, distillation=Distillation(teacher=path))
            results[path] = measure(trace_step(config, num_classes=CLASSES))
    alone, taught = results.values()
    ratio = taught['step_ms'] / (alone['step_ms'] + forward_ms)
    emit(
        f'{taught["step_ms"]:.2f} ms per step with a teacher, {alone["step_ms"]:.2f} ms without, '
        f'{forward_ms:.2f} ms forward pass of the teacher; with / (without + forward) {ratio:.3f}',
        taught=taught,
        alone=alone,
        forward_ms=forward_ms,
        ratio=ratio,
    )


def part_attention(options: dict[str, Any]) -> None:
    """Measures the error of bfloat16 attention and the time of each implementation."""
    lengths = (17, 36) if on_cpu() else (36, 50, 196, 197, 256, 257, 577, 1025)
    batch, heads, size = (2, 3, 8) if on_cpu() else (64, 12, 64)
    implementations: tuple[Implementation, ...] = ('xla', 'blockwise')
    for length in lengths:
        keys = jax.random.split(jax.random.key(length), 4)
        inputs = [jax.random.normal(key, (batch, length, heads, size)) for key in keys]
        bfloat16_inputs = [x.astype(jnp.bfloat16) for x in inputs]
        with jax.default_matmul_precision('highest'):
            expected = jax.block_until_ready(attention_and_gradients('xla')(*inputs))
        if not on_cpu():
            fused = supports_cudnn(length, heads, size, 'bfloat16')
            implementations = ('cudnn', 'xla') if fused else ('xla',)
            if not fused:
                emit(f'{length:>5} tokens: cuDNN does not compile', tokens=length, name='cudnn')
        for kind in implementations:
            function = attention_and_gradients(kind)
            outputs = jax.block_until_ready(function(*bfloat16_inputs))
            began = time.perf_counter()
            for _ in range(STEPS):
                outputs = function(*bfloat16_inputs)
            jax.block_until_ready(outputs)
            ms = 1e3 * (time.perf_counter() - began) / STEPS
            errors = [relative_error(*pair) for pair in zip(outputs, expected, strict=True)]
            emit(
                f'{length:>5} tokens {kind:<10}{ms:8.3f} ms forward and backward; relative error '
                f'{errors[0]:.4f}, of gradients {max(errors[1:]):.4f}',
                tokens=length,
                name=kind,
                ms=ms,
                errors=errors,
            )


@functools.cache
def attention_and_gradients(implementation: Implementation) -> Callable[..., tuple[Array, ...]]:
    """Returns a compiled function that computes attention and its three gradients."""

    def run(query: Array, key: Array, value: Array, change: Array) -> tuple[Array, ...]:
        attention = functools.partial(attend, implementation=implementation)
        output, gradients_of = jax.vjp(attention, query, key, value)
        return output, *gradients_of(change)

    return jax.jit(run)


def relative_error(actual: Array, expected: Array) -> float:
    """Returns the Euclidean norm of the difference, relative to the norm of `expected`."""
    difference = actual.astype(jnp.float32) - expected
    return float(jnp.linalg.norm(difference) / jnp.linalg.norm(expected))


if __name__ == '__main__':
    globals()[f'part_{sys.argv[1]}'](json.loads(sys.argv[2]))
