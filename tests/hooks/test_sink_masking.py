from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import ColumnStats
from dlm_lens.hooks import (
    at_heads,
    at_layers,
    at_progress,
    at_steps,
    capture,
    freeze_sinks,
    keep_only,
    mask_random,
    mask_sinks,
    mask_top_sinks,
)
from dlm_lens.hooks.sink_sources import scores_of
from dlm_lens.sinks import AboveMean, LowKeyNorm, TopK
from tests.hooks.by_hand import (
    PROMPTS,
    Network,
    above_mean,
    hide,
    logits_of_run,
    model_of,
    scores,
    settings_of,
    statistics,
    top,
)

# float32 through two layers against float64; logits are of the order of 3.
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def by_hand(settings: dict[str, Any], memory: dict[int, Any], clean: dict[int, Any] | None) -> Any:
    """What `mask_sinks` does at one layer; `memory` holds what the step before received."""

    def edit(layer: int, value: Tensor, visible: Tensor, counted: Tensor) -> Tensor:
        stage, per = settings.get("stage", "before_softmax"), settings.get("per", "head")
        pattern = value.softmax(-1) if stage == "before_softmax" else value
        now = statistics(pattern, visible, counted)
        memory[layer] = now
        source = {
            "current": {layer: now},
            "previous": memory.get("before", {layer: now} if per != "model" else {}),
            "clean": clean,
        }[settings.get("source", "current")]
        assert source is not None

        def gone(b: int, h: int, i: int) -> set[int]:
            if per == "model":
                maps = [one for maps in source.values() for one in maps[b]]
            else:
                maps = source[layer][b] if per == "layer" else [source[layer][b][h]]
            if not maps:
                return set()
            found = scores(maps, settings.get("relative", True))
            if "k" in settings:
                return set(top(found, settings["k"]))
            sinks = above_mean(found, settings["eps"])
            return set(top(torch.where(torch.tensor([j in sinks for j in range(len(found))]), found, torch.nan), 2))

        keep = {name: settings[name] for name in ("keep_self", "renormalise") if name in settings}
        cached: dict[tuple[int, int], set[int]] = {}

        def once(b: int, h: int, i: int) -> set[int]:
            if (b, h) not in cached:
                cached[b, h] = gone(b, h, i)
            return cached[b, h]

        return hide(value, visible, once, stage, **keep)

    return edit


CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("llada", {"k": 2}, False),
    ("llada", {"k": 2}, True),
    ("llada", {"eps": 0.4, "per": "layer"}, False),
    ("llada", {"eps": 0.4, "stage": "after", "relative": False}, False),
    ("llada", {"k": 2, "stage": "after", "renormalise": True, "keep_self": True}, False),
    ("llada", {"k": 2, "source": "previous", "keep_self": True}, False),
    ("llada", {"k": 2, "source": "previous", "per": "model"}, False),
    ("llada", {"k": 2, "source": "clean", "per": "model", "stage": "after"}, True),
    ("llada", {"k": 2, "source": "clean"}, False),
    ("front", {"k": 3}, False),
    ("end", {"k": 3, "stage": "after", "per": "layer"}, False),
    ("llama", {"k": 1}, False),
    ("qwen2", {"k": 2, "stage": "after", "source": "previous"}, False),
    ("llama", {"eps": 0.2, "source": "clean", "per": "layer"}, False),
]


def hook_of(settings: dict[str, Any]) -> Any:
    rest = {name: value for name, value in settings.items() if name not in ("k", "eps")}
    if "k" in settings:
        return mask_top_sinks(settings["k"], **rest)
    return mask_sinks(dl.AboveMean(settings["eps"]), top=2, **rest)


@pytest.mark.parametrize(("name", "settings", "guided"), CASES, ids=str)
@torch.no_grad()
def test_every_step_of_a_padded_run_equals_float64(name: str, settings: dict[str, Any], guided: bool) -> None:
    model = model_of(name)
    run, logits = logits_of_run(model, [hook_of(settings)], name, guided=guided)
    network = Network(model, guided=0.7 if guided else 0.0)
    memory: dict[Any, Any] = {}
    stage = settings.get("stage", "before_softmax")
    for step in range(run.steps):
        stop = run.prompt_length + step if network.causal else run.tokens.shape[1]
        state = [t[:, :stop] for t in (run.canvases[step], run.attention_mask, run.masked[step])]
        clean: dict[int, Any] = {}
        if settings.get("source") == "clean":
            watch = by_hand({"k": 1, "stage": stage}, clean, None)

            def unchanged(
                layer: int, value: Tensor, visible: Tensor, counted: Tensor, watch: Any = watch
            ) -> Tensor:
                watch(layer, value, visible, counted)
                return value

            network.logits(*state, unchanged, stage)
        got = network.logits(*state, by_hand(settings, memory, clean), stage)
        memory = {"before": {layer: maps for layer, maps in memory.items() if layer != "before"}}
        expected = got[:, -1] if network.causal else got
        rows = slice(None) if network.causal else state[1]
        torch.testing.assert_close(logits[step][rows], expected[rows], **CLOSE)
    plain = dl.denoise(model, PROMPTS, **settings_of(name, guided))
    assert not torch.equal(plain.confidence[0], run.confidence[0]) or settings.get("per") == "model"
    assert not torch.equal(plain.confidence[1], run.confidence[1])


@pytest.mark.parametrize(("name", "guided"), [("llada", False), ("llada", True), ("front", True), ("end", False)])
@torch.no_grad()
def test_known_sinks_are_hidden_at_their_step_layer_and_head(name: str, guided: bool) -> None:
    model = model_of(name)
    options = settings_of(name, guided)
    plain = dl.denoise(model, PROMPTS, **options)
    received = dl.received_over_steps(model, plain)
    sinks = dl.find_sinks(received, dl.TopK(3))
    canvas = plain.tokens.shape[1]
    runs = []
    for hook in (mask_sinks(source=sinks), mask_sinks(dl.TopK(3), source=received)):
        run, logits = logits_of_run(model, [hook], name, guided=guided)
        runs.append(run)
        network = Network(model, guided=0.7 if guided else 0.0)
        for step in range(run.steps):

            def edit(layer: int, value: Tensor, visible: Tensor, counted: Tensor, step: int = step) -> Tensor:
                def gone(b: int, h: int, i: int) -> set[int]:
                    # Both halves of guidance take the run's; sink tokens follow the canvas in the source.
                    found = sinks.is_sink[step, b % 2, layer, h].nonzero()[:, 0].tolist()
                    if name != "front":
                        return set(found)
                    return {j + 2 if j < canvas else j - canvas for j in found}

                return hide(value, visible, gone, "before_softmax")

            state = (run.canvases[step], run.attention_mask, run.masked[step])
            expected = network.logits(*state, edit, "before_softmax")
            content = run.attention_mask
            torch.testing.assert_close(logits[step][content], expected[content], **CLOSE)
    assert runs[0].tokens.equal(runs[1].tokens)
    assert not runs[0].confidence.equal(plain.confidence)


def test_sinks_of_a_layer_and_of_a_recording_are_those_of_received_attention() -> None:
    model, options = model_of("llada"), settings_of("llada")
    received = dl.received_over_steps(model, dl.denoise(model, PROMPTS, **options))
    layered = dl.find_sinks(received, dl.TopK(2), level="layer")
    recording = dl.record(model, PROMPTS, reducers=[dl.ReceivedAttention()], **options)
    hooks = [
        mask_sinks(source=layered),
        mask_sinks(dl.TopK(2), source=received, per="layer"),
        mask_sinks(dl.TopK(2), source=recording, per="layer"),
    ]
    first, *others = [dl.denoise(model, PROMPTS, hooks=[hook], **options) for hook in hooks]
    assert all(first.confidence.equal(other.confidence) for other in others)
    by_head = dl.denoise(model, PROMPTS, hooks=[mask_sinks(dl.TopK(2), source=recording)], **options)
    assert not first.confidence.equal(by_head.confidence)
    everywhere = dl.denoise(model, PROMPTS, hooks=[mask_sinks(dl.TopK(2), source=received, per="model")], **options)
    mean = dl.find_sinks(received, dl.TopK(2), level="model")
    assert everywhere.confidence.equal(
        dl.denoise(model, PROMPTS, hooks=[mask_sinks(source=mean)], **options).confidence
    )


def test_a_prefix_of_an_ar_run_takes_the_sinks_that_are_there() -> None:
    model = model_of("llama")
    plain = dl.denoise(model, PROMPTS, **settings_of("llama"))
    received = dl.received_over_steps(model, plain)
    known = dl.denoise(model, PROMPTS, hooks=[mask_sinks(dl.TopK(1), source=received, per="layer")], gen_length=1)
    limited = dl.hooks.at_layers(mask_sinks(dl.TopK(1), source=received, per="layer"), 0)
    current = dl.hooks.at_layers(mask_top_sinks(1, per="layer"), 0)
    one, two = (dl.denoise(model, PROMPTS, hooks=[hook], gen_length=1).confidence for hook in (limited, current))
    torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)
    assert not known.confidence.equal(one)
    full = dl.denoise(model, PROMPTS, hooks=[mask_sinks(dl.TopK(1), source=received)], **settings_of("llama"))
    assert full.steps == 5


@torch.no_grad()
def test_a_bare_call_judges_the_tensor_it_is_given() -> None:
    scores_ = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0)) * 2
    edited = mask_top_sinks(2)(scores_)
    columns = scores_.softmax(-1).sum(-2)
    for b in range(2):
        for h in range(3):
            best = set(columns[b, h].topk(2).indices.tolist())
            hidden = (edited[b, h] < -1e30).all(0).nonzero()[:, 0].tolist()
            assert set(hidden) == best
    causal = scores_.masked_fill(~torch.ones(12, 12).bool().tril(), torch.finfo(torch.float32).min)
    pattern = causal.softmax(-1)
    after = mask_sinks(dl.TopK(1), stage="after", relative=False)(pattern)
    first_columns = pattern.sum(-2)[..., :5]  # keys 5 to 11 are seen by fewer than 8
    assert ((after == 0).all(-2)[..., :5].long().argmax(-1) == first_columns.argmax(-1)).sum() >= 5
    # Row 0 of a causal map sees only itself: it never ends empty.
    assert (after[:, :, 0, 0] == pattern[:, :, 0, 0]).all()


@pytest.mark.parametrize("per", ["head", "layer", "model"])
@pytest.mark.parametrize("quantity", ["received", "raw", "share", "mean attention"])
def test_scores_at_every_level_and_scale(per: Any, quantity: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = []
    for layer in range(3):
        seen = torch.full((2, 4, 9), 12.0)
        seen[0, 1, 3] = 7  # too few in one head, in every layer
        if layer == 2:
            seen[1, 2, 5] = 2  # in one head of one layer
        sums, expected = (torch.rand(2, 4, 9, generator=generator) for _ in range(2))
        layers.append(ColumnStats(sums, expected, seen, torch.tensor([12, 10])))
    given = layers if per == "model" else [layers[2]]
    got = scores_of(given, per, "received" if quantity == "raw" else quantity, quantity != "raw")
    heads = 4 if per == "head" else 1
    assert got.shape == (2, heads, 9)
    for b in range(2):
        for h in range(heads):
            maps = [(c, n) for c in given for n in ([h] if per == "head" else range(4))]
            for j in range(9):
                r, e, n = (
                    sum(float(getattr(c, name)[b, one, j]) for c, one in maps) / len(maps)
                    for name in ("sums", "expected", "viewers")
                )
                by = {"received": e, "raw": 1.0, "share": (12, 10)[b], "mean attention": n}[quantity]
                defined = all(c.viewers[b, one, j] >= 8 for c, one in maps)
                wanted = r / by if defined else float("nan")
                assert float(got[b, h, j]) == pytest.approx(wanted, rel=1e-5, nan_ok=True)


def test_values_are_equal_by_their_settings_and_read_as_written() -> None:
    hook = mask_sinks(dl.AboveMean(eps=3.0), top=5, per="layer", keep_self=True)
    assert repr(hook) == "mask_sinks(AboveMean(eps=3.0), top=5, per='layer', keep_self=True)"
    assert hook == mask_sinks(dl.AboveMean(3.0), top=5, per="layer", keep_self=True)
    assert hash(hook) == hash(mask_sinks(dl.AboveMean(3.0), top=5, per="layer", keep_self=True))
    assert hook != mask_sinks(dl.AboveMean(3.0), top=4, per="layer", keep_self=True)
    assert repr(mask_top_sinks(5, stage="after", source="clean")) == (
        "mask_sinks(TopK(k=5), source='clean', stage='after')"
    )
    assert mask_top_sinks(5) == mask_sinks(dl.TopK(5))


def test_bad_settings_are_refused() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"per": "block"}, "per is 'block'; it must be one of head, layer, model"),
        ({"source": "next"}, "source is 'next'; it must be 'current', 'previous', 'clean', or a Recording"),
        ({"stage": "during"}, "stage is 'during'"),
        ({"top": 0}, "top is 0; it must be a whole number of at least 1"),
        ({"top": True}, "top is True"),
        ({"per": "model"}, "per='model' needs all layers, and the current pass has not reached"),
        ({"renormalise": True}, "renormalise=True is for stage='after'"),
    ]
    for settings, sentence in bad:
        with pytest.raises(ValueError, match=sentence):
            mask_sinks(dl.TopK(1), **settings)
    for detector in (3, dl.TopK, None):
        with pytest.raises(ValueError, match="is not a detector; give one with its settings"):
            mask_sinks(detector)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reads 'key norm', not attention"):
        mask_sinks(LowKeyNorm())
    with pytest.raises(ValueError, match=r"needs to know the run's step: pass it to dlm_lens\.denoise"):
        mask_top_sinks(1, source="previous")(torch.zeros(1, 1, 9, 9))


def test_a_source_that_does_not_fit_is_refused() -> None:
    model = model_of("llada")
    options = settings_of("llada")
    run = dl.denoise(model, PROMPTS, **options)
    received = dl.received_over_steps(model, run)
    sinks = dl.find_sinks(received, dl.TopK(1), level="layer")
    with pytest.raises(ValueError, match="these Sinks were found by TopK"):
        mask_sinks(dl.TopK(2), source=sinks)
    with pytest.raises(ValueError, match="per='model', but these Sinks were found at level 'layer'"):
        mask_sinks(source=sinks, per="model")
    with pytest.raises(ValueError, match="per='head', but this Received has the layer mean only"):
        mask_sinks(dl.TopK(2), source=received.at_level("layer"))
    hook = mask_sinks(source=sinks)
    with pytest.raises(ValueError, match="20 canvas positions and 0 sink tokens, the run 24 and 0"):
        dl.denoise(model, PROMPTS, hooks=[hook], gen_length=12, steps=4)
    with pytest.raises(ValueError, match=r"the source has 4 steps and the run comes to step 4; give .* or limit"):
        dl.denoise(model, PROMPTS, hooks=[hook], gen_length=8, steps=8)
    with pytest.raises(ValueError, match="the source has 2 rows and the run 1"):
        dl.denoise(model, PROMPTS[:1], hooks=[hook], **options)
    some = dl.find_sinks(dl.received_over_steps(model, run, layers=[1]), dl.TopK(1))
    with pytest.raises(ValueError, match="the source has layers 1, not 0; limit the hook with at_layers"):
        dl.denoise(model, PROMPTS, hooks=[mask_sinks(source=some)], **options)


class Begun(dl.sampling.RunObserver):
    """Counts the steps that begin."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, plan: Any, canvas: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """A step begins."""
        self.steps += 1
        return canvas


def test_a_source_that_lacks_steps_is_refused_before_the_first() -> None:
    model = model_of("llada")
    options = {**settings_of("llada"), "gen_length": 8}
    received = dl.received_over_steps(model, dl.denoise(model, PROMPTS, **{**options, "steps": 4}))
    mask, begun = mask_top_sinks(1, source=received), Begun()
    lacking: list[Any] = [
        mask,
        mask_sinks(source=dl.find_sinks(received, dl.TopK(1))),
        at_heads(at_layers(mask, 1), 0),
        at_steps(mask, [0, -1]),
        at_steps(mask, slice(3, None)),
        mask_random(like=mask, seed=0),
        freeze_sinks(dl.TopK(1), step=6, source=received),
    ]
    for hook in lacking:
        with pytest.raises(ValueError, match=r"source has 4 steps and the run comes to step [4-7]; give one"):
            dl.denoise(model, PROMPTS, hooks=[hook], observers=begun, **{**options, "steps": 8})
        with pytest.raises(ValueError, match=r"the run comes to step [4-7]; .* \(prompt 0\)"):
            dl.record(model, PROMPTS, hooks=[hook], batch_size=1, **{**options, "steps": 8})
    assert not begun.steps
    frozen = freeze_sinks(dl.TopK(1), step=2, source=received)
    some: list[Any] = [at_steps(mask, range(4)), at_progress(mask, (0.0, 0.3)), frozen]
    for hook in some:
        dl.denoise(model, PROMPTS, hooks=[hook], observers=begun, **{**options, "steps": 8})
    assert begun.steps == 8 * len(some)
    # A run that its tokens may end need not come to the step.
    with pytest.raises(ValueError, match="the run comes to step 4"):
        dl.denoise(model, PROMPTS, hooks=[mask], observers=begun, **{**options, "steps": 8, "eot_token": 5})
    assert begun.steps == 8 * len(some) + 5


def test_a_source_that_lacks_steps_is_refused_before_the_first_pass_over_a_finished_run_and_on_a_bridge() -> None:
    model = model_of("llada")
    options: dict[str, Any] = {**settings_of("llada"), "gen_length": 8}
    run = dl.denoise(model, PROMPTS, **{**options, "steps": 8})
    received = dl.received_over_steps(model, dl.denoise(model, PROMPTS, **{**options, "steps": 4}))
    hooks: list[Any] = [mask_top_sinks(1, source=received)]
    passes, begun = [0], Begun()

    def counted(*_: Any) -> None:
        passes[0] += 1

    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    handle = decoder.register_forward_pre_hook(counted)
    sinks = dl.find_sinks(dl.received_over_steps(model, run), dl.TopK(1))
    passes[0] = 0
    calls: dict[str, Any] = {
        "replay": lambda: dl.replay(model, run, hooks),
        "rerun": lambda: dl.recording.rerun(model, run, ["received"], hooks=hooks, steps=[2, 5]),
        "logit_lens": lambda: dl.logit_lens(model, run, hooks=hooks, steps=[2, 5]),
        "commitment": lambda: dl.commitment(model, run, hooks=hooks),
        "capture": lambda: capture(model, run, hooks=hooks, cache_steps=[2, 5]),
        "sink_writes": lambda: dl.probes.sink_writes(model, run, sinks, hooks=hooks, steps=[2, 5]),
        "bridge": lambda: dl.bridge(model).denoise(
            PROMPTS, hooks=hooks, observers=begun, **{**options, "steps": 8}
        ),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=r"source has 4 steps and the run comes to step [45]; give one"):
            call()
        assert not passes[0], name
    assert not begun.steps
    # At steps that the source has, the hook acts.
    capture(model, run, hooks=hooks, cache_steps=[2, 3])
    dl.logit_lens(model, run, hooks=hooks, steps=[2, 3])
    dl.recording.rerun(model, run, ["received"], hooks=hooks, steps=[2, 3])
    assert passes[0] >= 6
    handle.remove()


def test_a_rule_as_text_is_that_rule() -> None:
    assert mask_sinks("above-mean:2", top=5) == mask_sinks(AboveMean(2.0), top=5)
    assert keep_only("top-k:2", window=4) == keep_only(TopK(2), window=4)
    assert freeze_sinks("top-k:2", step=3) == freeze_sinks(TopK(2), step=3)
    with pytest.raises(ValueError, match="detector 'above-men:3' \\(did you mean 'above-mean'\\?\\): there are"):
        mask_sinks("above-men:3")
