"""Selects one model in a PyTorch training checkpoint, and removes prefixes of wrappers from names.

A file may contain several copies of a model. Averaged (EMA) weights are preferred, as in
timm.models.load_checkpoint; `FILE:KEY` selects another copy by a part of its prefix.
"""

import re
from collections.abc import Iterable, Sequence

from vit_jax.base import require
from vit_jax.checkpoints.formats.array_files import FileContents, LazyArray

# An array that every model has. Group 1 is the prefix of wrappers, without the prefixes of formats,
# which replace %s.
_PATCHES = (
    r'((?:.*?\.)??)(?:%s)?'
    r'(?:patch_embed\.proj|ln_pre|embeddings\.patch_embeddings?(?:\.projection)?)\.weight'
)
# Wrappers of modules, and the chunks into which DINOv2 groups its blocks in training.
_MODULES = re.compile(r'\b(_orig_mod|_\w+_wrapped_module)\.|(?<=\bblocks\.)\d+\.(?=\d+\.)')
_AVERAGED = re.compile(r'.*(?<![a-z])(ema|teacher|target)(?![a-z]).*')
# Modules of self-supervised training that do not belong to the model.
_TRAINING_ONLY = re.compile(r'decoder(_\w+)?(\..*)?|head\.(\d+|mlp\.\d+|last_layer)\..*')


def unwrap(contents: FileContents, own: Iterable[str]) -> FileContents:
    """Selects the arrays of one model, by the key of `contents` or else the averaged weights.

    Args:
      contents: The file. It is returned unchanged if it does not contain a known model.
      own: Prefixes that formats put before names of the body; the head has no prefix.

    Raises:
      UserError: If the key selects no model, or several models remain.
    """
    patches = re.compile(_PATCHES % '|'.join(map(re.escape, own)))
    short = {name: _MODULES.sub('', name) for name in contents.arrays}
    matches = (patches.fullmatch(name) for name in short.values())
    prefixes = sorted({match[1] for match in matches if match})
    if not prefixes:
        return contents
    prefix, remarks = choose_prefix(prefixes, contents.key)
    model: dict[str, LazyArray] = {}
    others: list[str] = []
    for name, array in contents.arrays.items():
        inside = short[name].removeprefix(prefix)
        if short[name].startswith(prefix) and not _TRAINING_ONLY.fullmatch(inside):
            model[inside] = array
        else:
            others.append(name)
    return contents._replace(arrays=model, key='', ignored=tuple(others), remarks=remarks)


def choose_prefix(prefixes: Sequence[str], key: str) -> tuple[str, tuple[str, ...]]:
    """Returns the prefix of the model to read, and a remark that names the unused prefixes.

    The key selects prefixes. If several remain, the prefix of averaged weights is preferred.
    """
    with_key = re.compile(rf'(.*[./])?{re.escape(key)}[./].*')
    chosen = [prefix for prefix in prefixes if not key or with_key.fullmatch(prefix)]
    offers = ', '.join(prefix.rstrip('./') or 'the whole file' for prefix in prefixes)
    require(bool(chosen), f'no model under the key {key!r}; expected one of {offers}')
    averaged = [prefix for prefix in chosen if _AVERAGED.fullmatch(prefix)]
    if len(averaged) == 1:
        chosen = averaged
    example = f'FILE:{chosen[-1].rstrip("./")}'
    require(len(chosen) == 1, f'contains several models: {offers}; choose one, such as {example}')
    unused = ', '.join(prefix.rstrip('./') for prefix in prefixes if prefix != chosen[0])
    remark = f'weights: {chosen[0].rstrip("./")}; not used: {unused}'
    return chosen[0], (remark,) if unused else ()
