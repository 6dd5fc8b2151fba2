import dataclasses
import json
import linecache
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
    colour: Literal['red', 'blue'] = 'red'
    paint: str | Callable[[int], int] | None = None
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    count: int


PICTURE = Picture(shape=Square(side=2.0), tags=('a', 'b'), count=5, names={'x': 'y'})


def test_a_record_comes_back_from_its_json():
    values = json.loads(json.dumps(records.to_dict(PICTURE)))
    assert records.from_dict(Picture, values, where='picture') == PICTURE


def test_whole_numbers_become_floats_where_floats_belong():
    checked = records.checked(Picture(shape=Circle(radius=2), count=1), where='p')
    assert type(checked.shape.radius) is float


def test_one_number_is_a_square_size():
    assert Picture(size=3, count=1) == Picture(size=(3, 3), count=1)


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'count': 'five'}, r"p.count='five': expected int"),
        ({'count': True}, r'p.count=True: expected int'),
        ({'count': 1.5}, r'p.count=1.5: expected int'),
        ({'size': (1, 2, 3)}, r'p.size=\(1, 2, 3\): expected tuple\[int, int\]'),
        ({'size': (1, 'a')}, r"p.size\[1\]='a': expected int"),
        ({'size': 3.0}, r'p.size=3.0: expected tuple\[int, int\]'),
        ({'colour': 'green'}, r"p.colour='green': expected one of red, blue"),
        ({'shape': {'kind': 'Cube'}}, r"p.shape.kind='Cube': expected one of Circle, Square"),
        (
            {'shape': {'kind': 'Circle', 'radios': 1.0}},
            r"p.shape.radios: no such field; did you mean 'radius'\?",
        ),
        ({'colou': 'red'}, r"p.colou: no such field; did you mean 'colour'\?"),
        ({'count': None}, r'p.count=None: expected int'),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(changes, message):
    with pytest.raises(ValueError, match=message):
        records.from_dict(Picture, records.to_dict(PICTURE) | changes, where='p')


def test_an_absent_value_without_a_default_is_an_error():
    with pytest.raises(ValueError, match="p: .*'count'"):
        records.from_dict(Picture, {}, where='p')


def test_differences_name_the_leaves():
    other = dataclasses.replace(PICTURE, shape=Square(side=3.0), count=6)
    assert records.differences(records.to_dict(PICTURE), records.to_dict(other)) == [
        'count: 5 -> 6',
        'shape.side: 2.0 -> 3.0',
    ]
    assert records.differences({'a': 1}, {'b': 1}) == ["a: 1 -> '(absent)'", "b: '(absent)' -> 1"]


def test_records_within_are_copied_so_that_later_assignments_change_nothing():
    circle = Circle(radius=2.0)
    picture = Picture(shape=circle, count=1)
    copy = records.checked(picture, where='p')
    circle.radius = picture.shape.radius = 3.0
    assert copy.shape.radius == 2.0


def test_a_record_is_checked_once_however_deep_it_lies():
    checks = []

    @dataclasses.dataclass(kw_only=True)
    class Inner(records.Record):
        def check(self):
            checks.append(self)

    value = Inner()
    for _ in range(4):
        Outer = dataclasses.make_dataclass(
            'Outer', [('inner', type(value))], bases=(records.Record,), kw_only=True
        )
        value = Outer(inner=value)
    checks.clear()
    records.checked(value, where='value')
    assert len(checks) == 1


def test_values_are_set_by_path_in_a_checked_copy():
    changes = {'shape.side': 4, 'colour': 'blue'}
    picture = records.with_values(PICTURE, changes, where='p')
    assert picture == dataclasses.replace(PICTURE, shape=Square(side=4.0), colour='blue')
    assert PICTURE.colour == 'red'
    with pytest.raises(UserError, match="p.shape.sid: no such field; did you mean 'side'"):
        records.with_values(PICTURE, {'shape.sid': 1}, where='p')
    with pytest.raises(UserError, match="p.count=5 has no field 'x'"):
        records.with_values(PICTURE, {'count.x': 1}, where='p')


def test_the_nearest_name_or_all_of_them_or_that_there_is_none():
    assert records.nearest('depht', ['depth', 'width']) == "did you mean 'depth'?"
    assert records.nearest('x', ['b', 'a']) == 'known: a, b'
    assert records.nearest('x', []) == 'known: none'


def double(number):
    return 2 * number


def test_a_record_checks_itself_when_it_is_made_and_where_it_was_assigned_to():
    with pytest.raises(UserError, match="Picture.colour='green': expected one of red, blue"):
        Picture(colour='green', count=1)
    with pytest.raises(UserError, match='Circle.radius=0.0: expected more than 0 and at most 10'):
        Circle(radius=0.0)
    picture = Picture(shape=Circle(), count=1)
    picture.shape.radius = 11.0
    with pytest.raises(UserError, match='p.shape.radius=11.0: expected more than 0'):
        records.checked(picture, where='p')
    with pytest.raises(UserError, match="p.shape.kind='': expected one of "):
        records.from_dict(Picture, {'shape': {'radius': 1.0}, 'count': 1}, where='p')
    with pytest.raises(UserError, match='p.shape.radius=nan'):
        records.from_dict(
            Picture, {'shape': {'kind': 'Circle', 'radius': float('nan')}, 'count': 1}, where='p'
        )


def test_a_function_stays_in_a_checked_record_and_is_named_in_text():
    picture = records.checked(Picture(paint=double, count=1), where='p')
    assert picture.paint(2) == 4
    values = json.loads(json.dumps(records.to_dict(picture)))
    assert values['paint'] == {'function': f'{__name__}:double'}
    again = records.from_dict(Picture, values, where='p')
    assert records.to_dict(again) == values
    with pytest.raises(UserError, match='double is not in the file'):
        again.paint(2)


def test_functions_without_a_name_are_told_apart_by_their_source(monkeypatch):
    """A run goes on with the loss that it began with, and a lambda has no name of its own."""
    one, two = (
        lambda x: x + 1,
        lambda x: x * 2,
    )
    assert records.text_of(one) != records.text_of(two)
    assert records.text_of(one) == records.text_of(one)
    command = ['import a_program\n']  # of python -c, which Python 3.13 keeps as that of eval
    monkeypatch.setitem(linecache.cache, '<string>', (len(command[0]), None, command, '<string>'))
    assert records.text_of(eval('lambda x: x')).endswith('<lambda>')  # without a source
