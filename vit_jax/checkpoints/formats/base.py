"""What a format is: one record, which the file of each format fills in."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, TypeVar

from vit_jax.base import records
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats.inference import Clues
from vit_jax.checkpoints.formats.name_map import NameRule
from vit_jax.data.image_preprocessing import Crop, Preprocessing
from vit_jax.models import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How the files of one format differ among themselves; kept, so as to write what was read."""

    prefix: str = ''  # in front of every name
    dtype: str = 'float32'  # of the arrays in the file
    class_row: bool = True  # the position embeddings have a row for the class token


L = TypeVar('L', bound=Layout)


@dataclasses.dataclass(frozen=True)
class Recognised(Generic[L]):
    """A network that was found in a file, and how the file names its arrays."""

    config: ModelConfig
    layout: L
    preprocessing: Preprocessing
    class_names: tuple[str, ...] = ()
    ignored: str | None = None  # a pattern of names that belong to something else
    loss: str | None = None  # as on a card


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format(Generic[L]):
    """A way in which other systems keep networks. To add one: its file, and `opening.FORMATS`."""

    name: str
    suffix: Literal['.npz', '.safetensors']  # of the file of arrays that is written
    # Are these the names of the arrays in such a file? The first format that says yes reads it.
    matches: Callable[[Iterable[str]], bool]
    # What is in the file. Raises UserError where that is not a network of ours, NeedsHint where
    # the file leaves open what network it is.
    recognise: Callable[[Clues], Recognised[L]]
    # Where each array of the network is in a file of this layout.
    rules: Callable[[Any, L], list[NameRule]]
    usual_layout: Callable[[ModelConfig], L]  # to write where none was read
    # What a person must be told who reads such a file, because the file does not say it.
    notes: Callable[[Any, Card, L], list[str]]
    # A format that is a directory: the name of its file of arrays, and its JSON files by name.
    file_name: str | None = None
    files_beside: Callable[[Any, Card], dict[str, dict[str, Any]]] = lambda config, card: {}
    positions: tuple[str, ...] = ('learned',)  # the kinds that it has; others become an array
    resnets: bool = False  # has it plain ResNets? Otherwise its functions are given ViTs alone


def foreign_preprocessing(crop: Crop, mean: Any, std: Any, *, where: str) -> Preprocessing:
    """As PyTorch's image processors do it, with the mean and std (0 to 1) of a JSON file."""
    scaled = {'mean': [255 * value for value in mean], 'std': [255 * value for value in std]}
    fixed = {'crop': crop, 'exif_rotation': False}
    return records.from_dict(Preprocessing, fixed | scaled, where=where)
