import itertools
import time

import jax.numpy as jnp
import pytest

from vit_jax.training.loop import Clock, Every, NotFinite, fit
from vit_jax.training.update import TrainState


def run(losses, *, every, events, start=0):
    """Counts up; `events` hears of each thing that happens, in order."""

    def update(state, batch):
        events.append(f'update {state.step}')
        loss = jnp.asarray(losses[int(state.step)])
        metrics = {'loss': loss, 'skipped': jnp.isnan(loss), 'parameter_norm': jnp.ones(())}
        return state._replace(step=state.step + 1), metrics

    def observe(step, state):
        events.append(f'observe {step}')
        assert step == state.step

    return fit(
        update,
        TrainState(jnp.asarray(start), {}, None, None),
        itertools.repeat({}),
        steps=range(start, len(losses)),
        on_metrics=lambda step, numbers: events.append(f'metrics {step}'),
        observers=[Every(every, observe)],
        clock=Clock(),
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


@pytest.mark.parametrize('every', [1, 2, None])
def test_a_broken_state_is_never_observed(every):
    events = []
    with pytest.raises(NotFinite, match='step 2: loss is nan'):
        run([1.0, float('nan'), 1.0, 1.0], every=every, events=events)
    assert 'observe 2' not in events and 'observe 4' not in events


def test_what_is_due_every_so_often_is_due_after_the_last_step_too():
    assert [s for s in range(1, 11) if Every(4, print).is_due(s, 10)] == [4, 8, 10]
    assert [s for s in range(1, 11) if Every(None, print).is_due(s, 10)] == [10]


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
