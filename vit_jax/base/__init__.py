"""What everything stands on: records, names of leaves, shapes, errors, files written whole."""

from vit_jax.base.array_types import Array, Batch, Bool, Float, Int, Key, Num, Params, UInt8
from vit_jax.base.atomic_files import (
    DAMAGED_NPZ,
    atomic_write,
    read_json_lines,
    require_writable,
    sync,
    write_json,
)
from vit_jax.base.errors import (
    MissingFile,
    UnusableDisk,
    UserError,
    close_by,
    counted,
    parsing,
    refuse,
    require_regular,
    usable,
)
from vit_jax.base.held_objects import appending
from vit_jax.base.records import Record, require, require_between, require_pattern
from vit_jax.base.storage import Path, require_kept
