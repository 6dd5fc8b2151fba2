import itertools
import math
import time

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.distributed.processes import Interrupted
from vit_jax.training.loop import (
    Clock,
    NotFiniteError,
    PeriodicAction,
    TrainingStopped,
    fit,
)
from vit_jax.training.losses import StepMetrics
from vit_jax.training.update import TrainState


def run(losses, *, every, events, start=0, norms=None, interrupt=None, max_skipped_steps=1):
    """Counts up; `events` hears of each thing that happens, in order."""

    def happens(event):
        events.append(event)
        if event == interrupt:
            raise Interrupted

    def update(number, state, batch, limit):
        events.append(f'update {state.step}')
        step = int(state.step)
        assert step == number
        scalars = {
            'skipped': jnp.isnan(losses[step]),
            'parameter_norm': jnp.asarray((norms or {}).get(step, 1.0)),
        }
        metrics = StepMetrics({'loss': jnp.asarray(losses[step])}, jnp.asarray(1), scalars)
        return state._replace(step=state.step + 1), metrics

    def observe(step, state):
        assert step == state.step
        happens(f'observe {step}')

    def batches():
        for number in itertools.count(start + 1):
            if interrupt:
                happens(f'tick {number}')
            yield {}

    return fit(
        update,
        TrainState(jnp.asarray(start), {}, None, None),
        batches(),
        steps=range(start, len(losses)),
        on_metrics=lambda step, numbers: events.append(f'metrics {step}'),
        actions=[PeriodicAction(every, observe)],
        clock=Clock(),
        max_skipped_steps=max_skipped_steps,
    )


def test_metrics_are_read_while_the_next_step_runs_and_before_anything_observes():
    events = []
    assert run([1.0] * 4, every=3, events=events).step == 4
    assert events == [
        'update 0',
        'update 1',
        'metrics 1',
        'update 2',
        'metrics 2',
        'metrics 3',
        'observe 3',
        'update 3',
        'metrics 4',
        'observe 4',
    ]


NAN = float('nan')


@pytest.mark.parametrize('every', [1, 2, None])
def test_training_stops_after_so_many_skipped_updates_in_a_row_before_anything_observes(every):
    events = []
    losses = [1.0, NAN, 1.0, NAN, NAN, 1.0, 1.0]
    with pytest.raises(NotFiniteError, match='step 5: loss'):
        run(losses, every=every, events=events, max_skipped_steps=2)
    assert 'metrics 2' in events and 'observe 5' not in events and 'observe 6' not in events
    assert run(losses, every=every, events=[], max_skipped_steps=3).step == 7


def test_broken_parameters_stop_it_at_once():
    with pytest.raises(NotFiniteError, match='step 3: parameter_norm'):
        run([1.0] * 5, every=1, events=[], norms={2: float('inf')}, max_skipped_steps=9)


def test_it_stops_with_a_whole_state_between_two_steps_or_where_an_observer_stops():
    for place, expected in (('tick 3', 2), ('observe 2', 2), ('tick 1', 0)):
        events = []
        with pytest.raises(TrainingStopped) as stopped:
            run([1.0] * 6, every=2, events=events, interrupt=place)
        assert int(stopped.value.state.step) == expected
        assert [e for e in events if e.startswith('metrics')] == [
            f'metrics {n + 1}' for n in range(expected)
        ]
        assert events[-1] in (place, f'metrics {expected}')


def test_what_is_due_every_so_often_is_due_after_the_last_step_too():
    assert [s for s in range(1, 11) if PeriodicAction(4, print).is_due(s, 10)] == [4, 8, 10]
    assert [s for s in range(1, 11) if PeriodicAction(None, print).is_due(s, 10)] == [10]


def test_the_parts_of_the_time_make_the_whole_and_inner_parts_count_once():
    began = time.monotonic()
    clock = Clock()
    with clock('outer'):
        time.sleep(0.02)
        with clock('inner'):
            time.sleep(0.05)
    with clock('outer'):
        pass
    total = time.monotonic() - began
    assert clock.seconds['inner'] >= 0.05 and 0.02 <= clock.seconds['outer']
    assert sum(clock.seconds.values()) <= total
    assert clock.seconds['outer'] <= total - 0.05


LOSSES = np.random.default_rng(0).normal(3, 0.1, 300)
LOSSES[[90, 170, 171]] = math.nan, 9.0, 9.0  # NaN is left out of the window


def limits_of(steps, every, before=()):
    """The limit that each update gets, and the losses after the last one."""
    limits, losses = {}, [*before]

    def update(number, state, batch, limit):
        step = int(state.step)
        limits[step] = float(limit)
        scalars = {'skipped': jnp.asarray(0), 'parameter_norm': jnp.asarray(1.0)}
        metrics = StepMetrics({'loss': jnp.asarray(LOSSES[step])}, jnp.asarray(1), scalars)
        return state._replace(step=state.step + 1), metrics

    fit(
        update,
        TrainState(jnp.asarray(steps.start), {}, None, None),
        itertools.repeat({}),
        steps=steps,
        on_metrics=lambda step, metrics: None,
        actions=[PeriodicAction(every, lambda step, state: None)],
        clock=Clock(),
        spike_deviations=6.0,
        losses=losses,
    )
    return limits, losses


def test_the_limit_of_a_loss_depends_on_the_losses_of_earlier_steps_only():
    """Neither on saves and evaluations, which read the newest loss early, nor on a restart."""
    limits, _ = limits_of(range(300), 1000)
    assert limits == limits_of(range(300), 7)[0]
    first, losses = limits_of(range(150), 1000)
    assert limits == first | limits_of(range(150, 300), 1000, losses)[0]
    window = LOSSES.astype(np.float32)[71:199]  # of step 200; the loss of step 199 is not known yet
    mean, deviation = np.nanmean(window), np.nanstd(window, ddof=1)
    assert limits[200] == pytest.approx(mean + 6 * deviation, rel=1e-5)
    assert math.isinf(limits[64]) and limits[65] < 4
    assert limits[171] < 9 < limits_of(range(201, 202), 1, [9.0] * 8 + [3.0] * 100)[0][201]
