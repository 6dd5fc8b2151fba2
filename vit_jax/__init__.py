"""Vision Transformers in JAX: pre-train, fine-tune, probe with few labels, and look inside."""

__version__ = '0.1.0'
