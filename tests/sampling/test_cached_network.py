"""Approximate caches by default: against a float64 network with explicit stale keys, batches, edits, refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.testing import tiny
from tests.reference import forward64
from tests.sampling.stale import span_of, stale64

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]
RUN: dict[str, Any] = {"gen_length": 12, "block_length": 4, "steps": 12, "seed": 1}
RULES: list[dict[str, Any]] = [{}, {"steps": 6}, {"threshold": 0.1}, {"factor": 2.7}]


@pytest.fixture(scope="module", params=["llada", "dream"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


def rules_of(model: Any) -> list[dict[str, Any]]:
    """Dream's quotas need a rule that ranks."""
    ranked = {"remasking": "maskgit_plus"} if model.config.model_type == "Dream" else {}
    return [rule | (ranked if not {"threshold", "factor"} & set(rule) else {}) for rule in RULES]


def accepted(likely: Tensor, rule: dict[str, Any]) -> int:
    """How many of the sorted probabilities are surely accepted, one by one."""
    ranked = sorted(likely.tolist(), reverse=True)
    count = 1
    for n, p in enumerate(ranked, 1):
        least = rule["threshold"] if "threshold" in rule else 1 - rule["factor"] / (n + 1)
        if n > 1 and p < least:
            break
        count = n
    return count


@pytest.mark.parametrize("cache", ["prefix", "dual", None])
@pytest.mark.parametrize("which", range(4))
def test_every_step_is_that_of_a_float64_network_with_stale_keys(model: Any, cache: str | None, which: int) -> None:
    rule = rules_of(model)[which]
    run = dl.denoise(model, PROMPTS, cache=cache, **RUN | rule)
    shift = model.config.model_type == "Dream"
    numbers = set()
    for step in range(run.steps):
        start, stop = run.spans[step]
        for row in range(2):
            logits = stale64(model, run, step, row)["logits"][0]
            padding = int(run.padding[row])
            logits = torch.cat([logits.new_zeros(padding, logits.shape[1]), logits])
            if shift:
                logits = torch.cat([logits[:1], logits[:-1]])
            likely = logits.softmax(-1)
            # [MASK] is proposed nowhere; its probability counts.
            tokens = logits.index_fill(-1, torch.tensor([model.config.mask_token_id]), -torch.inf).argmax(-1)
            here = run.masked[step, row].clone()
            here[:start] = here[stop:] = False
            found = run.confidence[step, row]
            assert found.isfinite().equal(here)
            expected = likely.gather(-1, tokens[:, None])[:, 0]
            torch.testing.assert_close(found[here].double(), expected[here], atol=2e-5, rtol=1e-4)
            assert run.proposals[step, row][here].equal(tokens[here])
            if {"threshold", "factor"} & set(rule) and bool(here.any()):
                best = expected[here].topk(accepted(expected[here], rule)).values.min()
                assert run.unmasked[step, row].equal(here & (expected >= best))
                numbers.add(int(run.unmasked[step, row].sum()))
    if {"threshold", "factor"} & set(rule):
        assert len(numbers) > 1
        assert not run.masks_left.any()


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_is_what_it_is_alone(model: Any, cache: str, which: int, temperature: float) -> None:
    options = RUN | rules_of(model)[which] | {"cache": cache, "temperature": temperature}
    together = dl.denoise(model, PROMPTS, **options)
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], **options)
        keep = together.attention_mask[row]
        # Where another row needs more steps, this one waits: the canvases without repetitions are the same.
        for found in (together.unmasked[:, row][:, keep], alone.unmasked[:, 0]):
            assert found.any()
        ours = [
            c.tolist()
            for c, u in zip(together.canvases[1:, row, keep], together.unmasked[:, row], strict=True)
            if u.any()
        ]
        assert ours == [
            c.tolist() for c, u in zip(alone.canvases[1:, 0], alone.unmasked[:, 0], strict=True) if u.any()
        ]


@pytest.mark.parametrize("cache", ["prefix", "dual", None])
def test_no_pass_follows_a_finished_block_and_only_the_span_is_computed(model: Any, cache: str | None) -> None:
    widths: list[int] = []
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(args[0].shape[1]), with_kwargs=True
    )
    rule = rules_of(model)[2]
    try:
        run = dl.denoise(model, PROMPTS, cache=cache, **RUN | rule)
    finally:
        handle.remove()
    positions, shift = run.tokens.shape[1], model.config.model_type == "Dream"
    spans = [span_of(run, step, shift=shift) or (0, positions) for step in range(run.steps)]
    assert widths == [stop - start for start, stop in spans]
    assert len(widths) < 12
    for step in range(run.steps):
        assert run.masked[step][:, slice(*run.spans[step])].any()


def test_more_steps_than_masks_are_left_out_under_a_cache() -> None:
    run = dl.denoise(tiny("llada"), [[1, 2, 3]], cache="dual", **RUN | {"steps": 24})
    assert run.steps == 12
    assert (run.counts == 1).all()


def test_guidance_keeps_the_keys_of_both_halves() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS[:1], cache="dual", **RUN | {"cfg_scale": 0.7})
    hidden = run.canvases.clone()
    hidden[:, :, : run.prompt_length] = model.config.mask_token_id
    from dataclasses import replace

    other = replace(run, canvases=hidden)
    for step in range(run.steps):
        c, u = (stale64(model, one, step, 0)["logits"][0] for one in (run, other))
        likely = (u + 1.7 * (c - u)).softmax(-1)
        found = run.confidence[step, 0]
        here = found.isfinite()
        best = likely.gather(-1, run.proposals[step, 0][:, None])[:, 0]
        torch.testing.assert_close(found[here].double(), best[here], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_an_edit_outside_the_span_makes_the_step_compute_everything(cache: str) -> None:
    model = tiny("llada")
    mask = model.config.mask_token_id

    def edit(step: int, canvas: Tensor) -> Tensor:
        if step == 2:
            canvas[:, 1] = 30
        if step == 6:
            canvas[:, 8] = mask  # in the first block: it is filled in again
        return canvas

    run = dl.denoise(model, [PROMPTS[0]], cache=cache, on_canvas=edit, **RUN)
    assert not run.masks_left.any()
    assert run.unmasked[6:, 0, 8].any()
    likely = forward64(model, run.canvases[2])["logits"][0].softmax(-1)
    found = run.confidence[2, 0]
    here = found.isfinite()
    best = likely.gather(-1, run.proposals[2, 0][:, None])[:, 0]
    torch.testing.assert_close(found[here].double(), best[here], atol=2e-5, rtol=1e-4)


def test_logits_of_a_step_are_nan_where_it_computes_none(model: Any) -> None:
    seen: list[Tensor] = []
    rule = rules_of(model)[0]
    run = dl.denoise(
        model, PROMPTS, cache="dual", on_logits=lambda _s, _c, logits: seen.append(logits.clone()), **RUN | rule
    )
    plain = dl.denoise(model, PROMPTS, cache="dual", **RUN | rule)
    assert run.canvases.equal(plain.canvases)
    start, stop = run.spans[1]
    assert seen[1][:, start:stop].isfinite().all()
    assert seen[1][:, :start].isnan().all()
    assert seen[1][:, stop:].isnan().all()
    assert seen[0].isfinite().all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llada", {"cache": "suffix"}, "cache is 'suffix'; it must be 'prefix' or 'dual'"),
        ("llada", {"threshold": 0.0}, "threshold is 0.0; it is a probability"),
        ("llada", {"factor": 0.0}, "factor is 0.0"),
        ("llada", {"factor": 1.0, "threshold": 0.5}, "give one of them"),
        ("llada", {"threshold": 0.5, "remasking": "random"}, "which remasking='random' does not have"),
        ("dream", {"threshold": 0.5, "remasking": "entropy"}, "they belong to 'confidence_threshold'"),
        ("llada", {"cache": "dual", "steps": 3, "reference_quirks": True}, "one step per block"),
        ("a2d_qwen3", {"cache": "dual"}, "no setting 'cache' .*are for the samplers of LLaDA and Dream\\)"),
        (
            "llada2",
            {"cache": "prefix"},
            "no setting 'cache' .*; use_cache is the setting of this one\\); it",
        ),
        ("sink_llama", {"cache": "dual"}, "learned sink tokens"),
    ],
)
def test_what_cannot_be(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dl.denoise(tiny(name, **({"num_sinks": 2} if "sink" in name else {})), [PROMPTS[0]], **RUN | options)


def test_a_cache_with_masks_in_the_prompt_is_refused() -> None:
    model = tiny("llada")
    with pytest.raises(ValueError, match="cache='dual' and mask tokens in the prompt"):
        dl.denoise(model, [[1, model.config.mask_token_id, 3]], cache="dual", **RUN)


def families_with_a_cache() -> list[str]:
    return [f.name for f in dl.families() if next(iter(f.samplers)) in ("llada", "dream")]


@pytest.mark.parametrize("family", families_with_a_cache())
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_in_one_layer_kept_keys_are_exact(family: str, cache: str) -> None:
    """Keys and values of the first layer are those of the tokens alone, and only tokens of the span change."""
    model = tiny(family, num_hidden_layers=1)
    ranked = {"remasking": "maskgit_plus"} if model.sampler_defaults["remasking"] == "origin" else {}
    plain, cached = (dl.denoise(model, PROMPTS, **RUN | ranked, **more) for more in ({}, {"cache": cache}))
    assert any(cached.computed)
    assert cached.canvases.equal(plain.canvases)
    finite = plain.confidence.isfinite()
    torch.testing.assert_close(cached.confidence[finite], plain.confidence[finite], atol=1e-5, rtol=1e-4)
