"""What PyTorch training programs put around the weights: keys of dictionaries, prefixes of names.

A file may hold several copies of a network. Averaged weights are preferred, as in
timm.models.load_checkpoint; `FILE:KEY` chooses another copy, by its key or its prefix.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.base import require

_AVERAGED = (
    'state_dict_ema',  # timm
    'model_ema',  # DeiT, torchvision
    'ema_state_dict',
    'model_ema_state_dict',
    'params_ema',
    'ema_model',
    'ema',
    'target_encoder',  # I-JEPA, MSN
)
_PLAIN = (
    *('state_dict', 'model_state_dict', 'model_state', 'model', 'model_weights'),
    *('net', 'net_state_dict', 'network', 'module', 'params', 'weights'),
    *('encoder', 'backbone', 'teacher', 'student', 'shadow', 'shadow_params'),
)
# Of two networks of self-supervised training the one that its authors evaluate.
_PREFERRED = {'teacher': 'student', 'base_encoder': 'momentum_encoder'}
_PREFIX = re.compile(
    r'(?:(?:\d+|module|model|model_ema|ema|net|network|backbone|encoder|trunk|teacher|student'
    r'|(?:base|momentum|target|teacher|student|ema)_(?:encoder|model|backbone)'
    r'|(?:visual|vision|image)_encoder|clip|clip_model)\.)*'
)
# Wrappers of modules, anywhere in a name; and the chunks in which DINOv2 trains its blocks.
_MODULES = re.compile(r'\b(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.')
_CHUNK = re.compile(r'\bblocks\.\d+\.(?=\d+\.)')
_PATCHES = re.compile(
    r'((?:.*\.)?)(?:patch_embed\.proj|conv1|embeddings\.patch_embeddings?(?:\.projection)?)\.weight'
)
# Parts of self-supervised training that are not the network.
_BESIDE = re.compile(
    r'(?:(?:dino|ibot)_head|predictor|projector|projection_head|prototypes|criterion|n_averaged'
    r'|head\.(?:mlp\.\d+|last_layer)|decoder|decoder_\w+)(?:\..*)?|.*\bbase_encoder\.head\.\d+\..*'
)
_DEEPEST = 4  # dictionaries within each other


class Unwrapped(NamedTuple):
    """Arrays by the names that they have in the network alone."""

    arrays: dict[str, Any]
    ignored: tuple[str, ...]  # names of what else there is
    remarks: tuple[str, ...]  # which of several copies was taken
    wanted: str = ''  # the part of a name that is not found yet


def by_key(loaded: Mapping[Any, Any], wanted: str, tensor: type) -> Unwrapped:
    """The dictionary of tensors within those that a training program keeps.

    Raises UserError for several copies of which none is preferred, and for unknown keys.
    """
    ignored, remarks = list[str](), list[str]()
    for _ in range(_DEEPEST):
        loaded = {key_name(key): value for key, value in loaded.items()}
        copies = [key for key, value in loaded.items() if _holds(value, tensor)]
        usual = [key for key in copies if key in (*_AVERAGED, *_PLAIN)]
        if wanted in copies:
            key, wanted = wanted, ''
        elif not copies or not usual and _has(loaded, tensor):
            break
        else:
            text = f'holds arrays under {", ".join(copies)}; say which with FILE:{copies[0]}'
            require(bool(usual), text)
            key = _chosen(usual)
        remarks += _remark(key, [copy for copy in copies if copy != key])
        ignored += [other for other in loaded if other != key]
        loaded = loaded[key]
    loaded = {key_name(key): value for key, value in loaded.items()}
    found = {key: value for key, value in loaded.items() if isinstance(value, tensor)}
    keys = ', '.join([*loaded][:8]) or 'none'
    require(bool(found), f'expected tensors by name; its keys are {keys}')
    ignored += [key for key in loaded if key not in found]
    return Unwrapped(found, tuple(ignored), tuple(remarks), wanted)


def by_prefix(arrays: Mapping[str, Any], wanted: str = '') -> Unwrapped:
    """The arrays without what is in front of all names of a network.

    Raises UserError for several networks of which none is preferred, and for arrays outside of the
    network that could be a part of it, unless `wanted` is its prefix.
    """
    names = {name: _CHUNK.sub('blocks.', _MODULES.sub('', name)) for name in arrays}
    found = (_PATCHES.fullmatch(name) for name in names.values())
    prefixes = sorted({_front(match[1]) for match in found if match})
    if wanted:
        prefix = f'{wanted.rstrip(".")}.'
        offers = ', '.join(each.rstrip('.') for each in prefixes if each) or 'none'
        there = any(name.startswith(prefix) for name in names.values())
        require(there, f'nothing is under {wanted!r}; networks are under {offers}')
    elif not prefixes or '' in prefixes:
        prefix = ''
    else:
        prefix = f'{_chosen([each.rstrip(".") for each in prefixes])}.'
    unused = tuple(each for each in prefixes if each not in ('', prefix))
    kept, ignored = dict[str, Any](), list[str]()
    for name, short in names.items():
        inside = short.removeprefix(prefix)
        beside = any(map(_BESIDE.fullmatch, (short, inside, short.removeprefix(_front(short)))))
        if short.startswith(prefix) and not beside:
            kept[inside] = arrays[name]
        else:
            fits = wanted or beside or short.startswith(unused)
            alone = f'FILE:{prefix.rstrip(".")} takes the network alone'
            require(bool(fits), f'{name} is not under {prefix}, as the network is; {alone}')
            ignored.append(name)
    remarks = _remark(prefix.rstrip('.'), [each.rstrip('.') for each in unused])
    return Unwrapped(kept, tuple(ignored), tuple(remarks))


def key_name(key: Any) -> str:
    """The name that a key of a PyTorch file is; text of other kinds may be of any length."""
    return str(key) if isinstance(key, str | int) else type(key).__name__


def _front(name: str) -> str:
    """What is in front of a name of a network."""
    match = _PREFIX.match(name)
    return match[0] if match else ''


def _has(value: Any, tensor: type) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, tensor) for v in value.values())


def _holds(value: Any, tensor: type) -> bool:
    """Is it a dictionary of tensors, or of such dictionaries under usual keys?"""
    if not isinstance(value, Mapping):
        return False
    return _has(value, tensor) or any(_has(value.get(key), tensor) for key in _AVERAGED + _PLAIN)


def _chosen(copies: Sequence[str]) -> str:
    """The copy to take. Raises UserError where no rule prefers one."""
    averaged = [copy for copy in copies if {*copy.split('.')} & {*_AVERAGED}]
    among = averaged or list(copies)
    for better, worse in _PREFERRED.items():
        beaten = [one.replace(better, worse) for one in among if better in one]
        among = [one for one in among if one not in beaten]
    text = f'holds several networks: {", ".join(among)}; say which with FILE:{among[0]}'
    require(len(among) == 1, text)
    return among[0]


def _remark(taken: str, unused: Sequence[str]) -> list[str]:
    averaged = ' (averaged)' if {*taken.split('.')} & {*_AVERAGED} else ''
    rest = f'; not used: {", ".join(sorted(unused))}' if unused else ''
    return [f'weights: {taken}{averaged}{rest}'] if averaged or rest else []
