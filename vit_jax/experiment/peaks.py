"""How fast devices can multiply at most, to say what share of that a program reaches."""

from typing import Any

# Operations a second of one device, as jax counts devices and names their kinds: bfloat16,
# dense, accumulated in float32; from the makers' data sheets. Of TPU v2, v3 and 7x a device is half
# a chip.
_PEAKS = {
    'TPU v2': 23e12,
    'TPU v3': 61.5e12,
    'TPU v4': 275e12,
    'TPU v5 lite': 197e12,
    'TPU v5e': 197e12,
    'TPU v5': 459e12,  # v5p
    'TPU v5p': 459e12,
    'TPU v6 lite': 918e12,
    'TPU v6e': 918e12,
    'TPU7x': 1153.5e12,
    'NVIDIA A10': 125e12,
    'NVIDIA A100': 312e12,
    'NVIDIA L4': 121e12,
    'NVIDIA L40S': 362e12,
    'NVIDIA GeForce RTX 3090': 71e12,
    'NVIDIA GeForce RTX 4090': 165e12,
    'NVIDIA H100 PCIe': 756e12,
    'NVIDIA H100 NVL': 835e12,
    'NVIDIA H100 80GB HBM3': 989e12,
    'NVIDIA H200': 989e12,
    'NVIDIA B200': 2250e12,
}


def peak_of(device_kind: str) -> float | None:
    """Operations a second of a device of this kind (`jax.Device.device_kind`); None: not known.

    What follows a name in the table, such as the memory in `NVIDIA A100-SXM4-80GB`, is no other
    device; a part of one (MIG) is.
    """
    if ' MIG ' in device_kind:
        return None
    for name, peak in _PEAKS.items():
        rest = device_kind.removeprefix(name)
        if rest != device_kind and not rest[:1].isalnum() and (rest[:1] != ' ' or 'GB' in rest):
            return peak
    return None


def has_fast_bfloat16(device: Any) -> bool:
    """Does the device multiply bfloat16 faster than float32?

    True for TPUs and for NVIDIA GPUs of compute capability 8.0 (Ampere) or newer. AMD GPUs return
    False because they were not tested.
    """
    major = str(getattr(device, 'compute_capability', '')).partition('.')[0]
    return device.platform == 'tpu' or (major.isdecimal() and int(major) >= 8)
