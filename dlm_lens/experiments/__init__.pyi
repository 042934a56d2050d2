from .cost_estimate import plan_experiment as plan_experiment
from .experiment import Bench as Bench
from .experiment import Cost as Cost
from .experiment import Experiment as Experiment
from .experiment import Finding as Finding
from .experiment import Rendering as Rendering
from .experiment import Table as Table
from .experiment import find_experiment as find_experiment
from .experiment import list_experiments as list_experiments
from .results import Record as Record
from .results import Results as Results
from .results import read_results as read_results
from .runner import list_items as list_items
from .runner import load_results as load_results
from .runner import render_experiment as render_experiment
from .runner import run_experiment as run_experiment

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
