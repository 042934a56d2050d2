"""`one_sentence_of_a_stop`: a training that stops ends its command with one sentence."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from dlm_lens.printable import echo


@contextmanager
def one_sentence_of_a_stop(remedy: str = "") -> Iterator[None]:
    """Print why a training inside stopped (SIGTERM, a loss that is no number, a full disk), and exit with status 1.

    Args:
        remedy: what follows the sentence, such as "; the same command continues".
    """
    from dlm_lens.training.checkpoints import TrainingStoppedError

    try:
        yield
    except TrainingStoppedError as error:
        echo(f"dlm-lens: {error}{remedy}", fg=typer.colors.RED, err=True)
        sys.exit(1)
