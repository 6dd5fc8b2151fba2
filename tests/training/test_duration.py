import pytest

from vit_jax.base import records
from vit_jax.training.duration import Duration, make_train_length


def test_one_length_in_every_unit():
    for total in Duration(steps=300), Duration(epochs=3.0), Duration(examples=3000):
        length = make_train_length(total, batch_size=10, num_images=1000)
        assert length.total_steps == 300 and length.epochs == 3
        assert length.steps(Duration(fraction=0.1)) == length.steps(Duration(epochs=0.3)) == 30


def test_imagenet_for_300_epochs_is_the_papers_number_of_steps():
    length = make_train_length(Duration(epochs=300.0), batch_size=4096, num_images=1_281_167)
    assert length.total_steps == 93_835  # 300 * 1281167 / 4096 = 93835.5, the even of the two


def test_an_override_replaces_the_unit_and_an_assignment_adds_one():
    duration = Duration(steps=5)
    duration.override('epochs', 2.0)
    assert duration == Duration(epochs=2.0) and str(duration) == 'epochs=2.0'
    with pytest.raises(ValueError, match="no such field; did you mean 'epochs'"):
        duration.epoch = 2.0
    duration.steps = 5
    with pytest.raises(ValueError, match='config.total: a duration has one of .*; got steps, epo'):
        records.checked(duration, where='config.total')


@pytest.mark.parametrize('values', [{}, {'steps': 1, 'epochs': 2.0}])
def test_a_duration_has_exactly_one_unit(values):
    with pytest.raises(ValueError, match='a duration has one of steps, epochs, examples, fraction'):
        Duration(**values)
    with pytest.raises(ValueError, match='a duration has one of'):
        records.from_dict(Duration, values, where='config.total')


@pytest.mark.parametrize(
    'values', [{'steps': -1}, {'epochs': float('inf')}, {'examples': -5}, {'fraction': 1.1}]
)
def test_a_duration_is_a_length(values):
    with pytest.raises(ValueError, match=f'Duration.{next(iter(values))}=.*expected at least 0'):
        Duration(**values)


def test_a_duration_survives_json():
    for duration in Duration(steps=5), Duration(fraction=0.1):
        assert records.from_dict(Duration, records.to_dict(duration), where='x') == duration


@pytest.mark.parametrize(
    'epochs, batch_size, num_images, log, evaluate',
    [
        (20.0, 64, 226, 4, 4),  # photos of one's own, by configs/finetune/folder.py
        (20.0, 64, 20, 1, 1),  # fewer than a batch
        (300.0, 64, 226, 50, 4),
        (50.0, 64, 344, 13, 5),  # 20 lines
        (106.8, 128, 1_438, 50, 11),  # the digits of the quickstart
        (20.0, 64, 100_000, 50, 1562),
        (300.0, 4096, 1_281_167, 50, 313),
    ],
)
def test_a_short_training_reports_every_epoch_or_twenty_times(
    epochs, batch_size, num_images, log, evaluate
):
    total = Duration(epochs=epochs)
    length = make_train_length(total, batch_size=batch_size, num_images=num_images)
    assert (length.log_interval(None), length.interval('epoch')) == (log, evaluate)
    assert length.log_interval(7) == length.interval(7) == 7
    assert length.interval(None) is None and length.log_interval('epoch') == evaluate


@pytest.mark.parametrize(
    'total, message',
    [
        (Duration(fraction=0.5), 'total.fraction=0.5: of what'),
        (Duration(steps=0), 'total.steps=0: less than one step'),
        (Duration(epochs=0.001), r'total.epochs=0.001: less than one step of batch_size=10'),
    ],
)
def test_a_training_has_a_length(total, message):
    with pytest.raises(ValueError, match=message):
        make_train_length(total, batch_size=10, num_images=1000)
