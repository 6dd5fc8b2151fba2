"""The work directory: one experiment, its configuration, its numbers."""

import json
import pathlib
from typing import Any

from vit_jax import records
from vit_jax.config import TrainConfig
from vit_jax.writing import replacing, write_json

CONFIG, METRICS, FEWSHOT = 'config.json', 'metrics.jsonl', 'fewshot.json'


def open_workdir(
    path: str, config: dict[str, Any], *, accept_changes: bool = False
) -> pathlib.Path:
    """The directory of an experiment with this configuration, made where there is none.

    Raises ValueError with the differences where it holds checkpoints of another configuration,
    unless the changes are accepted, and where it cannot be written.
    """
    folder = pathlib.Path(path).absolute()
    kept = folder / CONFIG
    try:
        folder.mkdir(parents=True, exist_ok=True)
        begun = kept.exists() and any(folder.glob('checkpoints/[0-9]*'))
        changes = records.differences(_read_config(kept), config) if begun else []
        if changes and not accept_changes:
            raise ValueError(
                f'workdir {folder} holds a run of another configuration:\n  '
                + '\n  '.join(changes)
                + '\ntake another --workdir, or go on with --accept_config_changes'
            )
        write_json(kept, config)
    except OSError as error:
        raise ValueError(f'workdir {folder}: cannot be written: {error.strerror}') from error
    except json.JSONDecodeError as error:
        raise ValueError(f'{kept}: not JSON: {error}; remove it if no run is to go on') from error
    return folder


def _read_config(path: pathlib.Path) -> dict[str, Any]:
    """The configuration of an earlier run, with the defaults of fields that came later."""
    values: dict[str, Any] = json.loads(path.read_text())
    try:
        return records.to_dict(records.from_dict(TrainConfig, values, where='config'))
    except ValueError:  # of a field that is no more: the difference will say it
        return values


def forget_after(path: pathlib.Path, step: int) -> None:
    """Drops the lines of a metrics file that a run beginning at this step will write again."""
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        with replacing(path) as partial:
            partial.write_text(''.join(line for line in lines if _is_up_to(line, step)))


def _is_up_to(line: str, step: int) -> bool:
    try:
        return json.loads(line)['step'] <= step
    except json.JSONDecodeError:  # the last line of a killed run
        return False
