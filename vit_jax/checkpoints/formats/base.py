"""What a checkpoint format is: one record, which the file of each format fills in."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, TypeVar

from vit_jax.base import Record, records
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats.array_files import FileContents
from vit_jax.checkpoints.formats.name_map import NameRule
from vit_jax.data.image_preprocessing import CentralCrop, Preprocessing
from vit_jax.models import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(Record):
    """How the files of one format differ; kept, to write a model as it was read."""

    prefix: str = ''  # in front of every name
    dtype: str = 'float32'  # of the arrays in the file
    class_row: bool = True  # the position embeddings have a row for the class token
    zeros: tuple[str, ...] = ()  # arrays that are not in the file, as they are zero; {layer0}: all


L = TypeVar('L', bound=Layout)
# Keys of every config.json of transformers that do not change the features of images: origin, types
# of numbers, classes, losses, initial values, memory, and how texts are generated.
NO_EFFECT = (
    r'_.*|architectures|model_type|transformers_version|(torch_)?dtype|use_(bfloat16|cache)|prefix'
    r'|id2label|label2id|num_labels|problem_type|loss_type|finetuning_task|task_specific_params'
    r'|initializer_(range|factor)|gradient_checkpointing|chunk_size_feed_forward|torchscript'
    r'|pruned_heads|attn_implementation|tokenizer_class|(output|return|tf|tie|xla)_\w+'
    r'|is_(encoder_)?decoder|(add_)?cross_attention(_hidden_size)?|\w+_(token_id|penalty|words_ids)'
    r'|do_sample|(max|min)_length|num_(beams|beam_groups|return_sequences)|temperature|top_[kp]'
    r'|typical_p|early_stopping|\w*(no_repeat_ngram_size|suppress_tokens)|remove_invalid_values'
)
Scaling = tuple[float, float, float]  # by channel
# Mean and std of pixel values: to -1 and 1, as published ViTs take them; of ImageNet; of CLIP.
HALF: Scaling = (0.5, 0.5, 0.5)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclasses.dataclass
class TimmImages(Record):
    """How timm and OpenCLIP prepare images: the keys that both have."""

    interpolation: Literal['bilinear', 'bicubic', 'lanczos'] = 'bicubic'
    mean: Scaling = HALF
    std: Scaling = HALF

    def check(self) -> None:
        check_scaling(self, 'mean', 'std')

    def preprocessing(self, mode: str, crop_pct: float = 1.0) -> Preprocessing:
        """Returns the preprocessing: an image is squashed, or its center is cropped."""
        how: Any = {'resize': f'{self.interpolation}_antialias', 'rounding': 'timm'}
        crop = CentralCrop(scale=1 / crop_pct, keep_aspect=mode != 'squash', **how)
        scaling: Any = {n: tuple(255 * v for v in getattr(self, n)) for n in ('mean', 'std')}
        return Preprocessing(crop=crop, exif_rotation=False, **scaling)


@dataclasses.dataclass(frozen=True)
class ParsedCheckpoint(Generic[L]):
    """The model that a file holds, and how the file names its arrays."""

    config: ModelConfig
    layout: L
    preprocessing: Preprocessing
    class_names: tuple[str, ...] = ()
    ignored: str | None = None  # a pattern of names that belong to something else
    loss: str | None = None  # as on a card
    remarks: tuple[str, ...] = ()  # what a user of the model should know
    processor_size: tuple[int, int] | None = None  # of the images that its own processor makes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format(Generic[L]):
    """The format of another system. To add one: its file, and a line in `opening.FORMATS`."""

    name: str
    suffix: Literal['.npz', '.safetensors']  # of the file of arrays that is written
    # Whether arrays of these names have this format. The first format that matches parses them.
    matches: Callable[[Iterable[str]], bool]
    # Returns the model of a file. Raises UserError if it is not supported, NeedsHint if the file
    # leaves open what model it is. `opening` compares names and shapes of all arrays with it.
    parse: Callable[[FileContents, Hints], ParsedCheckpoint[L]]
    # Where each array of the model is in a file of this layout.
    rules: Callable[[Any, L], list[NameRule]]
    usual_layout: Callable[[Any], L]  # to write a model that was read in another format
    # What a person who reads such a file has to know, because the file does not say it.
    notes: Callable[[Any, Card, L], list[str]] = lambda config, card, layout: []
    # If the format is a directory: the name of its file of arrays, and its JSON files by name.
    file_name: str | None = None
    descriptions: Callable[[Any, Card, L], dict[str, dict[str, Any]]] = lambda *model: {}
    positions: tuple[str, ...] = ('learned',)  # the kinds that it has; others become an array
    resnets: bool = False  # whether it has plain ResNets; if not, its functions take ViTs only


def check_scaling(record: Any, mean: str, std: str) -> None:
    """Raises UserError unless these fields are a mean and std of pixel values from 0 to 1."""
    records.require_between(record, mean, low=0, high=1)
    records.require_between(record, std, low=0.001, high=10)
