"""Likelihoods of block diffusion against float64 passes over the clean prefix and one noisy block, mask by mask."""

from functools import wraps
from itertools import product
from math import comb
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import BlockLayout
from dlm_lens.attention.hook_points import listening
from dlm_lens.hooks import attach_hooks, mask_positions
from dlm_lens.sampling import two_copies
from dlm_lens.sampling.step_attention import StepAttention
from dlm_lens.sampling.two_copies import TwoCopyLogits
from dlm_lens.testing import tiny
from tests.reference import forward64

PROMPT, ANSWER = [3, 14, 15], [26, 5, 35, 8, 9, 7]
BLOCK = 4


def block_model(**config: Any) -> Any:
    return tiny("a2d_qwen3", sampler="dllm_blocks", sampler_defaults={"block_length": BLOCK}, **config)


def logits64(model: Any, ids: list[int], block: int, first: int) -> Tensor:
    """Logits by which each position is predicted, block causal attention, entry by entry."""
    of = [(i - first) // block for i in range(len(ids))]
    visible = torch.tensor([[[[a >= b for b in of] for a in of]]])
    logits = forward64(model, torch.tensor(ids)[None], visible=visible)["logits"][0]
    return torch.cat([logits[:1], logits[:-1]]) if model.config.logit_shift else logits


def losses64(model: Any, masked: list[int], start: int, stop: int, block: int, first: int) -> float:
    """Minus the log-probabilities of the masked positions of a block, given the clean text before it."""
    text = PROMPT + ANSWER
    canvas = [model.config.mask_token_id if i in masked else text[i] for i in range(stop)]
    likely = logits64(model, canvas, block, first).log_softmax(-1)
    return -sum(float(likely[i, text[i]]) for i in masked if start <= i < stop)


def blocks_of(block: int, first: int) -> list[tuple[int, int]]:
    """Where the answer's blocks begin and end; the first one may begin in the prompt."""
    begin = len(PROMPT) - (len(PROMPT) - first) % block
    found = [(start, min(start + block, 9)) for start in range(begin, 9, block)]
    return [(max(start, len(PROMPT)), stop) for start, stop in found]


def bound64(model: Any, block: int, first: int) -> float:
    """The sum over the blocks of their bounds: every number of masks of a block is equally likely."""
    total = 0.0
    for start, stop in blocks_of(block, first):
        size = stop - start
        for mask in product([False, True], repeat=size):
            masked = [start + i for i in range(size) if mask[i]]
            if masked:
                count = len(masked)
                total -= losses64(model, masked, start, stop, block, first) / count / comb(size, count)
    return total


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("block", [1, 4, 6])
def test_masks_of_the_whole_answer_have_the_sum_of_the_blocks_bounds_as_their_mean(block: int, shift: bool) -> None:
    """All 63 masks in one batch of [x_t, x_0], without random numbers."""
    model, n = block_model(logit_shift=shift), len(ANSWER)
    masks = torch.tensor(list(product([False, True], repeat=n)))[1:]
    clean = torch.tensor(PROMPT + ANSWER).expand(len(masks), -1)
    masked = torch.cat([torch.zeros(len(masks), 3, dtype=torch.bool), masks], 1)
    layout = BlockLayout(block, torch.full((len(masks),), 3))
    network = TwoCopyLogits(model, torch.ones_like(masked), clean=clean, layout=layout)
    with torch.no_grad():
        logits = network.at(clean.masked_fill(masked, model.config.mask_token_id), masked)
    likely = torch.zeros(masked.shape, dtype=torch.float64)
    likely[masked] = logits.double().log_softmax(-1).gather(-1, clean[masked][:, None])[:, 0]
    counts = masks.sum(-1)
    each = likely.sum(-1) * n / counts / torch.tensor([comb(n, c) for c in counts.tolist()])
    assert float(each.sum()) / n == pytest.approx(bound64(model, block, 3), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "family", "sampler"),
    [
        ({}, "a2d_qwen3", "dllm_blocks"),
        ({"block_length": 2}, "a2d_qwen3", "dllm_blocks"),
        ({"block_length": 9}, "a2d_qwen3", "dllm_blocks"),
        ({}, "sdar", "sdar"),
        ({}, "sdar", "multi_block"),
        ({}, "dream", "d2f"),
    ],
)
def test_the_estimate_is_unbiased(options: dict[str, Any], family: str, sampler: str) -> None:
    """8,192 samples in groups of 16: 512 independent estimates, an interval of 4 standard errors.

    SDAR's blocks are counted from the text: the first one holds the prompt and the first token of the answer.
    """
    model = tiny(family, sampler=sampler, sampler_defaults={"block_length": BLOCK})
    got = dl.log_likelihood(model, PROMPT, ANSWER, samples=8192, strata=16, seed=5, **options)
    block = options.get("block_length", BLOCK)
    error = float(got.standard_error)
    assert float(got.value) == pytest.approx(bound64(model, block, 0 if family == "sdar" else 3), abs=4 * error)
    assert error < 0.01 * abs(float(got.value))
    assert got.settings["block_length"] == block


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("order", ["left_to_right", "right_to_left"])
def test_the_chain_rule_inside_every_block(order: str, shift: bool) -> None:
    model = block_model(logit_shift=shift)
    got = dl.log_likelihood(model, PROMPT, ANSWER, "chain_rule", order=order)
    for start, stop in blocks_of(BLOCK, 3):
        for i in range(start, stop):
            masked = range(i, stop) if order == "left_to_right" else range(start, i + 1)
            others = losses64(model, list(masked), start, stop, BLOCK, 3)
            text, canvas = PROMPT + ANSWER, (PROMPT + ANSWER)[:stop]
            for j in masked:
                canvas[j] = model.config.mask_token_id
            wanted = -float(logits64(model, canvas, BLOCK, 3).log_softmax(-1)[i, text[i]])
            assert float(got.losses[0][i - 3]) == pytest.approx(wanted, rel=1e-5)
            assert others >= wanted


def test_blocks_of_one_token_are_the_chain_rule() -> None:
    model = block_model()
    chain = dl.log_likelihood(model, PROMPT, ANSWER, "chain_rule", block_length=1)
    assert float(chain) == pytest.approx(bound64(model, 1, 3), rel=1e-5)
    other = dl.log_likelihood(model, PROMPT, ANSWER, "chain_rule", block_length=1, order="right_to_left")
    assert float(other) == pytest.approx(float(chain), rel=1e-6)


@pytest.mark.parametrize("method", ["mc", "chain_rule"])
def test_items_are_what_each_is_alone(method: str) -> None:
    """Answers of one length share their fully masked canvas, but not what later blocks are conditioned on."""
    model = block_model()
    answers = [ANSWER, [26, 5, 35, 9, 9, 7], ANSWER[:5], ANSWER[:2]]
    prompts = [PROMPT, PROMPT, PROMPT, [1, 2, 3, 4, 5]]
    options: dict[str, Any] = {"samples": 16, "seed": 3} if method == "mc" else {}
    together = dl.log_likelihood(model, prompts, answers, method, **options)
    for item in range(4):
        alone = dl.log_likelihood(model, prompts[item], answers[item], method, **options)
        assert float(together.value[item]) == pytest.approx(float(alone.value), rel=1e-5)
    assert len({round(float(value), 3) for value in together.value}) == 4


def test_guidance_hides_the_prompt_in_both_copies() -> None:
    model = block_model()
    got = dl.log_likelihood(model, PROMPT, ANSWER, "chain_rule", cfg_scale=0.5)
    hidden = [model.config.mask_token_id] * 3
    for i in range(6):
        stop = 4 * (i // 4 + 1)
        rest = ANSWER[:i] + [model.config.mask_token_id] * (min(stop, 6) - i)
        c, u = (logits64(model, prompt + rest, BLOCK, 3)[3 + i] for prompt in (PROMPT, hidden))
        wanted = -float((u + 1.5 * (c - u)).log_softmax(-1)[ANSWER[i]])
        assert float(got.losses[0][i]) == pytest.approx(wanted, rel=2e-5)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("family", ["a2d_qwen3", "a2d_qwen3 shifted", "sdar", "bd3lm", "llada2"])
def test_masks_of_one_text_share_its_clean_copy(family: str, guided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, against one pass over both copies of every row, and the passes over canvases that hooks see.

    The rows have two texts and padding.
    """
    if family.startswith("a2d"):
        model = block_model(logit_shift=family.endswith("shifted")).double()
    else:
        model = tiny(family).double()
    made = torch.Generator().manual_seed(2)
    text = torch.randint(3, 40, (2, 9), generator=made)
    clean, content = text[[0, 1, 0, 0, 1]], torch.ones(5, 9, dtype=torch.bool)
    content[[1, 4], :2] = False  # the second text is shorter
    masked = (torch.rand(5, 9, generator=made) < 0.6) & content
    masked[:, :4] = False
    masked[:, 5] = True
    canvas = clean.masked_fill(masked, model.config.mask_token_id)
    prompt = content & (torch.arange(9) < 4)
    guidance = {"cfg_scale": 0.7, "fixed": prompt | ~content, "mask_token_id": model.config.mask_token_id}
    layout = BlockLayout(BLOCK, torch.tensor([3, 4, 3, 3, 4]))
    network = TwoCopyLogits(model, content, clean=clean, layout=layout, **(guidance if guided else {}))
    computed: list[int] = []
    decoder, forward = model.get_decoder(), model.get_decoder().forward

    @wraps(forward)
    def counted(input_ids: Any, **inputs: Any) -> Any:
        computed.append(input_ids.numel())
        return forward(input_ids=input_ids, **inputs)

    decoder.forward = counted
    with torch.no_grad():
        shared = network.at(canvas, masked)
        with listening(model):
            heard = network.at(canvas, masked)
        monkeypatch.setattr(two_copies, "keeps_keys", lambda model: False)
        whole = network.at(canvas, masked)
    halves = 2 if guided else 1
    # The first blocks of the answers end at 7 and 8, the second ones with the text; rows without masks have none.
    second = sum(bool(row[start:].any()) for row, start in zip(masked, [7, 8, 7, 7, 8], strict=True))
    heard_ids = [halves * 5 * 8, halves * second * 9]
    assert computed == [halves * 2 * 9, halves * 5 * 9, *heard_ids, halves * 2 * 5 * 9]
    for found in (shared, heard):
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)  # float64, sums in another order


def test_masks_of_one_text_share_no_clean_copy_beside_sink_tokens() -> None:
    """The embedding puts learned sinks before every sequence, a shared copy's noisy ones too."""
    given: dict[str, Any] = {"samples": 4, "strata": 4, "seed": 3, "block_length": 4}
    model = tiny("sdar", num_sinks=2).double()
    found = [
        dl.log_likelihood(model, [[5, 9, 14]], [[7, 8, 9, 1, 2]], **given, batch_size=size).value
        for size in (None, 1)  # one row has no other to share its copy with
    ]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)  # float64, sums in another order


def test_a_step_over_a_span_sees_content_up_to_the_span_and_no_later() -> None:
    content, masked = torch.tensor([[False, True, True, True, True, True]]), torch.zeros(2, 1, 6, dtype=torch.bool)
    attention = StepAttention(ends_with_span=True)
    first = [False, True, True, False, False, False]
    assert attention.seen_content(content, masked[0], 3).tolist() == [first]
    every = attention.seen_content(content, masked, torch.tensor([3, 5])[:, None, None])
    assert every[:, 0].tolist() == [first, [False, True, True, True, True, False]]


def causal_context(query: int, key: int, start: int) -> bool:
    """Nemotron-Labs-Diffusion's block from `start` on."""
    return key <= query or min(key, query) >= start


def whole_prompt(query: int, key: int, start: int) -> bool:
    """Efficient-DLM's blocks of 4 after a prompt of 3."""
    return key < 3 or (key - 3) // BLOCK <= ((query - 3) // BLOCK if query >= 3 else -1)


def blocks_of_4(query: int, key: int, start: int) -> bool:
    """Blocks of 4 after a prompt of 3, which is cut into blocks too."""
    return (key - 3) // BLOCK <= (query - 3) // BLOCK


@pytest.mark.parametrize("method", ["chain_rule", "mc"])
@pytest.mark.parametrize(
    ("family", "sees"),
    [("shifted", blocks_of_4), ("plain", blocks_of_4), ("nemotron_labs_diffusion", causal_context),
     ("efficient_dlm", whole_prompt), ("nemotron_labs_diffusion efficient_dlm", whole_prompt)],
)  # fmt: skip
def test_a_hook_hides_a_position_as_in_a_run(family: str, sees: Any, method: str) -> None:
    """A position of the prompt, and one of a finished block, against float64 block by block."""
    own = family in ("shifted", "plain")
    name, _, sampler = family.partition(" ")
    model = block_model(logit_shift=family == "shifted") if own else tiny(name, sampler=sampler or None)
    text, mask = PROMPT + ANSWER, model.config.mask_token_id
    for hidden in (1, 4):

        def losses(masked: list[int], start: int, stop: int, hidden: int = hidden) -> list[float]:
            ids = torch.tensor([[mask if i in masked else text[i] for i in range(stop)]])
            visible = torch.tensor(
                [[[[sees(q, k, start) and k != hidden for k in range(stop)] for q in range(stop)]]]
            )
            likely = forward64(model, ids, visible=visible)["logits"][0].log_softmax(-1)
            outputs = [i - (family == "shifted") for i in masked]
            return [-float(likely[output, text[i]]) for output, i in zip(outputs, masked, strict=True)]

        spans = [(3, 7), (7, 9)]
        with attach_hooks(model, mask_positions(hidden)):
            if method == "chain_rule":
                found = dl.log_likelihood(model, PROMPT, ANSWER, "chain_rule", block_length=BLOCK)
                wanted = [
                    losses(list(range(i, stop)), start, stop)[0]
                    for start, stop in spans
                    for i in range(start, stop)
                ]
                assert found.losses[0].tolist() == pytest.approx(wanted, rel=2e-5)
            else:
                # Of an answer of two tokens in one block, whose three masks are all drawn.
                found = dl.log_likelihood(model, PROMPT, ANSWER[:2], samples=4096, strata=16, block_length=BLOCK)
                pair = [sum(losses(masked, 3, 5)) / len(masked) for masked in ([3], [4], [3, 4])]
                bound = -(pair[0] + pair[1] + 2 * pair[2]) / 2
                assert float(found.value) == pytest.approx(bound, abs=4 * float(found.standard_error) + 1e-4)
        plain = dl.log_likelihood(model, PROMPT, ANSWER, "chain_rule", block_length=BLOCK)
        assert method == "mc" or float(plain.value) != pytest.approx(float(found.value), rel=1e-3)


def test_greedy_completion_finishes_a_block_before_the_next() -> None:
    model = block_model()
    mask = model.config.mask_token_id
    canvas = [*PROMPT, *[mask] * 6]
    for start, stop in ((3, 7), (7, 9)):
        for _ in range(stop - start):
            likely = logits64(model, canvas[:stop], BLOCK, 3).softmax(-1)
            likely[:, mask] = 0
            at = max((i for i in range(start, stop) if canvas[i] == mask), key=lambda i: float(likely[i].max()))
            canvas[at] = int(likely[at].argmax())
    got = dl.log_likelihood(model, [PROMPT, [7, 8]], [ANSWER, ANSWER[:3]], "greedy_completion")
    assert got.completions[0].tolist() == canvas[3:]
    right = dl.log_likelihood(model, PROMPT, canvas[3:], "greedy_completion")
    assert bool(right.is_greedy[0])


@pytest.mark.parametrize("family", ["efficient_dlm", "nemotron_labs_diffusion"])
def test_a_run_of_one_token_a_step_is_the_greedy_completion(family: str) -> None:
    """At temperature 0 and within one block, by definition; the sampler says how the prompt attends."""
    model, generator = tiny(family, sampler="efficient_dlm"), torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 60, (8, 8), generator=generator).tolist()
    one = {"gen_length": 8, "block_length": 8, "parallel": False, "temperature": 0.0, "stop_tokens": []}
    run = dl.denoise(model, prompts, **one)
    found = dl.log_likelihood(model, prompts, run.tokens[:, 8:].tolist(), "greedy_completion", block_length=8)
    assert found.is_greedy.tolist() == [True] * 8


def test_a_block_length_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="block_length is 0; it must be a whole number of at least 1"):
        dl.log_likelihood(block_model(), PROMPT, ANSWER, block_length=0)
    with pytest.raises(ValueError, match="has no setting 'block_length'"):
        dl.log_likelihood(tiny("llada"), PROMPT, ANSWER, block_length=4)
