"""All figures: what each is called, what it says to a reader, how it is computed and drawn."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from vit_jax.figures import paths, probing, representations, vit_paper
from vit_jax.figures.networks import Network, Numbers

_CLEAR = 0.05  # of CKA: less is within what other images would change


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One figure of a paper. `compute` raises LeftOut where it makes no sense."""

    name: str  # of --figures and of its files
    title: str
    source: str  # where it is from
    text: str  # how it is computed, and what to look for
    # Numbers of a study (`of_all`), or of a study and one of its networks.
    compute: Callable[..., Numbers]
    of_all: bool = False
    needs_images: bool = True  # are images shown to the network?
    # What is seen in these numbers, in a sentence: of the network where it is of one.
    finding: Callable[[Numbers, Network | None], str]
    draw: Callable[[Any, Numbers], Sequence[Any]]  # the drawing functions, numbers -> pictures


def _variance(numbers: Numbers, _: Any) -> str:
    share, noise = numbers['explained'].sum(), float(numbers['noise'])
    count = len(numbers['explained'])
    return f'These {count} hold {share:.0%} of the variance; of filters of noise, {noise:.0%}.'


def _positions(numbers: Numbers, _: Any) -> str:
    table = numbers['similarity']
    rows, columns = table.shape[:2]
    i, j = np.indices((rows, columns)).reshape(2, -1)
    apart = np.abs(i[:, None] - i) + np.abs(j[:, None] - j)
    flat = table.reshape(rows * columns, -1)
    if not (apart > 1).any():
        return ''
    near, far = flat[apart == 1].mean(), flat[apart > 1].mean()
    return f'Mean cosine of neighbours {near:.2f}, of all others {far:.2f}.'


def _distance(numbers: Numbers, _: Any) -> str:
    means = numbers['distance'].mean(axis=1)
    ends = f'{means[0]:.1f} pixels in the first block, {means[-1]:.1f} in the last, '
    ends += f'{float(numbers["uniform"]):.1f} for attention to all alike'
    if len(means) < 3 or np.ptp(means) == 0:
        return f'The mean over heads is {ends}.'
    order = stats.spearmanr(np.arange(len(means)), means).statistic
    grows = order > 0.5 and means[-1] > means[0]
    how = 'grows with depth' if grows else 'does not grow with depth in this network'
    return f'The mean over heads {how}: {ends} (rank correlation with depth {order:.2f}).'


def _choice(numbers: Numbers, network: Network | None) -> str:
    assert network is not None
    alone, tokens = ('', 'patches') if network.prefix else ('No class token: s', 'tokens')
    mean = f'{alone or "S"}een from all {tokens} alike'
    return {
        'cls': 'Seen from the class token, which is what the head is given.',
        'cls_dist': 'Seen from the class and the distillation token, which the heads are given.',
        'cls_gap': 'Seen from the class token and all patches, as the head is given their mean.',
        'map': 'Seen from the attention pooling, whose weights are averaged over its heads.',
        'gap': f'{mean}, as the head is given their mean.',
        'none': 'Seen from all tokens alike, as the head is given each.',
    }[network.vit.pool]


def _map_choice(numbers: Numbers, network: Network | None) -> str:
    assert network is not None
    if network.vit.pool == 'cls':
        return 'Each map is the row of the class token.'
    if network.vit.pool == 'none':
        text = 'Each map is the mean of the rows of all tokens.'
    elif network.prefix:
        text = 'Each map is the mean of the rows of the tokens that the head is given.'
    else:
        text = 'There is no class token: each map is the mean of the rows of all tokens.'
    last = ' The last row of maps is the attention pooling.'
    return text + (last if network.vit.pool == 'map' else '')


def _ends(numbers: Numbers, _: Any) -> str:
    names, found = numbers['networks'], numbers['cka']
    text = []
    for name in dict.fromkeys(names.tolist()):
        places = np.flatnonzero(names == name)
        first, last = places[0], places[-1]
        text.append(f'{name}: first layer with last {found[first, last]:.2f}')
    return '; '.join(text) + '.'


def _skip_removal(numbers: Numbers, _: Any) -> str:
    cut, texts = int(numbers['removed'].any(axis=0).argmax()), list[str]()
    off_diagonal = ~np.eye(len(numbers['layers']), dtype=bool)
    before = np.arange(len(off_diagonal)) < cut
    same = np.equal.outer(before, before)
    for name, found in zip(numbers['names'].tolist(), numbers['cka'], strict=True):
        within, across = np.nanmean(found[same & off_diagonal]), np.nanmean(found[~same])
        texts.append(f'{name} {across:.2f} ({within:.2f} on the same side)')
    where = str(numbers['layers'][cut])
    return f'Mean CKA of layers before {where} with layers from it on: {", ".join(texts)}.'


def _heads(numbers: Numbers, _: Any) -> str:
    near, far = numbers['cka'][0].mean(), numbers['cka'][-1].mean()
    vit, resnet = numbers['names'].tolist()
    closest, farthest = numbers['distance'][[0, -1]]
    text = f'Heads of {vit} that look {closest:.1f} and {farthest:.1f} pixels far, with the lower '
    text += f'layers of {resnet}: mean CKA {near:.2f} and {far:.2f}'
    return f'{text}{", no clear difference" if abs(near - far) < _CLEAR else ""}.'


def _residuals(numbers: Numbers, _: Any) -> str:
    half = max(1, len(numbers['layers']) // 2)
    parts = []
    for kind, ratio in zip(numbers['kinds'].tolist(), numbers['ratio'], strict=True):
        low, high = np.median(ratio[:half]), np.median(ratio[half:] if len(ratio) > half else ratio)
        parts.append(f'{kind} {low:.1f} and {high:.1f}')
    return 'Norm ratio in the first and the second half: ' + '; '.join(parts) + '.'


def _fields(numbers: Numbers, _: Any) -> str:
    def spread(field: np.ndarray) -> float:
        """The share of pixels, from the strongest, that hold half of a field."""
        total = np.sort(field.ravel())[::-1].cumsum()
        return float((np.searchsorted(total, total[-1] / 2) + 1) / total.size)

    first, last = (spread(numbers['after'][i]) for i in (0, -1))
    before = np.mean([spread(field) for field in numbers['before']])
    after = np.mean([spread(field) for field in numbers['after']])
    return (
        f'With the skip connection half of the field lies in {first:.0%} of the pixels in the '
        f'first of these layers, in {last:.0%} in the last; on average in {before:.0%} before it '
        f'is added, in {after:.0%} after it.'
    )


def _localisation(numbers: Numbers, _: Any) -> str:
    found, tokens = numbers['cka'], numbers['tokens']
    own = [(t, tuple(place)) for t, place in enumerate(tokens.tolist()) if place[0] >= 0]
    if found[0].size == 1:
        return ''
    hits = np.mean([found[t][place] >= np.nanmax(found[t]) for t, place in own])
    chance = f'by chance {1 / found[0].size:.1%} would be'
    return f'{hits:.0%} of {len(own)} are most like the patch of their own place; {chance}.'


def _probes(numbers: Numbers, _: Any) -> str:
    names = 'shots', 'classes', 'learned', 'tested'
    shots, classes, learned, tested = (int(numbers[name]) for name in names)
    parts = []
    for name, row in zip(numbers['series'].tolist(), numbers['accuracy'], strict=True):
        there = row[np.isfinite(row)]
        parts.append(f'{name} {there[-1]:.1%} at the end, {there.max():.1%} at best')
    how = f'At most {shots} images of each of {classes} classes, drawn from {learned:,}, tested on '
    return f'{how}{tested:,} others: {"; ".join(parts)}.'


def _amounts(numbers: Numbers, _: Any) -> str:
    rows = zip(numbers['names'].tolist(), numbers['cka'], strict=True)
    parts = [f'{name} {row[0]:.2f} in the first, {row[-1]:.2f} in the last' for name, row in rows]
    return f'CKA with {numbers["reference"]}: ' + '; '.join(parts) + '.'


KINDS: tuple[Kind, ...] = (
    Kind(
        name='filters',
        title='Filters of the patch embedding',
        source='ViT paper, figure 7, left',
        text='Every channel of the patch embedding is a filter, a small picture that is laid over '
        'each patch. These are the principal components of all filters, each stretched to the '
        'full range of colours, and the share of the variance that each explains. In a trained '
        'network they look like smooth waves, edges and colour contrasts, from coarse to fine; '
        'noise means that it has not been trained for long. Of a ResNet or a hybrid they are the '
        'filters of its first convolution.',
        compute=vit_paper.patch_filters,
        needs_images=False,
        finding=_variance,
        draw=lambda drawing, n: [drawing.filters(n['components'], n['explained'])],
    ),
    Kind(
        name='positions',
        title='Position embeddings',
        source='ViT paper, figure 7, centre',
        text='A vector is added to each patch to say where it is. Each tile belongs to one '
        'position, and shows the cosine between its vector and that of every position: purple '
        'where they are alike, orange where they are opposite. Where the network has learned the '
        'grid, a tile is darkest at its own place and neighbours are alike; in large networks '
        'rows and columns can be seen as a cross.',
        compute=vit_paper.position_embeddings,
        needs_images=False,
        finding=_positions,
        draw=lambda drawing, n: [drawing.positions(n['similarity'])],
    ),
    Kind(
        name='attention_distance',
        title='Attention distance',
        source='ViT paper, figure 7, right, and appendix D.7',
        text='For each head: the distance in pixels from a patch to those that it attends to, '
        'weighted by the attention, averaged over patches and images. Rows and columns of the '
        'class token are left out, and what remains is not normalised again, so attention to the '
        'class token counts as distance zero. It corresponds to the receptive field of a '
        'convolution: in networks trained on much data some heads of the first blocks look near '
        'and others far, and all heads of the last blocks look far; large networks that have '
        'seen ImageNet alone have no heads that look near. The dashed line is a head that attends '
        'to all tokens alike.',
        compute=vit_paper.attention_distance,
        finding=_distance,
        draw=lambda drawing, n: [
            drawing.attention_distance(
                n['distance'], uniform=float(n['uniform']), width=int(n['width'])
            )
        ],
    ),
    Kind(
        name='rollout',
        title='Attention rollout',
        source='ViT paper, figures 6 and 14, appendix D.8; Abnar and Zuidema',
        text='How much of each patch reaches the output, if attention were all that mixes tokens: '
        'the attention of each block is averaged over its heads, the identity is added for the '
        'skip connection, rows are normalised to sum to one, and the matrices of all blocks are '
        'multiplied. Bright places are those that the network looks at; in a good classifier they '
        'lie on what the picture shows.',
        compute=vit_paper.rollout,
        finding=_choice,
        draw=lambda drawing, n: [
            drawing.rollout(n['images'], n['relevance'], 'What of each image reaches the output')
        ],
    ),
    Kind(
        name='attention_maps',
        title='Attention of each head',
        source='ViT paper, section 4.5',
        text='Where each head of each block looks in one image, each map on a scale of its own. '
        'Look for heads that look at one place, at the border of things, or at all alike.',
        compute=vit_paper.attention_maps,
        finding=_map_choice,
        draw=lambda drawing, n: [
            drawing.attention_maps(n['image'], n['maps'], n['layers'].tolist())
        ],
    ),
    Kind(
        name='cka',
        title='Similarity of all layers',
        source='Raghu et al., section 4, figures 1 and 2',
        text='Centred kernel alignment (CKA) compares what two layers make of the same images: 1 '
        'where the same images are alike to both, whatever the rotation or scale of their numbers, '
        '0 where they have nothing in common. It is estimated without bias from batches of images, '
        'whose terms are summed before the ratio is taken; of few images it is noisy, and may be '
        'below 0. Each row and column is one layer, from '
        'the image at the top left to the output: norms, branches, hidden layers and sums. ViTs '
        'are alike from end to end, ResNets fall into stages; between two networks look which '
        'layers of one do the work of which of the other.',
        compute=representations.similarity,
        of_all=True,
        finding=_ends,
        draw=lambda drawing, n: [
            drawing.cka(n['cka'], n['layers'].tolist(), n['networks'].tolist())
        ],
    ),
    Kind(
        name='skip_removal',
        title='Without the skip connections of a block',
        source='Raghu et al., section 6, figure 8',
        text='Networks that were trained without the two skip connections of a block (between '
        'the dashed lines), and last the same network with all of them. Skip connections carry '
        'what the first layers have found to the last. In the paper the picture falls into two '
        'parts without them: layers before the block are unlike those after it.',
        compute=representations.skip_removal,
        of_all=True,
        finding=_skip_removal,
        draw=lambda drawing, n: [
            drawing.cka(
                cka,
                n['layers'].tolist(),
                [name] * len(n['layers']),
                removed=np.flatnonzero(np.diff(removed, prepend=False)),
            )
            for cka, name, removed in zip(n['cka'], n['names'].tolist(), n['removed'], strict=True)
        ],
    ),
    Kind(
        name='head_subsets',
        title='Heads beside a ResNet',
        source='Raghu et al., section 5, figure 5',
        text='The heads of the first block are sorted by how far they look; neighbours in this '
        'order, a third of all heads at a time, are compared (CKA) with the lower layers of the '
        'ResNet, whose convolutions look near. Where the lines are higher on the left, heads '
        'that look near do what convolutions do.',
        compute=representations.head_subsets,
        of_all=True,
        finding=_heads,
        draw=lambda drawing, n: [
            drawing.head_subsets(n['cka'], n['distance'], n['layers'].tolist())
        ],
    ),
    Kind(
        name='residuals',
        title='Skip connections and branches',
        source='Raghu et al., section 6, figure 7, appendix E.2',
        text='Each block adds something to its tokens. Left: the length of what goes past it (the '
        'skip connection) by the length of what it adds, averaged over tokens and images; above 1 '
        'more is kept than added. Right: the cosine between what is added and the sum; near 1 the '
        'block decides what the token becomes. In the paper the class token is passed on in the '
        'first half and changed in the second, and patches the other way round.',
        compute=paths.residuals,
        finding=_residuals,
        draw=lambda drawing, n: [
            drawing.residuals(
                dict(zip(n['kinds'].tolist(), n['ratio'], strict=True)),
                dict(zip(n['kinds'].tolist(), n['cosine'], strict=True)),
                layer='unit' if 'units' in n['kinds'] else 'block',
            )
        ],
    ),
    Kind(
        name='receptive_fields',
        title='Effective receptive fields',
        source='Raghu et al., section 5, figure 6, appendix C.4',
        text='How much each pixel changes what is in the middle of a layer: the absolute '
        'derivative, averaged over images, colours and some channels. Above before the skip '
        'connection is added (of a ViT: what attention adds; of a ResNet: the last norm of a '
        'unit), below after it (the output of the block or unit). The first layers of a ViT see '
        'much of the image already; the skip connection keeps the place itself in sight.',
        compute=paths.fields,
        finding=_fields,
        draw=lambda drawing, n: [
            drawing.receptive_fields(n['before'], n['after'], n['layers'].tolist())
        ],
    ),
    Kind(
        name='localisation',
        title='Which place a token is about',
        source='Raghu et al., section 7',
        text='Each tile belongs to one token of the last block, or one place of the last feature '
        'map, and shows its CKA with the pixels of each patch of the image, which is noisy where '
        'there are few images. Where a token still knows its place, that place is brightest. In '
        'the paper tokens of a network with a class token know their places to the end, and '
        'tokens at an edge are like all edges; networks that average all tokens, and ResNets, know '
        'them much less.',
        compute=representations.localisation,
        finding=_localisation,
        draw=lambda drawing, n: [drawing.localisation(**representations.some_tokens(n))],
    ),
    Kind(
        name='probes',
        title='What few labels can read off each layer',
        source='Raghu et al., section 7, appendix D',
        text='A linear classifier in closed form (ridge regression, as few-shot evaluation here) '
        'learns from the representation in each layer: that of one token, a mean, or single '
        'patches (9 over the image), whose accuracies are averaged. Half of the images are for '
        'learning, a few of each class drawn three times; the other half is for testing. The '
        'strength of the ridge is the same for all (--probe_l2). In the paper a network with a '
        'class token and one that averages its tokens are equally good where each is read as it '
        'was trained; single patches of the last layers know little of the class in the first, '
        'and much in the second and in ResNets.',
        compute=probing.probes,
        of_all=True,
        finding=_probes,
        draw=lambda drawing, n: [
            drawing.probes(n['accuracy'], n['series'].tolist(), deviations=n['deviation'])
        ],
    ),
    Kind(
        name='training_data',
        title='Trained on other amounts of data',
        source='Raghu et al., section 8',
        text='Each block of the other networks compared (CKA) with the same block of the first '
        'network given, for example networks of one architecture that were trained on parts of '
        'the same data. First layers are learned from little data; last layers need more to '
        'become what they are.',
        compute=representations.training_data,
        of_all=True,
        finding=_amounts,
        draw=lambda drawing, n: [
            drawing.training_data(n['cka'], n['names'].tolist(), n['reference'].item())
        ],
    ),
)
