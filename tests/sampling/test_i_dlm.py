"""I-DLM's sampler: its distribution, unequal prompts, ends, statistics, hooks, hosts and likelihood."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.sampling.noise import RowNoise
from dlm_lens.sampling.samplers.i_dlm import IDLMPropose, IDLMSettings
from dlm_lens.sampling.settings import SpecialIds
from dlm_lens.testing import tiny
from dlm_lens.training import MaskedDiffusionLoss
from tests.adapters.test_sdlm import visible_to
from tests.reference import forward64
from tests.sampling.block_families import (
    PROMPTS,
    Alone,
    check_ends,
    check_hook,
    check_hosts,
    check_received_attention,
)
from tests.sampling.block_families import sharp as sharper
from tests.sampling.interrupted import resumed_as_unbroken

RUN: dict[str, Any] = {"gen_length": 11, "seed": 1, "stop_tokens": ()}


def sharp() -> Any:
    """A network that keeps some of its drafts."""
    model = sharper("i_dlm")
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    return model


def end_of(run: dl.DenoisingRun, step: int, row: int) -> int:
    length = run.tokens.shape[1]
    first = min(run.masked[step, row].nonzero().flatten().tolist(), default=length)
    return min(first + 2 * run.settings["stride"] - 2, length)


def step64(model: Any, run: dl.DenoisingRun, step: int, row: int, shown: Any = True) -> dict[str, Tensor]:
    """The row alone at a step, up to the last mask that is seen, without padding, in float64."""
    padding = int(run.padding[row])
    ids = run.canvases[step, row : row + 1, padding : end_of(run, step, row)]
    return forward64(model, ids, visible=visible_to([False] * ids.shape[1], 1) & shown)


def alone(model: Any) -> Alone:
    """A row at a step for `block_families`."""

    def found(run: dl.DenoisingRun, step: int, row: int) -> tuple[slice, Tensor, dict[str, Tensor]]:
        inside = slice(int(run.padding[row]), end_of(run, step, row))
        visible = visible_to([False] * (inside.stop - inside.start), 1)
        return inside, visible, step64(model, run, step, row)

    return found


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"temperature": 0.6, "stride": 3}])
def test_steps_are_those_of_a_network_in_float64(options: dict[str, Any]) -> None:
    """Drafts, what is kept of them, and what is decided, row by row; greedy tokens are those of AR decoding."""
    model, given = sharp(), RUN | {"stride": 4, "temperature": 1.0} | options
    run = dl.denoise(model, PROMPTS, **given)
    mask, length, heat = model.config.mask_token_id, run.tokens.shape[1], given["temperature"] or 1.0
    kept, refused, drafts = 0, 0, [dict[int, int]() for _ in PROMPTS]
    for step, row in run.running.nonzero().tolist():
        open_, padding = run.masked[step, row], int(run.padding[row])
        first, held = int(open_.nonzero()[0]), drafts[row]
        canvas = run.canvases[step, row]
        assert {
            place: int(canvas[place]) for place in (open_ & (canvas != mask)).nonzero().flatten().tolist()
        } == held
        stop = min(first + len(held) + (given["stride"] if step else 1), length)
        places = torch.arange(first, stop)
        assert run.confidence[step, row].isfinite().nonzero().flatten().equal(places)
        likely = step64(model, run, step, row)["logits"][0][places - 1 - padding]
        likely[:, mask] = -torch.inf
        likely = (likely / heat).softmax(-1)
        tokens = run.proposals[step, row, places]
        confidence = likely.gather(-1, tokens[:, None]).squeeze(-1)
        torch.testing.assert_close(run.confidence[step, row, places].double(), confidence, atol=1e-5, rtol=1e-4)
        decided = 0
        while decided < len(held) and int(tokens[decided]) == held[first + decided]:
            decided += 1
        kept, refused = kept + decided, refused + (decided < len(held))
        whole = decided == len(held)
        decided += first + decided < length
        assert run.unmasked[step, row].nonzero().flatten().equal(places[:decided])
        if given["temperature"] == 0:
            assert tokens.equal(likely.argmax(-1))
        assert tokens[len(held) + 1 :].equal(likely[len(held) + 1 :].argmax(-1))
        later = zip(places.tolist()[decided:], tokens.tolist()[decided:], strict=True)
        drafts[row] = dict(later) if whole else {}
    assert kept > 2
    assert refused > 2
    assert run.masks_left.tolist() == [0, 0, 0]


def test_greedy_tokens_are_those_of_ar_decoding() -> None:
    model = sharp()
    run = dl.denoise(model, PROMPTS, temperature=0.0, **RUN)
    assert dl.denoise(model, PROMPTS, temperature=0.0, stride=1, **RUN).tokens.equal(run.tokens)
    text = list(PROMPTS[1])
    for _ in range(11):
        ids = torch.tensor([text])
        logits = forward64(model, ids, visible=visible_to([False] * len(text), 1))["logits"]
        logits[..., model.config.mask_token_id] = -torch.inf
        text.append(int(logits[0, -1].argmax()))
    assert run.tokens[1, run.attention_mask[1]].tolist() == text


def test_kept_drafts_and_corrections_have_their_probabilities() -> None:
    """min(1, p / (alpha q)) of a draft, and max(0, p - q) of its correction, over many rows."""
    rows, alpha = 40_000, 0.8
    p, q = torch.tensor([0.1, 0.2, 0.6, 0.1]), torch.tensor([0.5, 0.1, 0.3, 0.1])
    settings = IDLMSettings(gen_length=2, stride=4, verify_alpha=alpha)
    propose = IDLMPropose(settings, RowNoise(tuple(range(rows))), SpecialIds(None), False)
    propose.drafted = torch.ones(rows, 1, dtype=torch.bool)
    propose.before = q.expand(rows, 4)
    canvas = torch.zeros(rows, 1, dtype=torch.long)
    tokens = propose(canvas, p.log().expand(rows, 4), propose.drafted, propose.drafted)[0][:, 0]
    keep = 0.1 / (alpha * 0.5)
    rest = torch.tensor([0.0, 0.1, 0.3, 0.0]) / 0.4
    wanted = torch.tensor([keep, *((1 - keep) * rest[1:]).tolist()])
    # Five standard errors of a share of 40,000 rows.
    torch.testing.assert_close(tokens.bincount(minlength=4) / rows, wanted, atol=0.0125, rtol=0)


@pytest.mark.parametrize(
    ("options", "likely"),
    [
        ({"top_k": 2, "top_p": None}, [0.4, 0.3, 0.0, 0.0]),
        ({"top_k": None, "top_p": 0.6}, [0.4, 0.3, 0.0, 0.0]),
        # Both of the whole distribution: three tokens reach 0.8, of which top k leaves two.
        ({"top_k": 2, "top_p": 0.8}, [0.4, 0.3, 0.0, 0.0]),
        ({"top_k": 3, "top_p": 0.75}, [0.4, 0.3, 0.2, 0.0]),
        ({"top_k": 0, "top_p": 1.0}, [0.4, 0.3, 0.2, 0.1]),
    ],
)
def test_the_next_token_is_drawn_with_both_filters_of_the_whole_distribution(
    options: dict[str, Any], likely: list[float]
) -> None:
    rows = 20_000
    propose = IDLMPropose(
        IDLMSettings(gen_length=2, stride=4, **options), RowNoise(tuple(range(rows))), SpecialIds(None), False
    )
    where = torch.ones(rows, 1, dtype=torch.bool)
    propose.drafted, propose.before = torch.zeros_like(where), torch.zeros(0, 4)
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(rows, 4)
    tokens = propose(torch.zeros(rows, 1, dtype=torch.long), logits, where, where)[0][:, 0]
    wanted = torch.tensor(likely) / sum(likely)
    torch.testing.assert_close(tokens.bincount(minlength=4) / rows, wanted, atol=0.0177, rtol=0)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"stride": 1}, {"stride": 8}, {"verify_alpha": 0.0}]
)
def test_a_row_is_what_it_is_alone(options: dict[str, Any]) -> None:
    model, given = sharp(), RUN | options
    together = dl.denoise(model, PROMPTS, **given)
    assert together.masks_left.tolist() == [0, 0, 0]
    for row, prompt in enumerate(PROMPTS):
        alone, kept = dl.denoise(model, [prompt], **given), together.attention_mask[row]
        assert together.tokens[row, kept].equal(alone.tokens[0])


def test_all_drafts_are_kept_at_alpha_0() -> None:
    run = dl.denoise(sharp(), PROMPTS, verify_alpha=0.0, **RUN)
    assert run.counts.tolist() == [[1] * 3, [1] * 3, [4] * 3, [4] * 3, [1] * 3]


def test_masks_in_a_prompt_are_filled_in() -> None:
    model = sharp()
    mask = model.config.mask_token_id
    run = dl.denoise(model, [[3, mask, mask, 5, 6, mask, 8], [4, 5]], **RUN)
    assert run.masks_left.tolist() == [0, 0]
    assert run.tokens[0, [0, 3, 4, 6]].tolist() == [3, 5, 6, 8]


def test_a_token_planted_over_a_draft_is_verified_like_it() -> None:
    model = sharp()
    plain = dl.denoise(model, PROMPTS[:1], temperature=0.0, **RUN)

    def plant(step: int, canvas: Tensor) -> Tensor:
        return canvas.index_fill(1, torch.tensor([9]), 40) if step == 2 else canvas

    run = dl.denoise(model, PROMPTS[:1], temperature=0.0, on_canvas=plant, **RUN)
    assert bool(plain.masked[2, 0, 9])
    assert int(run.canvases[2, 0, 9]) == 40
    assert run.tokens.equal(plain.tokens)


def test_values_out_of_range_are_refused() -> None:
    model = tiny("i_dlm")
    with pytest.raises(ValueError, match=r"verify_alpha is 1.5; it is from 0 \(keep all drafts\) to 1"):
        dl.denoise(model, "w5", **RUN | {"verify_alpha": 1.5})
    with pytest.raises(ValueError, match="stride"):
        dl.denoise(model, "w5", **RUN | {"stride": 0})
    with pytest.raises(ValueError, match="IDLMModel is not trained here: its loss is that of a window of masks"):
        MaskedDiffusionLoss().for_model(model, 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_token_ends_a_row_once_it_is_verified(temperature: float, tmp_path: Path) -> None:
    model, given = sharp(), RUN | {"temperature": temperature}
    run, stop = check_ends(model, given)
    mask = model.config.mask_token_id
    for row, tokens in enumerate(run.tokens[:, run.prompt_length :]):
        ends = (tokens == stop).nonzero().flatten().tolist()
        if ends:
            assert bool((tokens[ends[0] + 1 :] == mask).all()), row
    resumed_as_unbroken(model, PROMPTS, tmp_path / "rec", passes=4, **given | {"stop_tokens": [stop]})


def test_received_attention_and_its_expectation_count_what_each_query_sees() -> None:
    model = sharp()
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    assert recording.run.canvases.equal(dl.denoise(model, PROMPTS, **RUN).canvases)
    check_received_attention(model, recording, alone(model))


def test_a_hook_acts_as_in_the_row_alone() -> None:
    model = sharp()

    def hidden(run: dl.DenoisingRun, step: int) -> Tensor:
        stop = end_of(run, step, 0)
        logits = step64(model, run, step, 0, torch.arange(stop) != 2)["logits"][0]
        return torch.cat([logits[:1], logits[:-1]])  # the output at i - 1 predicts position i

    check_hook(model, RUN, hidden)


def test_hosts_run_the_same() -> None:
    model = sharp()
    check_hosts(model, sharp(), RUN, alone(model))


def test_likelihoods_are_those_of_the_causal_pass() -> None:
    model, prompt, answer = sharp(), [3, 4, 5, 6], [7, 8, 9, 10, 11, 12]
    ids = torch.tensor([prompt + answer])
    logits = forward64(model, ids, visible=visible_to([False] * 10, 1))["logits"][0].log_softmax(-1)
    wanted = logits[3:9].gather(-1, torch.tensor(answer)[:, None]).squeeze(-1)
    found = dl.log_likelihood(model, prompt, answer)
    assert found.method == "chain_rule"
    assert (-found.losses[0]).tolist() == pytest.approx(wanted.tolist(), rel=1e-4)
    (completion,) = dl.log_likelihood(model, prompt, answer, "greedy_completion").completions
    run = dl.denoise(model, [prompt], **RUN | {"gen_length": 6, "temperature": 0.0})
    assert completion.equal(run.tokens[0, 4:])
    with pytest.raises(ValueError, match="the sampler 'i_dlm' has no mc likelihood; use method='chain_rule'"):
        dl.log_likelihood(model, prompt, answer, "mc")
