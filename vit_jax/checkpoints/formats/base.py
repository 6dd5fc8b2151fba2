"""The `Format` record, which each module of a checkpoint format fills in."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from vit_jax.base import Record, records
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats.array_files import FileContents
from vit_jax.checkpoints.formats.name_map import NameRule
from vit_jax.data.image_preprocessing import CentralCrop, Preprocessing
from vit_jax.models import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(Record):
    """A file's variant of its format. `vit_jax.save` writes the variant that was read."""

    prefix: str = ''  # of every name
    dtype: str = 'float32'  # of the arrays in the file
    class_row: bool = True  # the position embeddings have a row for the class token
    # Names of arrays that are all zero and not stored; {layer0}: in every block.
    zeros: tuple[str, ...] = ()


L = TypeVar('L', bound=Layout)
# Keys that any config.json of transformers may have and that do not change image features: origin,
# dtypes, classes, losses, initialization, memory and text generation.
NO_EFFECT = (
    r'_.*|architectures|model_type|transformers_version|(torch_)?dtype|use_(bfloat16|cache)|prefix'
    r'|id2label|label2id|num_labels|problem_type|loss_type|finetuning_task|task_specific_params'
    r'|initializer_(range|factor)|gradient_checkpointing|chunk_size_feed_forward|torchscript'
    r'|pruned_heads|attn_implementation|tokenizer_class|(output|return|tf|tie|unsloth|xla)_\w+'
    r'|is_(encoder_)?decoder|(add_)?cross_attention(_hidden_size)?|\w+_(token_id|penalty|words_ids)'
    r'|do_sample|(max|min)_length|num_(beams|beam_groups|return_sequences)|temperature|top_[kp]'
    r'|typical_p|early_stopping|\w*(no_repeat_ngram_size|suppress_tokens)|remove_invalid_values'
)
Scaling = tuple[float, float, float]  # a mean or std for each channel
# Mean and std that scale pixels to -1..1, as in the ViT papers (HALF); of ImageNet's and of CLIP's
# training images (IMAGENET, CLIP).
HALF: Scaling = (0.5, 0.5, 0.5)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclasses.dataclass
class TimmPreprocessing(Record):
    """Preprocessing keys that timm and OpenCLIP share."""

    interpolation: Literal['bilinear', 'bicubic', 'lanczos'] = 'bicubic'
    mean: Scaling = HALF
    std: Scaling = HALF

    def check(self) -> None:
        check_scaling(self, 'mean', 'std')

    def preprocessing(self, mode: str, crop_pct: float = 1.0) -> Preprocessing:
        """Returns the preprocessing; `mode='squash'` ignores the aspect ratio of images."""
        resize: Any = f'{self.interpolation}_antialias'
        crop = CentralCrop(
            scale=1 / crop_pct, keep_aspect=mode != 'squash', resize=resize, rounding='timm'
        )
        mean: Any = tuple(255 * value for value in self.mean)
        std: Any = tuple(255 * value for value in self.std)
        return Preprocessing(crop=crop, exif_rotation=False, mean=mean, std=std)


@dataclasses.dataclass(frozen=True)
class ParsedCheckpoint(Generic[L]):
    """Model, preprocessing and layout of the arrays of a file."""

    config: ModelConfig
    layout: L
    preprocessing: Preprocessing
    class_names: tuple[str, ...] = ()
    ignored: str | None = None  # regular expression of names of arrays outside of the model
    loss: str | None = None  # as in `Card`
    remarks: tuple[str, ...] = ()  # lines for the report, such as assumptions
    processor_size: tuple[int, int] | None = None  # image size in the preprocessor's description


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format(Generic[L]):
    """A checkpoint format. To add one, write a module and list its record in `opening.FORMATS`."""

    name: str
    suffix: Literal['.npz', '.safetensors']  # of the written file of arrays
    # Returns whether arrays with these names have this format. The first matching format is used.
    matches: Callable[[Iterable[str]], bool]
    # Returns the model of a file. Raises UserError if the model is not supported, and NeedsHint if
    # the file does not determine it. `opening` then compares all arrays with the model.
    parse: Callable[[FileContents, Hints], ParsedCheckpoint[L]]
    # Returns the name map between a file of this layout and the model.
    rules: Callable[[Any, L], list[NameRule]]
    usual_layout: Callable[[Any], L]  # for a model that was read in another format
    # Returns what the file does not state and its reader has to know. May raise UserError.
    notes: Callable[[Any, Card, L], list[str]] = lambda config, card, layout: []
    # For formats that are directories: the file of arrays, and the JSON files by name.
    file_name: str | None = None
    descriptions: Callable[[Any, Card, L], dict[str, dict[str, Any]]] = lambda *model: {}
    # Returns, by name, arrays in the file that are not parameters but follow from the model.
    constants: Callable[[Any], dict[str, np.ndarray]] = lambda config: {}
    # Whether the files and `Hints` determine the model; if not, `notes` states the rest.
    is_complete: bool = True
    positions: tuple[str, ...] = ('learned',)  # supported kinds; others are written as an array
    resnets: bool = False  # whether plain ResNets are supported; if not, functions get only ViTs


def check_scaling(record: Any, mean: str, std: str) -> None:
    """Raises UserError unless the fields are plausible for pixel values from 0 to 1."""
    records.require_between(record, mean, low=0, high=1)
    records.require_between(record, std, low=0.001, high=10)
