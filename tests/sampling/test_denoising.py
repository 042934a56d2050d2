from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import dlm_lens
from dlm_lens.hooks import mask_positions
from dlm_lens.testing import tiny
from tests.reference import forward64

MODELS = {family: tiny(family) for family in ("llada", "sink_qwen")}
MASK = 63


@st.composite
def runs(draw: Any) -> dict[str, Any]:
    """A batch of prompts, some with holes, and fitting settings."""
    blocks, each = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    # At least one token that is no mask: a canvas of nothing but masks looks the same from every position, so
    # that its confidences are equal and their order undefined.
    content, holes = st.integers(0, 60), st.integers(0, 60) | st.just(MASK)
    prompt = st.tuples(content, st.lists(holes, max_size=4)).map(lambda drawn: [drawn[0], *drawn[1]])
    prompts = draw(st.lists(prompt, min_size=1, max_size=3))
    return {
        "family": draw(st.sampled_from(sorted(MODELS))),
        "prompt": prompts,
        "gen_length": blocks * each,
        "block_length": each,
        "steps": blocks * draw(st.integers(1, 5)),
        "temperature": draw(st.sampled_from([0.0, 0.8])),
        "cfg_scale": draw(st.sampled_from([0.0, 0.5])),
        "remasking": draw(st.sampled_from(["low_confidence", "random"])),
        "seed": draw(st.integers(0, 1000)),
    }


def denoise(run: dict[str, Any], **changes: Any) -> dlm_lens.DenoisingRun:
    arguments = {**run, **changes}
    return dlm_lens.denoise(MODELS[arguments.pop("family")], **arguments)


def test_random_remasking_unmasks_in_every_order_equally_often() -> None:
    rows = 480
    got = dlm_lens.denoise(
        MODELS["llada"], [[5, 9]] * rows, gen_length=3, steps=3, remasking="random", seed=list(range(rows))
    )
    orders, counts = got.step_of[:, -3:].unique(dim=0, return_counts=True)
    assert sorted(orders.tolist()) == [list(order) for order in permutations(range(3))]
    # Of each of six orders 80 are expected; 20.5 is the chi-squared distribution's 99.9% quantile for 5 degrees.
    assert float(((counts - rows / 6) ** 2 / (rows / 6)).sum()) < 20.5


@pytest.mark.long
@given(run=runs())
@settings(max_examples=40, deadline=None)
def test_every_mask_is_filled_once_and_nothing_else_is_touched(run: dict[str, Any]) -> None:
    got = denoise(run)
    assert (got.unmasked.sum(0) == got.masked[0]).all()
    assert (got.masks_left == 0).all()
    assert not (got.tokens == MASK).any()
    for t in range(got.steps):
        written = torch.where(got.unmasked[t], got.proposals[t], got.canvases[t])
        assert got.canvases[t + 1].equal(written)
        assert got.masked[t + 1].equal(got.masked[t] & ~got.unmasked[t])
        assert not (got.unmasked[t] & ~got.masked[t]).any()
        assert (got.confidence[t] > -torch.inf)[got.unmasked[t]].all()
    assert got.step_of[got.masked[0]].min() >= 0
    assert (got.step_of[~got.masked[0]] == -1).all()


@pytest.mark.long
@given(run=runs())
@settings(max_examples=25, deadline=None)
def test_blocks_are_written_from_left_to_right(run: dict[str, Any]) -> None:
    got = denoise(run)
    position = torch.arange(got.tokens.shape[1])
    for t, (start, stop) in enumerate(got.spans):
        assert not (got.unmasked[t] & (position >= stop)).any()
        if t + 1 == got.steps or got.blocks[t + 1] > got.blocks[t]:
            assert not (got.masked[t + 1] & (position < stop)).any()
        assert (stop - start, start) == (run["block_length"], got.prompt_length + got.blocks[t] * (stop - start))
    assert got.blocks == tuple(sorted(got.blocks))
    assert (got.progress[0] == 0).all()
    assert (got.progress[-1] == 1).all()
    assert (got.progress.diff(dim=0) >= 0).all()


@pytest.mark.long
@given(run=runs())
@settings(max_examples=25, deadline=None)
def test_the_same_seed_gives_the_same_run_and_a_row_is_what_it_is_alone(run: dict[str, Any]) -> None:
    together = denoise(run)
    again = denoise(run)
    assert together.canvases.equal(again.canvases)
    assert together.confidence.equal(again.confidence)
    for row, prompt in enumerate(run["prompt"]):
        alone = denoise(run, prompt=[prompt])
        kept = together.attention_mask[row]
        # A row with fewer holes can need fewer steps of what it has; the schedule itself is the same.
        assert together.canvases[:, row, kept].equal(alone.canvases[:, 0])
        assert together.unmasked[:, row, kept].equal(alone.unmasked[:, 0])


@pytest.mark.long
@given(run=runs())
@settings(max_examples=15, deadline=None)
def test_evaluating_the_head_everywhere_changes_nothing(run: dict[str, Any]) -> None:
    needed, everywhere = denoise(run), denoise(run, logits="all")
    assert needed.canvases.equal(everywhere.canvases)
    torch.testing.assert_close(needed.confidence, everywhere.confidence, atol=1e-5, rtol=1e-4)


BLOCKS = [((2, 5), 0), ((2, 5), 0), ((5, 8), 1), ((5, 8), 1)]
WHOLE = [((2, 8), 0)] * 4
INFILLED = [((0, 8), 0)] * 4
PLANS: list[tuple[str, dict[str, Any], list[tuple[tuple[int, int], int]]]] = [
    ("llada", {"block_length": 3}, BLOCKS),
    ("dream", {"block_length": 3}, BLOCKS),
    ("dream", {"gen_length": 0}, INFILLED),
    ("llada", {"gen_length": 0}, INFILLED),
    ("mdlm", {"noise_removal": False}, WHOLE),
    ("mdlm", {"gen_length": 0, "noise_removal": False}, INFILLED),
]


@pytest.mark.parametrize(("family", "own", "plans"), PLANS)
def test_every_step_has_the_span_and_the_number_of_its_block(
    family: str, own: dict[str, Any], plans: list[tuple[tuple[int, int], int]]
) -> None:
    prompt = [5, 6] if own.get("gen_length") is None else [5, MASK, MASK, 6, MASK, MASK, MASK, MASK]
    given = {"gen_length": 6, "steps": 4} | own
    run = dlm_lens.denoise(tiny(family), [prompt], **given)
    assert list(zip(run.spans, run.blocks, strict=True)) == plans[: run.steps]
    assert run.steps >= 3


def test_parallel_infilling_has_a_step_for_every_mask() -> None:
    prompt = [5, MASK, MASK, 6, *[MASK] * 40]
    run = dlm_lens.denoise(tiny("llada"), [prompt], gen_length=0, threshold=1.0)
    assert (run.steps, run.masks_left.tolist()) == (42, [0])


RANKING: dict[str, dict[str, Any]] = {
    "llada": {}, "dream": {"remasking": "entropy"}, "smdm": {"remasking": "greedy"}, "rnd1": {}, "mdlm": {},
    "sedd": {}, "a2d_qwen3": {},
}  # fmt: skip


@pytest.mark.parametrize("family", RANKING)
def test_only_eligible_positions_have_a_confidence(family: str) -> None:
    """Of a prompt and of decided positions none is kept, whatever the network evaluates."""
    given: dict[str, Any] = {"gen_length": 6, "steps": 4, "seed": [3, 4]} | RANKING[family]
    runs = [dlm_lens.denoise(tiny(family), [[5, 6, 7], [8, 9]], **given, logits=each) for each in ("needed", "all")]
    for run in runs:
        masked = run.masked[:-1]
        assert run.confidence[~masked].eq(-torch.inf).all()
        assert run.confidence[run.unmasked].isfinite().all()
    torch.testing.assert_close(runs[0].confidence, runs[1].confidence, atol=1e-5, rtol=1e-4)


@pytest.fixture
def model(tiny_llada: PreTrainedModel) -> PreTrainedModel:
    return tiny_llada


def test_the_first_step_is_what_the_formulas_say(model: PreTrainedModel) -> None:
    run = dlm_lens.denoise(model, [[5, 6, 7]], gen_length=6, steps=3, cfg_scale=0.7)
    canvas = torch.tensor([[5, 6, 7] + [MASK] * 6])
    conditional = forward64(model, canvas)["logits"][0]
    unconditional = forward64(model, torch.full_like(canvas, MASK))["logits"][0]
    logits = unconditional + 1.7 * (conditional - unconditional)
    logits[:, MASK] = -torch.inf  # never proposed; the probabilities still count it
    proposed = logits.argmax(-1)
    likely = (unconditional + 1.7 * (conditional - unconditional)).softmax(-1)[torch.arange(9), proposed]
    assert run.proposals[0, 0, 3:].equal(proposed[3:])
    torch.testing.assert_close(run.confidence[0, 0, 3:].double(), likely[3:], atol=1e-5, rtol=1e-5)
    assert run.unmasked[0, 0].nonzero().flatten().tolist() == sorted((likely[3:].topk(2).indices + 3).tolist())


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("dream", {"remasking": "origin"}),
        ("sdar", {"remasking": "sequential", "block_length": 2}),
        ("llada2", {"block_length": 1}),
        ("llada", {"remasking": "random"}),
        ("fast_dllm_v2", {"block_length": 4, "sub_block_length": 1}),
        ("mdlm", {}),
        ("sedd", {}),
        ("diffugpt", {}),
        ("nemotron_labs_diffusion", {"parallel": False, "block_length": 2}),
        ("efficient_dlm", {"block_length": 1}),
        ("stable_diffcoder", {"parallel": False}),
        ("sdlm", {"threshold": 1.0}),
        ("i_dlm", {"stride": 1}),
        ("dreamon", {"expand_budget": 0}),
        ("wedlm", {"window_length": 1}),  # its entropy has [MASK], too
        # In these two the probability of [MASK] has a part in which position comes first, not in its token.
        ("open_dcoder", {"steps": 1}),
        ("rnd1", {"steps": 1}),
        ("smdm", {}),
    ],
)
@pytest.mark.filterwarnings("ignore:block_length is")
def test_a_likely_mask_leaves_the_choice_among_the_other_tokens(family: str, own: dict[str, Any]) -> None:
    """At a low temperature the probabilities of all of them round to 0 beside it."""
    model = tiny(family)
    mask = model.config.mask_token_id

    def with_mask(height: float) -> list[int]:
        def raised(step: int, canvas: Tensor, logits: Tensor) -> Tensor:
            if mask >= logits.shape[-1]:  # SMDM's, which has no logit
                return logits
            return logits.index_copy(-1, torch.tensor([mask]), logits.amax(-1, keepdim=True) + height)

        run = dlm_lens.denoise(model, [[5, 6, 7]], gen_length=6, temperature=0.1, on_logits=raised, **own)
        return run.tokens[0].tolist()

    assert with_mask(12.0) == with_mask(-50.0)


def test_sampling_follows_the_softmax_at_its_temperature(model: PreTrainedModel) -> None:
    temperature, rows = 3.0, 1500
    prompt = [[1, 2, 3]] * rows
    run = dlm_lens.denoise(model, prompt, gen_length=1, temperature=temperature, seed=list(range(rows)))
    logits = forward64(model, torch.tensor([[1, 2, 3, MASK]]))["logits"][0, 3]
    logits[MASK] = -torch.inf
    expected = (logits / temperature).softmax(-1)
    observed = run.tokens[:, 3].bincount(minlength=64) / rows
    # Total variation of 1,500 draws from 63 classes is about 0.08; another temperature is 0.2 or more away.
    assert (observed - expected).abs().sum() / 2 < 0.12
    assert (observed - (logits / 1.5).softmax(-1)).abs().sum() / 2 > 0.15


def test_one_seed_serves_every_row_and_a_list_draws_different_texts(model: PreTrainedModel) -> None:
    options: dict[str, Any] = {"gen_length": 8, "temperature": 2.0}
    same = dlm_lens.denoise(model, [[1, 2]] * 3, seed=4, **options).tokens
    assert same[0].equal(same[1])
    different = dlm_lens.denoise(model, [[1, 2]] * 3, seed=[4, 5, 6], **options).tokens
    assert different[0].equal(same[0])
    assert not different[0].equal(different[1])
    assert not different[1].equal(different[2])


def test_without_a_seed_a_fresh_one_is_drawn_and_recorded(model: PreTrainedModel) -> None:
    options: dict[str, Any] = {"gen_length": 8, "temperature": 2.0}
    torch.manual_seed(0)
    first, second = (dlm_lens.denoise(model, [[1, 2]], seed=None, **options) for _ in range(2))
    assert not first.tokens.equal(second.tokens)
    again = dlm_lens.denoise(model, [[1, 2]], seed=list(first.settings["seeds"]), **options)
    assert again.tokens.equal(first.tokens)


def test_holes_are_filled_and_the_rest_is_left_alone(model: PreTrainedModel) -> None:
    ids = torch.tensor([[4, MASK, 6, MASK, 8], [MASK, 1, 2, 3, MASK]])
    run = dlm_lens.denoise(model, ids, gen_length=0)
    assert run.steps == 2
    assert run.counts.tolist() == [[1, 1], [1, 1]]
    assert run.tokens[0, [0, 2, 4]].tolist() == [4, 6, 8]
    assert run.tokens[1, 1:4].tolist() == [1, 2, 3]
    assert run.spans == ((0, 5), (0, 5))
    assert run.masks_left.tolist() == [0, 0]
    assert dlm_lens.denoise(model, ids, gen_length=0, steps=1).counts.tolist() == [[2, 2]]


def test_what_on_canvas_masks_again_is_filled_again(model: PreTrainedModel) -> None:
    seen: list[int] = []

    def remask(step: int, canvas: Tensor) -> Tensor | None:
        seen.append(step)
        if step != 5:
            return None
        canvas = canvas.clone()
        canvas[:, 2:6] = MASK
        return canvas

    run = dlm_lens.denoise(model, [[1, 2]], gen_length=8, steps=8, on_canvas=remask)
    assert seen == list(range(9))
    assert run.masked[5].sum() > 8 - 5
    assert run.masks_left.tolist() == [0]
    assert run.unmasked.sum() == 8 + int(run.masked[5].sum()) - 3
    assert (run.step_of[0, 2:6] >= 5).all()


class Buffer:
    """A callback that rewrites a token of the prompt and returns the same tensor at every step."""

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None

    def __call__(self, step: int, canvas: torch.Tensor) -> torch.Tensor:
        self.kept = canvas.clone() if self.kept is None else self.kept.copy_(canvas)
        self.kept[:, 1] = 10 + step % 5
        return self.kept


@pytest.mark.parametrize("family", ["llada", "mdlm"])
def test_a_callback_may_return_one_tensor_at_every_step(family: str) -> None:
    model = tiny(family)

    def copied(step: int, canvas: torch.Tensor) -> torch.Tensor:
        return Buffer()(step, canvas)

    for seed in range(1, 4):
        run: dict[str, Any] = {"steps": 12 if family == "mdlm" else 6, "gen_length": 6, "seed": seed}
        one, other = (dlm_lens.denoise(model, [5, 6, 7, 8], on_canvas=each, **run) for each in (Buffer(), copied))
        assert one.canvases.equal(other.canvases)
        assert one.canvases[:, 0, 1].tolist() == [10 + step % 5 for step in range(one.steps + 1)]


def test_what_the_last_edit_leaves_is_reported(model: PreTrainedModel) -> None:
    def plant(step: int, canvas: Tensor) -> Tensor:
        canvas[:, -1] = MASK if step == 4 else 9  # in place: the callback has a copy of its own
        return canvas

    run = dlm_lens.denoise(model, [[1, 2]], gen_length=4, on_canvas=plant)
    assert run.masks_left.tolist() == [1]
    assert run.tokens[0, -1] == MASK
    assert (run.canvases[:4, 0, -1] == 9).all()
    assert run.step_of[0, -1] == -1


def test_on_logits_decides_what_is_written(model: PreTrainedModel) -> None:
    shapes = set()

    def spell(step: int, canvas: Tensor, logits: Tensor) -> Tensor:
        shapes.add(tuple(logits.shape))
        forced = torch.full_like(logits, -20.0)
        forced[..., torch.arange(canvas.shape[1]), torch.arange(canvas.shape[1]) + 30] = 20.0
        return forced

    run = dlm_lens.denoise(model, [[1, 2], [3]], gen_length=4, on_logits=spell)
    assert shapes == {(2, 6, 64)}
    assert run.tokens[:, 2:].tolist() == [[32, 33, 34, 35]] * 2
    watched = dlm_lens.denoise(model, [[1, 2], [3]], gen_length=4, on_logits=lambda *_: None)
    assert watched.canvases.equal(dlm_lens.denoise(model, [[1, 2], [3]], gen_length=4).canvases)


def test_callbacks_that_return_nonsense_are_told_so(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"on_canvas returned a tensor of shape \[1\]; .* of shape \[1, 3\]"):
        dlm_lens.denoise(model, [[1, 2]], gen_length=1, on_canvas=lambda *_: torch.ones(1))
    with pytest.raises(ValueError, match="on_logits returned 'x'"):
        dlm_lens.denoise(model, [[1, 2]], gen_length=1, on_logits=lambda *_: "x")  # type: ignore[arg-type]


def test_nan_logits_name_the_step_and_keep_what_was_done(model: PreTrainedModel) -> None:
    def break_it(step: int, canvas: Tensor, logits: Tensor) -> Tensor | None:
        if step < 3:
            return None
        logits = logits.clone()
        logits[0, 4, 7] = torch.nan
        return logits

    clean = dlm_lens.denoise(model, [[1, 2]], gen_length=6, steps=6, remasking="random")
    victim = int(clean.step_of[0, 4])
    with pytest.raises(
        dlm_lens.sampling.NonFiniteLogitsError, match="step 3: the logits of row 0, position 4"
    ) as e:
        dlm_lens.denoise(
            model, [[1, 2]], gen_length=6, steps=6, on_logits=break_it,
            on_canvas=lambda step, canvas: canvas.index_fill(1, torch.tensor([4]), MASK),
        )  # fmt: skip
    assert e.value.partial.steps == 3
    assert e.value.partial.canvases.shape == (4, 1, 8)
    assert victim >= 0


def test_a_model_with_nan_weights_fails_at_step_0(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    with pytest.raises(dlm_lens.sampling.NonFiniteLogitsError, match="step 0"):
        dlm_lens.denoise(model, [[1, 2]], gen_length=2)


def test_defaults_come_from_the_checkpoint_and_fit_what_is_given() -> None:
    model = tiny("sink_qwen", sampler_defaults={"steps": 6, "gen_length": 12, "block_length": 4})
    assert dlm_lens.denoise(model, [[1]]).settings["steps"] == 6
    longer = dlm_lens.denoise(model, [[1]], gen_length=8).settings
    assert (longer["steps"], longer["block_length"]) == (8, 4)
    odd = dlm_lens.denoise(model, [[1]], gen_length=7).settings
    assert (odd["steps"], odd["block_length"]) == (7, 7)
    few = dlm_lens.denoise(model, [[1]], gen_length=12, steps=2).settings
    assert (few["steps"], few["block_length"]) == (2, 12)


def test_the_model_is_left_as_it_was(model: PreTrainedModel) -> None:
    hooks = sum(len(m._forward_hooks) for m in model.modules())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = dlm_lens.denoise(model, [[1, 2]], gen_length=4)
    assert sum(len(m._forward_hooks) for m in model.modules()) == hooks
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert torch.is_grad_enabled()
    assert not run.confidence.requires_grad


def test_progress_is_shown_on_request(model: PreTrainedModel, capsys: pytest.CaptureFixture[str]) -> None:
    dlm_lens.denoise(model, [[1, 2]], gen_length=4)
    assert capsys.readouterr().err == ""
    dlm_lens.denoise(model, [[1, 2]], gen_length=4, progress=True)
    assert "4/4" in capsys.readouterr().err


def test_a_long_canvas_is_warned_of(model: PreTrainedModel) -> None:
    calls = [
        lambda: dlm_lens.denoise(model, [[1] * 126], gen_length=4, steps=1),
        lambda: dlm_lens.compare(model, [[1] * 126], [mask_positions(0)], gen_length=4, steps=1),
        lambda: dlm_lens.log_likelihood(model, [1] * 126, [2] * 4, samples=1),
    ]
    for call in calls:
        with pytest.warns(UserWarning, match="has 130 positions, but the model was trained on 128") as warned:
            call()
        assert {warning.filename for warning in warned} == {__file__}  # whoever called, not the library


@pytest.mark.parametrize("family", ["duo", "udlm", "sumi", "uniform_qwen"])
def test_the_length_that_was_given_is_refused_and_not_the_steps_that_follow_from_it(family: str) -> None:
    with pytest.raises(ValueError, match=r"^gen_length is 0; it must be at least 1"):
        dlm_lens.denoise(tiny(family), [1, 2], gen_length=0)


@pytest.mark.parametrize("family", ["bd3lm", "sdar"])
def test_masks_in_the_prompt_are_no_remedy_where_blocks_need_an_answer(family: str) -> None:
    model = tiny(family)
    for prompt in ([1, 2], [1, model.config.mask_token_id]):
        with pytest.raises(ValueError, match=r"^gen_length is 0; it must be at least 1$"):
            dlm_lens.denoise(model, prompt, gen_length=0)


def test_a_negative_length_beside_masks_is_refused_without_saying_that_there_are_none() -> None:
    model = tiny("llada")
    with pytest.raises(
        ValueError, match=r"^gen_length is -4: nothing to write; .* or 0 for the prompt's mask tokens"
    ):
        dlm_lens.denoise(model, [1, model.config.mask_token_id], gen_length=-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gen_length": 0}, "gen_length is 0 and the prompt holds no mask token"),
        ({"gen_length": -4}, "gen_length is -4"),
        ({"gen_length": 8, "block_length": 3}, "gen_length 8 does not divide into blocks of block_length 3"),
        ({"gen_length": 8, "block_length": 4, "steps": 3}, "3 steps do not divide into 2 blocks"),
        ({"gen_length": 8, "steps": 0}, "steps is 0; it must be at least 1"),
        ({"gen_length": 8, "block_length": 0}, "block_length is 0; it must be at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"cfg_scale": -0.5}, "cfg_scale is -0.5"),
        ({"remasking": "entropy"}, "remasking 'entropy' is none of LLaDA's: low_confidence, random"),
        ({"top_p": 0.9}, "the llada sampler has no setting 'top_p'; it has steps, gen_length"),
        ({"seed": [1, 2]}, "2 seeds for 1 prompts"),
        ({"seed": "7"}, "seed is '7'; give a whole number, or a list"),
        ({"seed": [1.5]}, r"seed is \[1.5\]; give a whole number"),
        ({"steps": "4"}, "steps is '4'; it must be a whole number"),
        ({"gen_length": 8.0}, "gen_length is 8.0; it must be a whole number"),
        ({"block_length": True}, "block_length is True; it must be a whole number"),
        ({"temperature": float("nan")}, "temperature is nan; it must be a finite number"),
        ({"cfg_scale": "1"}, "cfg_scale is '1'; it must be a finite number"),
        ({"alg": "entropy"}, r"no setting 'alg' \(alg is remasking here\); it"),
        ({"max_new_tokens": 8}, r"no setting 'max_new_tokens' \(max_new_tokens is gen_length here\); it"),
        ({"hooks": mask_positions(0)}, r"hooks is mask_positions\(0.*; give a list of hooks"),
        ({"hooks": 3}, "hooks is 3; give a list of hooks"),
        ({"logits": "some"}, "logits is 'some'; it must be 'needed' or 'all'"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_any_work(
    model: PreTrainedModel, options: dict[str, Any], message: str
) -> None:
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=message):
        dlm_lens.denoise(model, [[1, 2]], **options)


@pytest.mark.parametrize(
    ("family", "theirs", "ours"),
    [
        ("bd3lm", "num_steps", "steps_per_block"),  # steps of a block, unlike MDLM's and Duo's
        ("mdlm", "num_steps", "steps"),
        ("duo", "num_steps", "steps"),
        ("wedlm", "max_tokens", "gen_length"),
        ("wedlm", "wedlm_window_size", "window_length"),
        ("wedlm", "wedlm_pos_penalty_factor", "position_penalty"),
        ("sdlm", "n_future_tokens", "window_length"),
        ("i_dlm", "gen_block_size", "stride"),
        ("dreamon", "number_transfer_tokens", "tokens_per_step"),
        ("stable_diffcoder", "eos_id", "stop_tokens"),
    ],
)
def test_a_name_of_the_authors_is_answered_by_that_of_the_setting(family: str, theirs: str, ours: str) -> None:
    with pytest.raises(ValueError, match=rf"no setting '{theirs}' \({theirs} is {ours} here\)"):
        dlm_lens.denoise(tiny(family), [[1, 2]], gen_length=4, **{theirs: 2})


def test_quirks_have_one_stream(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="one random stream for the batch"):
        dlm_lens.denoise(model, [[1], [2]], gen_length=2, seed=[1, 2], reference_quirks=True)


def test_switches_need_an_end_token() -> None:
    model = tiny("llada", eos_token_id=None)
    with pytest.raises(ValueError, match="need an end-of-text token"):
        dlm_lens.denoise(model, [[1]], gen_length=2, logits_eos_inf=True)


def test_a_model_from_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear has no sampler; load the model with dlm_lens.load"):
        dlm_lens.denoise(torch.nn.Linear(2, 2), [[1]])
    host = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    with pytest.raises(ValueError, match="save it with save_pretrained, and load the directory"):
        dlm_lens.denoise(dlm_lens.add_hook_points(host), [[1]])
