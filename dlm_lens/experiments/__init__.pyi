from .bench import Bench as Bench
from .catalogue import find_experiment as find_experiment
from .catalogue import list_experiments as list_experiments
from .planning import plan_experiment as plan_experiment
from .rendering import load_results as load_results
from .rendering import render_experiment as render_experiment
from .results import Record as Record
from .results import Results as Results
from .results import read_results as read_results
from .running import list_items as list_items
from .running import run_experiment as run_experiment
from .spec import Cost as Cost
from .spec import Experiment as Experiment
from .spec import Finding as Finding
from .spec import Rendering as Rendering
from .spec import Table as Table

__all__ = [
    "Bench",
    "Cost",
    "Experiment",
    "Finding",
    "Record",
    "Rendering",
    "Results",
    "Table",
    "find_experiment",
    "list_experiments",
    "list_items",
    "load_results",
    "plan_experiment",
    "read_results",
    "render_experiment",
    "run_experiment",
]
