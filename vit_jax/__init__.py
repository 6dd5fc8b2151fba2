"""Vision Transformers in JAX: pre-train, fine-tune, probe with few labels, and look inside."""

from typing import TYPE_CHECKING, Any

__version__ = '0.1.0'
__all__ = ['load', 'save']

if TYPE_CHECKING:
    from vit_jax.pretrained import load, save


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    """Imports `load` and `save` on first use, so that models need only jax and flax."""
    if name in __all__:
        from vit_jax import pretrained

        return getattr(pretrained, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
