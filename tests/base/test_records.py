import dataclasses
import json
import math
from collections.abc import Callable
from typing import Literal

import pytest

from vit_jax.base import records
from vit_jax.base.errors import UserError


@dataclasses.dataclass(kw_only=True)
class Circle(records.Record):
    radius: float = 1.0

    def check(self):
        records.require_between(self, 'radius', above=0, high=10)


@dataclasses.dataclass(kw_only=True)
class Square(records.Record):
    side: float = 1.0


@dataclasses.dataclass(kw_only=True)
class Picture(records.Record):
    shape: Circle | Square | None = None
    size: tuple[int, int] = (3, 4)
    tags: tuple[str, ...] = ()
    color: Literal['red', 'blue'] = 'red'
    paint: str | Callable[[int], int] | None = None
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    count: int


PICTURE = Picture(shape=Square(side=2.0), tags=('a', 'b'), count=5, names={'x': 'y'})


def test_a_record_comes_back_from_its_json():
    values = json.loads(json.dumps(records.to_dict(PICTURE)))
    assert records.from_dict(Picture, values, where='picture') == PICTURE
    assert type(Circle(radius=2).radius) is float
    assert Picture(size=3, count=1) == Picture(size=(3, 3), count=1)


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'count': 'five'}, "p.count='five'"),
        ({'count': True}, 'p.count=True'),
        ({'count': 1.5}, 'p.count=1.5: .*int'),
        ({'count': None}, 'p.count=None'),
        ({'size': (1, 2, 3)}, r'p.size=\(1, 2, 3\)'),
        ({'size': (1, 'a')}, r"p.size\[1\]='a'"),
        ({'size': 3.0}, 'p.size=3.0'),
        ({'color': 'green'}, r"p.color='green': .*red\|blue"),
        ({'colr': 'red'}, "p.colr: .*'color'"),
        ({'shape': {'kind': 'Cube'}}, "p.shape.kind='Cube': .*Circle, Square"),
        ({'shape': {'radius': 1.0}}, "p.shape.kind=''"),
        ({'shape': {'kind': []}}, r'p.shape.kind=\[\]: .*Circle, Square'),
        ({'shape': {'kind': 'Circle', 'radios': 1.0}}, "p.shape.radios: .*'radius'"),
        ({'shape': {'kind': 'Circle', 'radius': math.nan}}, 'p.shape.radius=nan'),
        ({'shape': {'kind': 'Circle', 'radius': 11.0}}, 'p.shape.radius=11.0: .*10'),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(changes, message):
    with pytest.raises(UserError, match=message):
        records.from_dict(Picture, records.to_dict(PICTURE) | changes, where='p')


def test_differences_name_the_leaves():
    other = dataclasses.replace(PICTURE, shape=Square(side=3.0), count=6)
    assert records.differences(records.to_dict(PICTURE), records.to_dict(other)) == [
        'count: 5 -> 6',
        'shape.side: 2.0 -> 3.0',
    ]
    assert records.differences({'a': 1}, {'b': 1}) == ["a: 1 -> '(absent)'", "b: '(absent)' -> 1"]


def test_a_missing_value_is_named():
    with pytest.raises(UserError, match="p: .*'count'"):
        records.from_dict(Picture, {}, where='p')


def test_records_within_are_copied_so_that_later_assignments_change_nothing():
    circle = Circle(radius=2.0)
    picture = Picture(shape=circle, count=1)
    copy = records.validate_copy(picture, where='p')
    circle.radius = picture.shape.radius = 30.0
    assert copy.shape.radius == 2.0
    with pytest.raises(UserError, match='p.shape.radius=30.0'):
        records.validate_copy(picture, where='p')
    with pytest.raises(UserError, match="Circle.radios: .*'radius'"):
        circle.radios = 1.0


@dataclasses.dataclass(kw_only=True)
class Album(records.Record):
    pages: dict[str, Picture] = dataclasses.field(default_factory=dict)


def test_a_wrong_value_is_found_at_any_depth():
    album = Album(pages={'first': PICTURE})
    album.pages['first'].shape.side = 'long'
    with pytest.raises(UserError, match=r"a\.pages\.first\.shape\.side='long': expected float"):
        records.validate_copy(album, where='a')
    copy = records.copy_record(album)
    copy.pages['first'].shape.side = 3
    copy.validate('a')
    assert copy.pages['first'].shape.side == 3.0 and album.pages['first'].shape.side == 'long'
    assert PICTURE.shape.side == 2.0


def test_values_are_set_by_path_in_a_checked_copy():
    changes = {'shape.side': 4, 'color': 'blue'}
    picture = records.with_values(PICTURE, changes, where='p')
    assert picture == dataclasses.replace(PICTURE, shape=Square(side=4.0), color='blue')
    assert PICTURE.color == 'red'
    for path, name in ('shape.sid', "sid: .*'side'"), ('count.x', 'p.count.x'), ('count', "''"):
        with pytest.raises(UserError, match=name):
            records.with_values(PICTURE, {path: ''}, where='p')


def test_the_nearest_name_or_all_of_them_or_that_there_is_none():
    near, no_near = records.closest('depht', ['depth', 'width']), records.closest('x', ['b', 'a'])
    assert "'depth'" in near and 'width' not in near
    assert no_near.endswith(' a, b') and records.closest('x', []).endswith(' none')


def double(number):
    return 2 * number


def test_a_function_stays_in_a_checked_record_and_is_named_in_text():
    picture = records.validate_copy(Picture(paint=double, count=1), where='p')
    assert picture.paint(2) == 4
    values = json.loads(json.dumps(records.to_dict(picture)))
    assert values['paint'] == {'function': f'{__name__}:double'}
    again = records.from_dict(Picture, values, where='p')
    assert records.to_dict(again) == values
    with pytest.raises(UserError, match='double'):
        again.paint(2)
