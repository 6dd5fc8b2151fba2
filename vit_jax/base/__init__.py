"""What everything stands on: records, names of leaves, shapes, errors, files written whole."""

from vit_jax.base.array_types import Array, Batch, Bool, Float, Int, Key, Num, Params, UInt8
from vit_jax.base.errors import MissingFile, UnusableDisk, UserError, counted, refuse
from vit_jax.base.records import Record, require, require_between, require_pattern
from vit_jax.base.storage import (
    DAMAGED_NPZ,
    Path,
    atomic_write,
    close_by,
    make_folder,
    parsing,
    read_json_lines,
    require_kept,
    require_regular,
    require_writable,
    sync,
    usable,
    write_json,
)
