"""Peaks of devices by the names that jax has for them."""

import pytest

from vit_jax.experiment.reporter import peak_of


@pytest.mark.parametrize(
    ('kind', 'peak'),
    [
        ('TPU v5 lite', 197e12),
        ('TPU v5', 459e12),
        ('TPU v5p', 459e12),
        ('NVIDIA A100-SXM4-40GB MIG 1g.5gb', None),
        ('NVIDIA A100-SXM4-80GB', 312e12),
        ('NVIDIA A100 80GB PCIe', 312e12),
        ('NVIDIA A10', 125e12),
        ('NVIDIA H100 80GB HBM3', 989e12),
        ('NVIDIA H200', 989e12),
        ('NVIDIA H200 NVL', None),
        ('NVIDIA L40S', 362e12),
        ('NVIDIA GeForce RTX 4090 Laptop GPU', None),
        ('cpu', None),
    ],
)
def test_a_name_is_that_of_one_device(kind, peak):
    assert peak_of(kind) == peak
