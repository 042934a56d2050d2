"""Probes with hooks= see the network that the hooks leave, at every step; `hooks_of_run` gives a run's own."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import dlm_lens as dl
from dlm_lens.attention import attach_hooks
from dlm_lens.cli import app as cli
from dlm_lens.hooks import (
    ablate,
    at_layers,
    at_steps,
    capture,
    freeze_sinks,
    hooks_of_run,
    mask_positions,
    mask_random,
    mask_sinks,
    mask_top_sinks,
    patch_from,
    sink,
    steer,
)
from dlm_lens.probes import (
    commitment,
    pattern_stability,
    proposed_commitment,
    retrieval_heads,
    sink_updates,
    sink_writes,
    token_smearing,
)
from dlm_lens.sinks import key_statistic_over_steps
from dlm_lens.testing import tiny
from dlm_lens.viz import attention_heads, attention_maps, attention_pattern, value_weighted_pattern

PROMPTS = [[5, 9, 11, 3, 17, 20, 8, 30, 31], [6, 2, 40]]
RUN: dict[str, Any] = {"steps": 6, "gen_length": 12, "seed": 3}
RULE = dl.AboveMean(0.5)
# Both act on any pass, so that they can also stay attached to the model while a probe without hooks runs.
ATTACHED = [mask_positions(-3), at_layers(ablate("mlp_out", None, "zero"), [1])]


def lines(view: Any) -> Any:
    return json.loads(json.dumps([piece.props for piece in view.pieces]))


def sinks_of(model: Any, run: Any, **given: Any) -> Any:
    return dl.find_sinks(dl.received_over_steps(model, run, **given), RULE)


PROBES: dict[str, Callable[..., Any]] = {
    "received_over_steps": lambda model, run, **given: dl.received_over_steps(model, run, **given).values,
    "key norm": lambda model, run, **given: key_statistic_over_steps(model, run, "key norm", **given).values,
    "commitment": lambda model, run, **given: commitment(model, run, **given).entropy,
    "token_smearing": lambda model, run, **given: token_smearing(model, run, **given).own,
    "pattern_stability": lambda model, run, **given: pattern_stability(model, run, RULE, **given).table(),
    "retrieval_heads": lambda model, run, **given: retrieval_heads(model, run, **given).sums,
    "sink_updates": lambda model, run, **given: (
        sink_updates(model, run, sinks_of(model, run, **given), **given).update
    ),
    "sink_writes": lambda model, run, **given: sink_writes(model, run, sinks_of(model, run, **given), **given).norm,
    "attention_heads": lambda model, run, **given: lines(attention_heads(run, model, step=2, layer=1, **given)),
    "attention_pattern": lambda model, run, **given: lines(
        attention_pattern(run, model, step=2, layer=1, head=0, **given)
    ),
    "value_weighted_pattern": lambda model, run, **given: lines(
        value_weighted_pattern(run, model, step=2, layer=1, head=0, **given)
    ),
    "attention_maps": lambda model, run, **given: (
        attention_maps(model, run, steps=[2, 4], layer=1, head=0, **given).axes[1].collections[0].get_array().data
    ),
}


def same(one: Any, two: Any) -> bool:
    if isinstance(one, pd.DataFrame):
        return one.equals(two)
    if isinstance(one, list):
        return one == two
    found, wanted = torch.as_tensor(one), torch.as_tensor(two)
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", PROBES)
def test_the_probe_is_that_of_a_model_with_the_hooks_attached(name: str) -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, **RUN)
    found = PROBES[name](model, run, hooks=ATTACHED)
    with attach_hooks(model, *ATTACHED):
        wanted = PROBES[name](model, run)
    assert same(found, wanted)
    assert not same(found, PROBES[name](model, run))


@pytest.mark.parametrize("family", ["llada", "mmada"])
@pytest.mark.parametrize(
    "hook",
    [mask_top_sinks(2), freeze_sinks(dl.TopK(1), step=1), mask_top_sinks(1, source="previous", per="model")],
    ids=str,
)
def test_under_the_runs_own_hooks_commitment_reads_what_the_run_proposed(family: str, hook: Any) -> None:
    model = tiny(family)
    run = dl.denoise(model, PROMPTS, hooks=[hook], **RUN)
    proposed, own = proposed_commitment(run), commitment(model, run, hooks=hooks_of_run(run))
    read = proposed.token >= 0
    assert int(read.sum()) > 40
    assert own.token[read].equal(proposed.token[read])
    assert not commitment(model, run).token[read].equal(proposed.token[read])


HOOKS = [
    mask_positions(3, sink(0), stage="after", renormalise=True),
    mask_sinks(dl.AboveMean(2.5), top=3, per="layer", source="previous", classes=("punctuation",)),
    at_steps(mask_random(like=mask_top_sinks(2), seed=4, match="mass"), slice(2, None)),
    at_steps(freeze_sinks(dl.TopK(1), step=1), range(1, 4)),
    at_layers(ablate("mlp_out", "masked", "zero"), [0, -1]),
]


@pytest.mark.parametrize("hook", HOOKS, ids=str)
def test_the_hooks_of_a_run_are_made_from_their_text(hook: Any) -> None:
    run = dl.denoise(tiny("sink_qwen"), [[1, 2, 3]], steps=4, gen_length=4)
    hooked = replace(run, settings={**run.settings, "hooks": (repr(hook), "mask_positions(1)")})
    made = hooks_of_run(hooked)
    assert tuple(map(repr, made)) == (repr(hook), "mask_positions(1)")
    assert [type(one) for one in made] == [type(hook), type(mask_positions(1))]
    assert hooks_of_run(run) == ()


def test_a_hook_that_its_text_does_not_hold_is_refused() -> None:
    model = tiny("llada")
    plain = dl.denoise(model, PROMPTS, **RUN)
    source = dl.received_over_steps(model, plain)
    for hook in (
        mask_sinks(dl.TopK(1), source=source),
        steer(torch.ones(32), 1.0),
        patch_from(capture(model, plain, "resid"), 1),
    ):
        run = dl.denoise(model, PROMPTS, hooks=[hook], **RUN)
        with pytest.raises(ValueError, match="cannot be made from its text; in Python give the hook itself"):
            hooks_of_run(run)
    with pytest.raises(TypeError, match="the run is a list"):
        hooks_of_run([1])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    place = tmp_path_factory.mktemp("hooks") / "rec"
    prompts = ["leo has 26 cups . leo loses 6 . how many cups now ? :"]
    hooks = [mask_top_sinks(1)]
    return str(place), dl.record(dl.load("toy"), prompts, to=place, hooks=hooks, steps=8, gen_length=8)


def output(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_lines_word_for_the_recordings_own_hooks(recorded: tuple[str, Any], tmp_path: Path) -> None:
    path, rec = recorded
    model = dl.load("toy")
    found = json.loads(output("lens", path, "--positions", "2,3", "--steps", "1,4", "--hooks", "run", "--json"))
    assert found["hooks"] == list(rec.hooks) == ["mask_sinks(TopK(k=1))"]
    wanted = dl.logit_lens(model, rec.run, [2, 3], steps=[1, 4], hooks=[mask_top_sinks(1)]).summary()
    assert [line["change"] for line in found["layers"]] == pytest.approx(wanted["change"].tolist())
    assert max(wanted["change"]) > 0
    for hooks, expected in (
        ("run", "Under mask_sinks(TopK(k=1))."),
        ("mask_positions(2)", "Under mask_positions(2)."),
    ):
        file = tmp_path / f"{len(hooks)}.html"
        output("plot", "attention-heads", path, "--hooks", hooks, "--steps", "3", "--layer", "0", "-o", str(file))
        assert expected in file.read_text()
    wrong = CliRunner().invoke(cli.app, ["plot", "attention-maps", path, "--hooks", "mask_nothing(1)"])
    assert "'mask_nothing' is no hook and no detector" in str(wrong.exception)


def test_hooks_outside_a_list_are_refused() -> None:
    model = tiny("llada")
    run = dl.denoise(model, [[5, 6, 7]], steps=2, gen_length=4)
    for hooks in (3, mask_top_sinks(1)):
        with pytest.raises(ValueError, match="give a list of hooks, such as"):
            dl.logit_lens(model, run, [0], hooks=hooks)  # type: ignore[arg-type]
