"""Settings that are too small are named before anything is computed."""

import math
from pathlib import Path
from typing import Any

import pytest

from dlm_lens.cli.app import app
from dlm_lens.experiments import find_experiment, list_experiments, list_items
from dlm_lens.experiments.experiment import LEAST
from dlm_lens.experiments.intervals import over_seeds
from dlm_lens.experiments.verdicts import all_of

CASES: list[tuple[str, Any, str]] = [
    ("batch", 0, "batch is 0; it must be at least 1"),
    ("batch", -1, "batch is -1; it must be at least 1"),
    ("batch", {"": 8, "toy": 0}, "batch is 0; it must be at least 1"),
    ("prompts", 0, "prompts is 0; it must be at least 1"),
    ("calibration", 0, "calibration is 0; it must be at least 1"),
    ("columns", [0], r"columns is \[0\]; it must be at least 1"),
    ("columns", [], r"columns is \[\]; give at least one"),
    ("seeds", 0, "seeds is 0; it must be at least 1"),
    ("seeds", [], r"seeds is \[\]; give at least one"),
    ("models", [], r"models is \[\]; give at least one, such as models=\['"),
    ("seed", -1, "seed is -1; it must be at least 0"),
]


@pytest.mark.parametrize(("name", "value", "match"), CASES)
def test_every_experiment_names_the_setting_that_is_too_small(name: str, value: Any, match: str) -> None:
    tried = 0
    for experiment in list_experiments():
        kinds = {type(side[name]) for side in (experiment.small, experiment.full) if name in side}
        if name not in experiment.small or (type(value) not in kinds and not isinstance(value, dict)):
            continue
        if isinstance(value, dict) and "toy" not in experiment.small.get("models", ()):
            continue
        tried += 1
        with pytest.raises(ValueError, match=match) as caught:
            experiment.config(True, given={name: value})
        assert "\n" not in str(caught.value)
    names = {one for experiment in list_experiments() for one in experiment.small}
    assert tried > 0 or name not in names or name in ("seeds", "seed", "columns")
    assert name in LEAST


def test_the_defaults_are_allowed() -> None:
    for experiment in list_experiments():
        for small in (True, False):
            side = experiment.small if small else experiment.full
            given = {name: side[name] for name in LEAST if name in side and not isinstance(side[name], dict)}
            assert given.items() <= experiment.config(small, given=given)["settings"].items()


def test_rendering_takes_no_settings(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    folder = Path(__file__).resolve().parents[2] / "experiments/attention_sinks/results/fig9-distributions"
    name = find_experiment("fig9-distributions").name
    command = ["experiment", name, "--render", "--out", str(folder), "--models", "toy", "--set", "nonsense=1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code
    said = str(result.exception) + result.output
    assert "--render reads the settings that are stored in --out; leave out --models and --set" in said


def test_a_plan_takes_no_dtype(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    command = ["experiment", "fig7-paths", "--small", "--plan", "--out", str(tmp_path), "--dtype", "bfloat16"]
    said = str(CliRunner().invoke(app, command).exception)
    assert said == "--plan counts each model by its config.json, in the dtype that is there; leave out --dtype"


def test_a_setting_that_is_an_option_of_the_command_names_it(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    command = ["experiment", "fig7-paths", "--small", "--plan", "--out", str(tmp_path), "--set"]
    result = CliRunner().invoke(app, [*command, "device=cpu"])
    assert str(result.exception) == "give --device in place of --set"
    own = CliRunner().invoke(app, [*command, 'models=["toy"]'])  # published commands give it so
    assert "toy-ar" not in own.output
    assert "  toy: " in own.output


def test_models_of_an_experiment_without_models_are_named_as_the_option(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from dlm_lens.cli.errors import as_command_line

    command = ["experiment", "axis-circuits", "--plan", "--out", str(tmp_path), "--models", "toy"]
    sentence = as_command_line(str(CliRunner().invoke(app, command).exception), {"models": "--models"})
    assert sentence == "axis-circuits takes no models; leave out --models"


def test_no_parts_and_no_numbers() -> None:
    with pytest.raises(ValueError, match="a claim needs at least one part, got none"):
        all_of()
    with pytest.raises(ValueError, match=r"the values of the seeds are \[nan, 1.0\]; leave out"):
        over_seeds([math.nan, 1.0])


def test_options_without_an_effect_are_refused(tmp_path: Path) -> None:
    """A table of trained networks measures them as they were trained, and --render loads no model."""
    from typer.testing import CliRunner

    from dlm_lens.cli.errors import as_command_line

    options = {"dtype": "--dtype", "device": "--device"}
    for table in range(1, 6):
        given = ["--small", "--out", str(tmp_path), "--dtype", "bfloat16", "--device", "cpu"]
        result = CliRunner().invoke(app, ["experiment", f"one-token-table{table}", *given])
        assert as_command_line(str(result.exception), options) == (
            f"one-token-table{table} trains its networks and measures them as they were trained; "
            "leave out --device and --dtype"
        )
        assert not list(tmp_path.iterdir())
    rendered = CliRunner().invoke(app, ["experiment", "fig5-depth", "--render", "--dtype", "bfloat16"])
    assert str(rendered.exception).endswith("stored in --out; leave out --dtype")


def test_a_model_that_is_given_twice_is_refused() -> None:
    paths = find_experiment("fig7-paths")
    with pytest.raises(ValueError, match="models has 'toy' twice; give each model once"):
        list_items(paths, paths.config(small=True, models=["toy", "toy-ar", "toy"]))


def test_models_that_are_compared_have_the_same_settings() -> None:
    instruct = find_experiment("beyond-instruct")
    with pytest.raises(ValueError, match=r"batch is \{'': 8, 'toy': 4\};.* give one for all"):
        instruct.config(small=True, given={"batch": {"": 8, "toy": 4}})
    assert instruct.config(small=True, given={"batch": 4})["settings"]["batch"] == 4


def test_pairs_may_share_a_base_model() -> None:
    instruct = find_experiment("beyond-instruct")
    config = instruct.config(small=True, models=["toy", "toy+sft", "toy", "toy+pretraining"])
    items = list_items(instruct, config)
    assert {(item["base"], item["instruct"]) for item in items if item["measure"] == "sinks"} == {
        ("toy", "toy+sft"), ("toy", "toy+pretraining")
    }  # fmt: skip
    masked = {item["model"] for item in items if item["measure"] == "masking"}
    assert masked == {"toy", "toy+sft", "toy+pretraining"}
