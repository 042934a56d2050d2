"""The base classes of hooks: their defaults, the context of a call, and a user's own objects and functions."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import ColumnHook, ColumnMask, Hook, PointContext, SinkLayout, as_hook, hidden_per_map
from dlm_lens.attention.hook import HOOK_ATTRIBUTES, ColumnHookAdapter, HookAdapter
from dlm_lens.attention.hook_attachment import checked
from dlm_lens.experiments.attention_sinks.hidden_mass import HiddenMass
from dlm_lens.hooks import (
    KeepOnly,
    MaskRandom,
    at_encoder,
    at_layers,
    at_steps,
    attach_hooks,
    by_row,
    freeze_sinks,
    keep_only,
    mask_positions,
    mask_random,
    mask_sinks,
    mask_top_sinks,
)
from dlm_lens.testing import tiny

DEFAULTS = {
    "layers": None,
    "stateless": False,
    "padding_safe": False,
    "needs_clean_pass": False,
    "sees_all_layers": False,
}
RUN: dict[str, Any] = {"steps": 3, "gen_length": 6}


class Plus:
    """A user's own object, no subclass of `Hook`."""

    site = "resid"

    def __call__(self, tensor: Tensor, hook: Any = None) -> Tensor:
        return tensor + 0.5


def plus(tensor: Tensor, hook: Any = None) -> Tensor:
    """A user's own function."""
    return tensor + 0.5


plus.site = "resid"  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Add(Hook):
    """A subclass with a required field over a default of the base class, and settings of its own."""

    site: Any
    value: float = 0.5
    stateless = True

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """The sum."""
        return tensor + self.value


class First:
    """A user's own column hook, which cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]
    site = "scores"
    padding_safe = True

    def __call__(self, tensor: Tensor, hook: Any = None) -> Tensor:
        return dl.attention.hide_columns(self, tensor, hook)

    def hidden(self, keys: int, columns: Any, hook: Any) -> ColumnMask:
        """The first canvas position."""
        hidden = torch.zeros(1, 1, keys, dtype=torch.bool)
        hidden[..., hook.sinks.canvas(keys).start] = True
        return ColumnMask(hidden)


def test_hook_has_documented_defaults() -> None:
    with pytest.raises(TypeError, match="site"):
        Add()  # type: ignore[call-arg]
    for hook in (Add("resid"), as_hook(Plus()), as_hook(plus)):
        declared = {name: getattr(hook, name) for name in DEFAULTS}
        assert declared == {**DEFAULTS, "stateless": isinstance(hook, Add)}
    assert repr(Add("resid")) == "Add(site='resid', value=0.5)"
    assert Add("resid") == Add("resid")
    assert Add("resid", 1.0) != Add("resid")
    with pytest.raises(NotImplementedError, match=r"Hook without an edit"):
        type("Empty", (Hook,), {"site": "v"})()(torch.zeros(1))
    with pytest.raises(NotImplementedError, match=r"ColumnHook without a hidden"):
        ColumnHook()(torch.zeros(1, 1, 2, 2))


def test_point_context_of_a_call() -> None:
    bare = PointContext.of(None)
    assert (bare.name, bare.index, bare.sinks, bare.run, bare.sinks_known) == ("", None, SinkLayout(), None, False)
    with pytest.raises(ValueError, match="layer of hook point '' is not known"):
        bare.layer()
    point = PointContext.of(SimpleNamespace(name="blocks.3.hook_resid_post", layer=lambda: 3))
    assert (point.name, point.layer(), point.sinks_known) == ("blocks.3.hook_resid_post", 3, False)
    own = PointContext("here", 1)
    assert PointContext.of(own) is own
    assert own.sinks_known


def test_attach_hooks_without_a_block_warns_and_attaches_none(recwarn: pytest.WarningsRecorder) -> None:
    model, ids, hook = tiny("llada"), torch.arange(3, 12)[None], mask_positions(0)
    plain = model(input_ids=ids).logits
    with attach_hooks(model, hook):
        hooked = model(input_ids=ids).logits

    @attach_hooks(model, hook)
    def decorated() -> Tensor:
        logits: Tensor = model(input_ids=ids).logits
        return logits

    assert decorated().equal(hooked)
    assert decorated().equal(hooked)
    assert not hooked.equal(plain)
    del decorated
    assert not recwarn.list
    with pytest.warns(UserWarning, match="called without `with`, and no hook was attached") as caught:
        attach_hooks(model, hook)
    assert caught[0].filename == __file__
    assert model(input_ids=ids).logits.equal(plain)


def test_as_hook_adapts_objects_and_functions() -> None:
    hook, own = Add("resid"), Plus()
    assert as_hook(hook) is hook
    assert isinstance(as_hook(own), HookAdapter)
    assert isinstance(as_hook(First()), ColumnHookAdapter)
    assert isinstance(as_hook(First()), ColumnHook)
    assert as_hook(First()).padding_safe
    assert repr(as_hook(own)) == repr(own)
    assert as_hook(own) == as_hook(own)
    assert as_hook(own).key is own
    for wrong in (Plus, torch.relu, 3, type("NoCall", (), {"site": "v"})()):
        with pytest.raises(ValueError, match="is no hook"):
            checked([wrong])
    with pytest.raises(ValueError, match=r"'mask_positions\(0\)' is no hook; .*parse_hooks reads texts"):
        checked(["mask_positions(0)"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"bridge\(model\)\.denoise\(fwd_hooks=\)"):
        checked([("blocks.1.attn.hook_z", plus)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="which is none of q, k, v"):
        as_hook(Add("nowhere"))
    for alone in (own, hook, plus):
        with pytest.raises(ValueError, match=r"give a list of hooks"):
            checked(alone)  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [Plus(), plus], ids=["object", "function"])
def test_an_own_hook_is_the_subclass_in_every_host(own: Any) -> None:
    model = tiny("llada")
    want = dl.denoise(model, [[1, 2, 3]], hooks=[Add("resid")], **RUN)
    runs = [
        dl.denoise(model, [[1, 2, 3]], hooks=[own], **RUN),
        dl.denoise(model, [[1, 2, 3]], hooks=[at_steps(at_layers(own, [0, 1]), slice(None))], **RUN),
        dl.bridge(model).denoise([[1, 2, 3]], hooks=[own], **RUN),
    ]
    assert runs[0].settings["hooks"] == (repr(own),)
    for run in runs:
        assert run.canvases.equal(want.canvases)
        torch.testing.assert_close(run.confidence, want.confidence, atol=2e-5, rtol=1e-5)


def test_an_own_column_hook_counts_under_its_own_object() -> None:
    model, own, memories = tiny("llada"), First(), []

    @dataclass(frozen=True)
    class Look(Hook):
        site: Any = "resid"

        def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
            assert hook.run is not None
            memories.append(hook.run.memory)
            return tensor

    run = dl.denoise(model, [[1, 2, 3]], hooks=[own, Look()], **RUN)
    assert run.canvases.equal(dl.denoise(model, [[1, 2, 3]], hooks=[mask_positions(0)], **RUN).canvases)
    assert run.settings["columns_hidden"] == (1.0, None)
    assert hidden_per_map(memories[-1], own) == 1.0


def test_what_a_wrapper_does_not_override_is_that_of_the_hook_inside() -> None:
    inner = mask_top_sinks(2, source="previous", per="model")
    for hook in (inner, keep_only(dl.sinks.TopK(2), 3, source="previous", per="model")):
        assert hook.sees_all_layers
        limited = at_layers(hook, [1])
        assert limited.sees_all_layers
        assert limited.layers is None
    assert at_steps(mask_top_sinks(1, source="clean"), 1).needs_clean_pass
    assert at_layers(mask_positions(-1), 0).stateless
    assert not at_steps(mask_positions(-1), 0).stateless


class AtPosition:
    """A user's own object that edits one position and says so in a field."""

    site, stateless = "resid", True

    def __init__(self, *positions: Any) -> None:
        self.positions = positions

    def __call__(self, tensor: Tensor, hook: Any = None) -> Tensor:
        edited = tensor.clone()
        edited[:, 2] = 0
        return edited


def test_the_positions_of_an_own_object_count_as_those_of_a_hook(caplog: pytest.LogCaptureFixture) -> None:
    model, prompts = tiny("llada"), [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
    hook = as_hook(AtPosition(2))
    assert (hook.shifts_with_padding, hook.row_count) == (True, None)
    assert as_hook(AtPosition(by_row([2], [1]))).row_count == 2
    assert not as_hook(AtPosition(-1)).shifts_with_padding
    assert not as_hook(Plus()).shifts_with_padding
    recorded = dl.record(model, prompts, hooks=[AtPosition(2)], **RUN).run.tokens[1]
    alone = dl.record(model, prompts[1:], hooks=[AtPosition(2)], **RUN).run.tokens[0]
    assert recorded[-len(alone) :].equal(alone)
    dl.denoise(model, prompts, hooks=[AtPosition(2)], **RUN)
    assert "positions count from the beginning of the canvas" in caplog.text
    with pytest.raises(ValueError, match="position 40"):
        dl.denoise(model, prompts, hooks=[AtPosition(40)], **RUN)


def test_what_an_own_object_declares_comes_before_its_positions() -> None:
    own, checked_runs = AtPosition(40), []
    own.shifts_with_padding, own.row_count = False, 1  # type: ignore[attr-defined]
    own.check_run = checked_runs.append  # type: ignore[attr-defined]
    assert (as_hook(own).shifts_with_padding, as_hook(own).row_count) == (False, 1)
    dl.denoise(tiny("llada"), [[5, 6, 7]], hooks=[own], **RUN)
    assert len(checked_runs) == 1


def test_what_is_documented_of_hooks_is_what_delegating_hooks_read() -> None:
    documented = Hook.__doc__ or ""
    page = (Path(__file__).parents[2] / "docs" / "add-a-hook.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^        (\w+): ", documented, re.MULTILINE)) == HOOK_ATTRIBUTES
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) - {"Hook", "ColumnHook"} == HOOK_ATTRIBUTES


DECLARED = {
    "layers": (1,),
    "stack": "encoder",
    "stateless": True,
    "remembers": False,
    "padding_safe": False,
    "shifts_with_padding": True,
    "row_count": 3,
    "needs_clean_pass": True,
    "sees_all_layers": True,
}


@pytest.mark.parametrize("name", sorted(HOOK_ATTRIBUTES - {"site"}))
def test_hooks_that_read_another_have_its_attributes(name: str) -> None:
    """For every attribute, an own column hook that declares it, and hooks that read this hook."""
    plain, own = First(), First()
    setattr(own, name, DECLARED[name])
    for build in (as_hook, lambda hook: mask_random(like=hook), lambda hook: KeepOnly(hook, 2), HiddenMass):
        built, before = build(as_hook(own)), build(as_hook(plain))
        if name == "stateless" and isinstance(built, MaskRandom):
            assert not built.stateless  # the choice depends on the step
            continue
        assert getattr(built, name) == DECLARED[name]
        assert getattr(before, name) != DECLARED[name]


def test_hooks_without_another_hook_inside_have_their_own_attributes() -> None:
    window, random = keep_only(window=2, stage="after"), mask_random(2, stage="after")
    for hook in (window, random):
        assert (hook.site, hook.layers, hook.stack, hook.remembers, hook.padding_safe) == (
            "pattern",
            None,
            "",
            False,
            True,
        )
    assert (window.stateless, random.stateless) == (True, False)
    assert keep_only([0], window=2, stage="after").site == "pattern"
    assert mask_random(like=mask_positions(0, stage="after")).site == "pattern"
    assert mask_random(like=at_encoder(mask_positions(0))).stack == "encoder"
    frozen = freeze_sinks(dl.sinks.TopK(1), step=1, stage="after")
    assert (frozen.site, frozen.stateless, frozen.remembers) == ("pattern", False, True)
    assert mask_sinks(dl.sinks.TopK(1)).stateless


def test_an_own_object_may_name_its_first_step(caplog: pytest.LogCaptureFixture) -> None:
    own = Plus()
    assert as_hook(own).first_step(4) is None
    own.first_step = 3  # type: ignore[attr-defined]
    assert as_hook(own).first_step(4) is None  # a value of its own, not the method of `Hook`
    own.first_step = lambda total: total - 2  # type: ignore[attr-defined]
    assert as_hook(own).first_step(4) == 2
    assert at_layers(own, 0).first_step(4) == 2
