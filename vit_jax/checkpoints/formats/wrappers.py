"""What PyTorch training programs wrap weights in: nested dictionaries, and prefixes of names.

A file may hold several copies of a model. Averaged weights are preferred, as in
timm.models.load_checkpoint; `FILE:KEY` chooses another copy by a part of its prefix.
"""

import re
from collections.abc import Iterable, Sequence

from vit_jax.base import require
from vit_jax.checkpoints.formats.array_files import FileContents, LazyArray

# An array that every model has, behind a prefix of its own library, which belongs to its names.
_PATCHES = (
    r'((?:.*?\.)??)(?:%s)?'
    r'(?:patch_embed\.proj|ln_pre|embeddings\.patch_embeddings?(?:\.projection)?)\.weight'
)
# Wrappers of modules, and the chunks in which DINOv2 trains its blocks.
_MODULES = re.compile(r'\b(_orig_mod|_\w+_wrapped_module)\.|(?<=\bblocks\.)\d+\.(?=\d+\.)')
_AVERAGED = re.compile(r'.*(?<![a-z])(ema|teacher|target)(?![a-z]).*')
# Modules of self-supervised training next to the blocks of the model.
_TRAINING_ONLY = re.compile(r'decoder(_\w+)?(\..*)?|head\.(\d+|mlp\.\d+|last_layer)\..*')


def unwrap(contents: FileContents, own: Iterable[str]) -> FileContents:
    """Selects the arrays of one model: the one that the key names, or else the averaged one.

    Names without modules stay as they are.

    Args:
      contents: The file.
      own: Prefixes that formats put on names of the body; the head has no prefix.

    Raises:
      UserError: If there is no such model, or if several are left.
    """
    patches = re.compile(_PATCHES % '|'.join(map(re.escape, own)))
    short = {name: _MODULES.sub('', name) for name in contents.arrays}
    matches = (patches.fullmatch(name) for name in short.values())
    prefixes = sorted({match[1] for match in matches if match})
    if not prefixes:
        return contents
    prefix, remarks = choose_prefix(prefixes, contents.key)
    model, others = dict[str, LazyArray](), list[str]()
    for name, array in contents.arrays.items():
        inside = short[name].removeprefix(prefix)
        if short[name].startswith(prefix) and not _TRAINING_ONLY.fullmatch(inside):
            model[inside] = array
        else:
            others.append(name)
    return contents._replace(arrays=model, key='', ignored=tuple(others), remarks=remarks)


def choose_prefix(prefixes: Sequence[str], key: str) -> tuple[str, tuple[str, ...]]:
    """Returns the prefix of the model to read, and a remark that names the unused prefixes.

    The key selects the prefix. Without a key, the only prefix or that of averaged weights is read.
    """
    parts = re.compile(rf'(.*[./])?{re.escape(key)}[./].*')
    chosen = [each for each in prefixes if not key or parts.fullmatch(each)]
    offers = ', '.join(each.rstrip('./') or 'the whole file' for each in prefixes)
    require(bool(chosen), f'no model is under {key!r}; expected one of {offers}')
    averaged = [each for each in chosen if _AVERAGED.fullmatch(each)]
    chosen = averaged if len(averaged) == 1 else chosen
    example = f'FILE:{chosen[-1].rstrip("./")}'
    require(len(chosen) == 1, f'several models: {offers}; choose one with {example}')
    unused = ', '.join(each.rstrip('./') for each in prefixes if each != chosen[0])
    remark = f'weights: {chosen[0].rstrip("./")}; not used: {unused}'
    return chosen[0], (remark,) if unused else ()
