"""A process that reads images for the one that started it: python -m vit_jax.data.reading_worker.

On its standard input come, pickled, the ImageReader and then the examples to read. It leaves
pixels in memory that both have, and answers with the rest. It imports no jax, and ends when its
parent does, however that ends.
"""

import mmap
import os
import pickle
import signal
import sys
import traceback
from typing import Any

import numpy as np


def main(descriptor: int) -> None:
    """Answers every list of examples with (what ImageReader.fill returns, error, fault of ours)."""
    for told in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:  # a terminal and Slurm tell all
        signal.signal(told, signal.SIG_IGN)  # the parent decides
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), 'wb')
    os.dup2(2, 1)  # what a library prints is no answer
    import cv2

    cv2.setNumThreads(1)
    try:
        reader = pickle.load(questions)
        shape = -1, *reader.size, 3
        images = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8).reshape(shape)
        while True:
            pickle.dump(_answer(reader, pickle.load(questions), images), answers)
            answers.flush()
    except (EOFError, BrokenPipeError):
        return


def _answer(reader: Any, refs: Any, images: np.ndarray) -> tuple[Any, str | None, str | None]:
    try:
        filled = reader.fill(refs, images)
        images[: len(refs)][~filled[1]] = 0  # where an earlier image lies
        return filled, None, None
    except ValueError as error:
        return None, str(error), None
    except Exception:
        return None, None, traceback.format_exc()


if __name__ == '__main__':
    main(int(sys.argv[1]))
