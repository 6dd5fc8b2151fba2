import pytest

from vit_jax.base import records
from vit_jax.training.duration import Duration, make_train_length


def test_one_length_in_every_unit():
    for total in Duration(steps=300), Duration(epochs=3.0), Duration(examples=3000):
        length = make_train_length(total, batch_size=10, num_images=1000)
        assert length.total_steps == 300 and length.epochs == 3
        assert (
            length.to_steps(Duration(fraction=0.1)) == length.to_steps(Duration(epochs=0.3)) == 30
        )


def test_an_override_replaces_the_unit_and_an_assignment_adds_one():
    duration = Duration(steps=5)
    duration.override('epochs', 2.0)
    assert duration == Duration(epochs=2.0) and str(duration) == 'epochs=2.0'
    with pytest.raises(ValueError, match='epochs'):
        duration.epoch = 2.0
    duration.steps = 5
    with pytest.raises(ValueError, match='config.total: .* steps, epochs'):
        records.validate_copy(duration, where='config.total')


@pytest.mark.parametrize('values', [{}, {'steps': 1, 'epochs': 2.0}, {'epochs': -1.0}])
def test_a_duration_is_a_length_in_exactly_one_unit(values):
    with pytest.raises(ValueError, match='Duration'):
        Duration(**values)


@pytest.mark.parametrize(
    'epochs, batch_size, num_images, log, evaluate',
    [
        (20.0, 64, 20, 1, 1),  # fewer than a batch
        (0.5, 64, 2_560, 1, 40),  # half an epoch
        (50.0, 64, 344, 13, 5),  # 20 lines
        (300.0, 4096, 1_281_167, 50, 313),
    ],
)
def test_a_short_training_reports_about_twenty_times(epochs, batch_size, num_images, log, evaluate):
    total = Duration(epochs=epochs)
    length = make_train_length(total, batch_size=batch_size, num_images=num_images)
    assert (length.log_interval_steps(None), length.interval_steps('epoch')) == (log, evaluate)
    assert length.log_interval_steps(7) == length.interval_steps(7) == 7
    assert length.interval_steps(None) is None and length.log_interval_steps('epoch') == evaluate


@pytest.mark.parametrize(
    'total, advice',
    [
        (Duration(fraction=0.5), 'examples'),
        (Duration(epochs=0.001), 'batch_size'),
        (Duration(steps=0), 'expected 1 or more'),
    ],
)
def test_a_training_has_a_length(total, advice):
    with pytest.raises(ValueError, match=f'total.{total}: .*{advice}'):
        make_train_length(total, batch_size=10, num_images=1000)
