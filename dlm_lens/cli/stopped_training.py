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
        remedy: what follows the sentence where the training can be continued as it was, such as "; the same command
            continues". One that stopped for its numbers or its data would stop again at the same step.
    """
    from dlm_lens.training.checkpoints import NonFiniteLossError, TrainingDataError, TrainingStoppedError

    try:
        yield
    except TrainingStoppedError as error:
        again = isinstance(error, NonFiniteLossError | TrainingDataError)
        echo(f"dlm-lens: {error}{'' if again else remedy}", fg=typer.colors.RED, err=True)
        sys.exit(1)
