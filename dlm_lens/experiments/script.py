"""An experiment's own file as a script: `python experiments/attention_sinks/table1.py --small`."""

import runpy
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlm_lens.experiments.spec import Experiment


def run_script(experiment: "Experiment") -> None:
    """Run `dlm-lens experiment NAME` with the script's arguments.

    The command line is started by its name: this room does not import it.

    Raises:
        SystemExit: as the command does when it ends.
    """
    sys.argv = ["dlm-lens", "experiment", experiment.name, *sys.argv[1:]]
    runpy.run_module("dlm_lens.cli", run_name="__main__")
