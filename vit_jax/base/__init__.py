"""Foundations: configuration records, tree names, array types, errors and file storage."""

from vit_jax.base.array_types import (
    Array,
    Batch,
    Bool,
    Float,
    Int,
    Key,
    Num,
    Params,
    Scalar,
    UInt8,
    UInt64,
)
from vit_jax.base.errors import (
    MissingFile,
    StorageError,
    TransientError,
    UserError,
    plural,
    raise_all,
)
from vit_jax.base.files import atomic_write, write_bytes, write_json, write_text
from vit_jax.base.records import Record, is_off, require, require_between, require_pattern
from vit_jax.base.storage import Path, make_folder, sync, usable
