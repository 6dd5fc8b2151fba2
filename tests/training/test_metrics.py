"""Metrics: their units and directions, without padding, the same number everywhere."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics

import vit_jax
from tests import tiny
from tests.experiment.test_training_run import board
from vit_jax import evaluate, report
from vit_jax.base import UserError
from vit_jax.cli import config_flags
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.data.loading import make_reader
from vit_jax.data.sources.arrays import array_source
from vit_jax.evaluation import head
from vit_jax.evaluation.evaluator import batches_on_all_devices, make_evaluator
from vit_jax.experiment import training_run
from vit_jax.studies import history
from vit_jax.tasks.several_labels import SeveralLabels
from vit_jax.tasks.single_label import SingleLabel
from vit_jax.training import metrics
from vit_jax.training.losses import sum_examples
from vit_jax.training.metrics import METRICS, SET_METRICS, Metric, find_metric, resolve_metrics

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(60, 4)).astype(np.float32)
ONE = RNG.integers(4, size=60)
SEVERAL = RNG.integers(2, size=(60, 4))


def probabilities(logits):
    return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)


# What scikit-learn says of images with one class, and with several.
ALONE = {
    'balanced_accuracy': (
        lambda logits, labels: sklearn.metrics.balanced_accuracy_score(labels, logits.argmax(1)),
        None,
    ),
    'macro_f1': (
        lambda logits, labels: sklearn.metrics.f1_score(labels, logits.argmax(1), average='macro'),
        lambda logits, labels: sklearn.metrics.f1_score(labels, logits > 0, average='macro'),
    ),
    'mean_average_precision': (
        lambda logits, labels: sklearn.metrics.average_precision_score(
            np.eye(4)[labels], probabilities(logits), average='macro'
        ),
        lambda logits, labels: sklearn.metrics.average_precision_score(
            labels, logits, average='macro'
        ),
    ),
    'auroc': (
        lambda logits, labels: sklearn.metrics.roc_auc_score(
            labels, probabilities(logits), multi_class='ovr'
        ),
        lambda logits, labels: sklearn.metrics.roc_auc_score(labels, logits),
    ),
}


def test_every_metric_of_a_whole_set_has_a_row():
    """A new one needs a function of another library in ALONE, or one that is written here."""
    assert ALONE.keys() == SET_METRICS.keys()


def measure(metric, logits, labels):
    """The value by an evaluator in batches of 16, the last of which has padding."""
    numbers = np.arange(len(labels), dtype=np.uint8)
    images = np.broadcast_to(numbers[:, None, None], (len(labels), 8, 8))
    source = array_source(images, labels, tuple('abcd'), name='data')
    reader = make_reader(source, Preprocessing(), (8, 8))

    def sums(params, batch):
        rows = jnp.take(jnp.asarray(logits), batch['images'][:, 0, 0, 0], axis=0)
        outputs = metrics.compute_outputs(metric.outputs, rows, batch['labels'])
        return sum_examples({}, batch['mask'], outputs)

    made = make_evaluator(sums, batches_on_all_devices(reader, 16), [metric])
    assert made.list_metrics({}, reader) == [metric.name]
    return made.evaluate({}, reader).metrics[metric.name]


@pytest.mark.parametrize('name', SET_METRICS)
@pytest.mark.parametrize('labels', [ONE, SEVERAL], ids=['one class', 'several'])
def test_a_metric_is_that_of_another_library_without_padding(name, labels):
    expected = ALONE[name][labels.ndim - 1]
    if expected is None:
        assert METRICS[name].labels == 'one'
        pytest.skip('not defined for several classes')
    found = measure(METRICS[name], LOGITS, labels)
    assert found == pytest.approx(expected(LOGITS, labels), rel=1e-6)


def test_a_metric_for_other_labels_is_rejected_before_a_run():
    several = SeveralLabels(num_classes=4, multi_label=True)
    config = tiny.experiment(metrics=('balanced_accuracy',))
    with pytest.raises(UserError, match='balanced_accuracy: only for images with one class'):
        several.metrics(config)
    assert 'balanced_accuracy' not in [metric.name for metric in several.metrics(tiny.experiment())]
    for task in several, SingleLabel(num_classes=4):
        measured = [METRICS[name].labels for name in task.measured]
        assert not {*measured} & {'one' if task.multi_label else 'several'}


def test_better_is_more_except_of_losses():
    for name, metric in METRICS.items():
        assert metric.is_better(2.0, 1.0) == ('loss' not in name), name
        assert metric.unit == ('number' if 'loss' in name else 'percent'), name
        assert find_metric(f'test/{name}') is metric
    assert find_metric('fewshot/10_shot_accuracy').format(0.5) == '50.00%'
    assert find_metric('train/learning_rate').format(1e-4) == '0.0001'


def test_the_mean_of_average_precisions_is_over_classes_with_images():
    labels = np.arange(60) % 3  # the fourth class has no image
    assert measure(METRICS['mean_average_precision'], np.eye(4)[labels], labels) == 1.0
    assert measure(METRICS['auroc'], np.eye(4)[labels], labels) == 1.0
    assert np.isnan(METRICS['auroc'].measure({'logits': LOGITS, 'labels': 0 * ONE}))
    assert np.isnan(METRICS['auroc'].measure({'logits': LOGITS * np.nan, 'labels': ONE}))


def test_average_precision_is_the_mean_precision_at_each_hit():
    scores = np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.1, 0.4]])
    targets = np.array([[1, 0], [0, 0], [1, 1], [0, 0]])
    expected = [(1 + 2 / 3) / 2, 1 / 2]  # class 0: hits at ranks 1 and 3; class 1: at rank 2
    np.testing.assert_allclose(metrics.average_precisions(scores, targets), expected)
    with_absent = np.pad(targets, ((0, 0), (0, 1)))
    scores = np.pad(scores, ((0, 0), (0, 1)))
    found = metrics.average_precisions(scores, with_absent)
    np.testing.assert_allclose(found, [*expected, np.nan])  # a class of no image has no precision
    with pytest.raises(UserError, match='4 images'):
        metrics.average_precisions(scores, 0 * with_absent)


@pytest.mark.parametrize('name', ['auroc', 'mean_average_precision'])
def test_a_ranking_does_not_depend_on_how_confident_the_model_is(name):
    """Of two classes, images are ranked by the difference of the logits, however large it is."""
    of_set = SET_METRICS[name].of_set
    two = np.round(LOGITS[:, :2] * 64) / 64
    expected = of_set(two, ONE % 2)
    for scale in 8, 64, 1024:
        assert of_set(two * np.float32(scale), ONE % 2) == expected
    shift = RNG.integers(-4, 4, (60, 1)) * np.float32(256)
    rounded = np.round(LOGITS * 64) / 64
    assert of_set(rounded + shift, ONE) == of_set(rounded, ONE)


def test_f1_of_classes_that_are_only_predicted_is_zero_and_of_others_is_left_out():
    found = metrics.macro_f1(np.array([0, 0, 2]), np.array([0, 0, 0]))
    assert found == pytest.approx((0.8 + 0) / 2)  # classes 0 and 2; class 1 occurs nowhere
    assert metrics.macro_f1(np.zeros((3, 2), bool), np.zeros((3, 2), int)) == 0


def worst_class(logits, labels):
    """The accuracy of the class that is recognized worst."""
    hits = logits.argmax(axis=1) == labels
    return min(hits[labels == number].mean() for number in np.unique(labels))


WORST = Metric(name='worst_class', unit='percent', of_set=worst_class)
ERRORS = Metric(
    name='errors',
    lower_is_better=True,
    of_set=lambda predicted, labels: (predicted != labels).sum(),
    outputs=('predicted', 'labels'),
)


def loss(logits, labels):
    return 0


@pytest.mark.parametrize(
    'given, message',
    [
        (['aurok'], "no metric 'aurok'; did you mean 'auroc'?"),
        (['auroc', 'auroc'], 'got auroc two times'),
        ([Metric(name='mine')], 'mine: of_set is not set'),
        ([Metric(name='accuracy', of_set=max)], 'accuracy: the name of another number'),
        ([loss], 'loss: the name of another number'),
        ([Metric(name='step', of_set=max)], 'step: the name of another number'),
        ([lambda logits, labels: 0], "'<lambda>'"),
    ],
)
def test_metrics_that_cannot_be_measured_are_rejected_before_a_run(given, message):
    with pytest.raises(UserError) as error:
        tiny.experiment(metrics=tuple(given))
    assert message in str(error.value)


def test_the_command_line_takes_names_of_metrics_with_commas():
    config = config_flags.apply_overrides(
        tiny.experiment(), ['metrics=auroc, mean_average_precision'], where='config'
    )
    assert config.metrics == ('auroc', 'mean_average_precision')
    with pytest.raises(UserError, match="no metric 'aurok'"):
        config_flags.apply_overrides(tiny.experiment(), ['metrics=aurok'], where='config')


def test_a_function_that_returns_no_number_is_named():
    (metric,) = resolve_metrics([no_number])
    with pytest.raises(UserError, match=r'no_number: got array\(.*expected a number'):
        metric.measure({'logits': LOGITS, 'labels': ONE})


def no_number(logits, labels):
    return labels


def absent_key(logits, labels):
    return {}['key']


def in_place(logits, labels):
    logits -= logits.max(axis=1, keepdims=True)
    return 0.5


@pytest.mark.parametrize('function, error', [(absent_key, KeyError), (in_place, ValueError)])
def test_a_function_that_fails_does_so_before_training(function, error, tmp_path):
    config = tiny.experiment(metrics=(function,))
    with pytest.raises(error):
        training_run.train(config, str(tmp_path / 'run'))
    assert not (tmp_path / 'run/metrics.jsonl').exists()


@pytest.mark.parametrize('outputs', [('logits',), ('labels',), ('predicted', 'labels')])
@pytest.mark.parametrize('labels', [(6,), (6, 3)])
def test_a_metric_is_tried_with_outputs_as_it_will_get_them(outputs, labels):
    logits = jnp.zeros((6, 3))
    real = metrics.compute_outputs(outputs, logits, jnp.zeros(labels, jnp.int32))
    tried = metrics.random_outputs(jax.eval_shape(lambda: real))
    for name in outputs:
        assert tried[name].dtype.kind == real[name].dtype.kind
        assert tried[name].shape[1:] == real[name].shape[1:]
    assert len({len(array) for array in tried.values()}) == 1


def test_a_function_may_return_an_array_of_jax_or_a_truth_value():
    outputs = {'logits': LOGITS, 'labels': ONE}
    for function, expected in ((jax_mean, LOGITS.mean()), (is_any, 1.0)):
        (metric,) = resolve_metrics([function])
        assert metric.measure(outputs) == pytest.approx(expected, rel=1e-5)


def jax_mean(logits, labels):
    return jnp.mean(logits)


def is_any(logits, labels):
    return np.any(labels == 0)


def test_an_evaluation_measures_what_is_defined_for_its_images():
    """Of images with more classes than in training, any class is right."""
    config = tiny.experiment(metrics=('auroc',))
    one = SingleLabel(num_classes=4)
    several = SeveralLabels(num_classes=4, multi_label=True)
    sources = [
        array_source(np.zeros((60, 8, 8), np.uint8), labels, tuple('abcd'), name='data')
        for labels in (ONE, SEVERAL)
    ]
    found = {
        (task.multi_label, source.multi_label): [m.name for m in task.metrics_of(config, source)]
        for task in (one, several)
        for source in sources
    }
    assert found == {
        (False, False): ['balanced_accuracy', 'macro_f1', 'auroc'],
        (False, True): [],
        (True, True): ['mean_average_precision', 'macro_f1', 'auroc'],
        (True, False): ['mean_average_precision', 'macro_f1', 'auroc'],
    }


def test_the_flag_of_evaluate_says_which_metric_was_meant(capsys):
    with pytest.raises(SystemExit):
        evaluate.make_parser().parse_args(['checkpoint', '--metrics=aurok'])
    assert "no metric 'aurok'; did you mean 'auroc'?" in capsys.readouterr().err


@pytest.mark.gate
def test_a_metric_is_the_same_number_everywhere(tmp_path, capsys):
    """In a run, its checkpoint, its files and TensorBoard, `evaluate`, `keep_best` and `report`."""
    workdir = tmp_path / 'run'
    config = tiny.experiment(
        metrics=('auroc', 'mean_average_precision', WORST, ERRORS),
        keep_best='test/errors',
        tensorboard=True,
    )
    result = training_run.train(config, str(workdir))
    screen = capsys.readouterr().out
    measured = result.evals['test']
    assert {*SET_METRICS, 'worst_class', 'errors'} <= measured.keys()
    for name, label in {'auroc': 'AUROC', 'worst_class': 'worst class'}.items():
        assert f'{label} {measured[name]:.2%}' in screen
    assert f'errors {measured["errors"]:.4g}' in screen

    lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    last = [line for line in lines if line['kind'] == 'test'][-1]
    assert measured.items() <= last.items()
    points = board(workdir)
    loaded = vit_jax.load(workdir)
    reader = head.make_model_reader(loaded, result.experiment.eval_readers['test'].source)
    report_of_head = head.evaluate_head(
        loaded,
        reader,
        batch_size=16,
        further_metrics=['auroc', 'mean_average_precision', WORST, ERRORS],
    )
    for name in measured:
        if name != 'loss':  # float32 sums of other batches
            assert report_of_head.metrics[name] == pytest.approx(measured[name], rel=1e-6), name
        assert points[f'test/{name}', last['step']] == pytest.approx(measured[name], rel=1e-6)

    run = history.read_history(workdir, 'run')
    fewest = min(run.numbers['test/errors'].values())
    assert (result.selection.value, result.selection.metric.name) == (fewest, 'errors')
    arguments = [str(workdir), f'--out={tmp_path / "report.html"}']
    assert report.main(report.make_parser().parse_args(arguments)) == 0
    page = (tmp_path / 'report.html').read_text()
    assert f'{measured["worst_class"]:.2%}' in page and f'test/errors {fewest:.4g}' in page
    assert all(f'<h2>{title}</h2>' in page for title in ('AUROC', 'Worst class', 'Errors'))
    arguments = [str(workdir), '--metrics=auroc,mean_average_precision']
    assert evaluate.main(evaluate.make_parser().parse_args(arguments)) == 0
    screen = capsys.readouterr().out
    for name in SET_METRICS:
        assert f'{METRICS[name].title:<24}{measured[name]:>8.2%}' in screen, name
