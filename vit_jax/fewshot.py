"""Probes a checkpoint with few labels: python -m vit_jax.fewshot --config.start_from=CHECKPOINT."""

from vit_jax import experiment, program
from vit_jax.config import TrainConfig


def run(config: TrainConfig, workdir: str, accept_changes: bool) -> None:
    """Evaluates, and says the result and where the whole protocol of it lies."""
    result, path = experiment.probe(config, workdir)
    for shots, mean in result['mean'].items():
        print(f'{shots:>3} shots  {mean:7.2%} +- {result["deviation"][shots]:.2%}')
    print(f'{result["test_images"]:,} test images; protocol and accuracies: {path}')


if __name__ == '__main__':
    program.start(run, __doc__ or '')
