"""Fast-dLLM v2: caches, batches, recordings, hooks and hosts, against float64 networks that restate them."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import mask_positions, mask_top_sinks
from dlm_lens.testing import tiny
from tests.reference import attention64, forward64, normed, rotated
from tests.sampling import test_likelihood_blocks as blocks
from tests.sampling.interrupted import resumed_recording

BLOCK, SUB = 8, 4
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [12, 13, 14], list(range(20, 28)), [30]]
RUN: dict[str, Any] = {"gen_length": 21, "sub_block_length": SUB, "threshold": 0.3, "seed": 1, "temperature": 0.7}
MASK, EOS = 63, 62


def model_of(**config: Any) -> Any:
    """Without an end of the text, unless a test gives one: random models write it at once."""
    return tiny("fast_dllm_v2", **{"bd_size": BLOCK, "eos_token_id": None, **config})


class Network64:
    """A network in float64 whose keys and values stay where they were computed last."""

    def __init__(self, model: Any, positions: int) -> None:
        self.config = config = model.config
        self.weights = {name: value.double() for name, value in model.state_dict().items()}
        width = config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, 1, positions, config.num_key_value_heads, width)
        self.kept = torch.zeros(shape).double()

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0)

    def __call__(self, canvas: list[int], start: int, stop: int, seen: int, window: int = 1000) -> Tensor:
        """Logits of the positions start, ..., stop - 1, which see the keys before `seen`; theirs are replaced.

        A query does not see the keys after the next multiple of `window`.
        """
        eps, theta = self.config.rms_norm_eps, self.config.rope_parameters["rope_theta"]
        places = torch.arange(start, stop)[None]
        visible = (torch.arange(seen)[None, :] // window <= places[0][:, None] // window)[None, None]
        hidden = self.weights["model.embed_tokens.weight"][torch.tensor(canvas[start:stop])][None]
        for layer, (keys, values) in enumerate(self.kept):
            prefix = f"model.layers.{layer}."
            x = normed(hidden, self.weights[f"{prefix}input_layernorm.weight"], eps)
            q, k, v = (
                self.linear(f"{prefix}self_attn.{name}_proj", x).reshape(1, stop - start, -1, keys.shape[-1])
                for name in "qkv"
            )
            keys[:, start:stop], values[:, start:stop] = rotated(k, places, theta), v
            z = attention64(
                rotated(q, places, theta), keys[:, :seen], values[:, :seen], visible, lambda _name, same: same
            )
            hidden = hidden + self.linear(f"{prefix}self_attn.o_proj", z.flatten(2))
            x = normed(hidden, self.weights[f"{prefix}post_attention_layernorm.weight"], eps)
            gate = self.linear(f"{prefix}mlp.gate_proj", x)
            inner = gate * torch.sigmoid(gate) * self.linear(f"{prefix}mlp.up_proj", x)
            hidden = hidden + self.linear(f"{prefix}mlp.down_proj", inner)
        return self.linear("lm_head", normed(hidden, self.weights["model.norm.weight"], eps))[0]


def restated(
    model: Any,
    prompt: list[int],
    gen_length: int,
    threshold: float,
    block_cache: bool,
    *,
    block: int = BLOCK,
    window: int = 1000,
    unshifted: int | None = None,
) -> list[list[int]]:
    """The canvases after every step at temperature 0, one row without padding, place by place."""
    canvas, found = [*prompt, *[MASK] * gen_length], list[list[int]]()
    network = Network64(model, len(canvas))

    def choice(logits: Tensor) -> tuple[int, float]:
        token = int(torch.cat([logits[:MASK], logits[MASK + 1 :]]).argmax())
        token += token >= MASK
        return token, float(logits.softmax(-1)[token])

    def ended() -> bool:
        answer = canvas[len(prompt) :]
        clear = answer[: answer.index(MASK)] if MASK in answer else answer
        return model.config.eos_token_id in clear

    last = torch.empty(0)
    for start in range(0, len(canvas), block):
        stop, taken = min(start + block, len(canvas)), False
        if start and start != unshifted and canvas[start] == MASK:
            canvas[start] = choice(last)[0]
            found.append([*canvas])
        while MASK in canvas[start:stop] and not ended():
            low = start + (canvas.index(MASK) - start) // SUB * SUB
            high = min(low + SUB, stop)
            whole = not block_cache or not taken or canvas[low] == MASK
            taken = True
            first, after = (start, stop) if whole else (low, high)
            logits = network(canvas, first, after, stop, window if whole else 1000)
            places = [place for place in range(low, high) if canvas[place] == MASK]
            chosen = {place: choice(logits[max(place - 1, first) - first]) for place in places}
            most = max(likely for _, likely in chosen.values())
            best = next(place for place, (_, likely) in chosen.items() if likely == most)
            for place, (token, likely) in chosen.items():
                if likely > threshold or place == best:
                    canvas[place] = token
            found.append([*canvas])
        if ended():
            break
        last = network(canvas, start, stop, stop)[-1]
    return found


@pytest.mark.parametrize("block_cache", [False, True])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("threshold", [1.0, 0.25])
def test_runs_are_those_of_a_float64_restatement(prompt: list[int], threshold: float, block_cache: bool) -> None:
    model = model_of()
    settings = {"gen_length": 21, "sub_block_length": SUB, "threshold": threshold}
    run = dl.denoise(model, [prompt], use_block_cache=block_cache, **settings)
    expected = restated(model, prompt, 21, threshold, block_cache)
    assert run.canvases[1:, 0].tolist() == expected
    if threshold == 1:
        assert run.steps == 21
    if block_cache:
        exact = restated(model, prompt, 21, threshold, False)
        confidence = dl.denoise(model, [prompt], **settings).confidence
        assert exact != expected or not confidence.equal(run.confidence)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"sub_block_length": 8}, {"threshold": 1.0}])
def test_the_cache_changes_nothing(options: dict[str, Any]) -> None:
    model = model_of()
    cached = dl.denoise(model, PROMPTS, **RUN | options)
    whole = dl.denoise(model, PROMPTS, use_cache=False, **RUN | options)
    assert cached.canvases.equal(whole.canvases)
    finite = whole.confidence.isfinite()
    assert finite.equal(cached.confidence.isfinite())
    torch.testing.assert_close(cached.confidence[finite], whole.confidence[finite], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"use_block_cache": True}, {"threshold": 1.0}])
@pytest.mark.parametrize("ends", [None, [3, 5, 9, 17, 40]])
def test_a_row_is_what_it_is_alone(options: dict[str, Any], ends: Any) -> None:
    model = model_of(eos_token_id=ends)
    together = dl.denoise(model, PROMPTS, **RUN | options)
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], **RUN | options)
        ours, theirs = together.tokens[row, int(together.padding[row]) :], alone.tokens[0]
        length = min(len(ours), len(theirs))
        assert ours[:length].equal(theirs[:length])
        assert (ours[length:] == MASK).all()
        assert (theirs[length:] == MASK).all()
        # A step of a row that writes is a step of the row alone, in the same order.
        writes = together.unmasked[:, row].any(-1)
        for mine, step in zip(together.proposals[writes, row], range(alone.steps), strict=True):
            placed = alone.unmasked[step, 0]
            assert mine[int(together.padding[row]) :][: len(placed)][placed].equal(alone.proposals[step, 0][placed])


def test_every_answer_has_its_length() -> None:
    model = model_of()
    for length in (1, 2, 7, 8, 9, 20):
        run = dl.denoise(model, PROMPTS, **RUN | {"gen_length": length})
        assert run.tokens.shape[1] == run.prompt_length + length
        assert not (run.tokens == MASK).any()
        assert run.counts.sum(0).tolist() == [length] * len(PROMPTS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mask_is_never_proposed(temperature: float) -> None:
    model = model_of()
    model.lm_head.weight.data[MASK] = 100 * model.lm_head.weight.data[7]
    settings = RUN | {"temperature": temperature, "top_p": 1.0}
    assert not (dl.denoise(model, PROMPTS, **settings).tokens == MASK).any()
    # With the original's rule the planted row is proposed.
    assert (dl.denoise(model, PROMPTS[:1], reference_quirks=True, **settings).proposals == MASK).any()


def test_a_prompt_of_one_block_is_seen() -> None:
    model = model_of()
    both = (PROMPTS[2], PROMPTS[2][::-1])
    first, other = (dl.denoise(model, [ids], **RUN | {"temperature": 0.0}) for ids in both)
    assert not first.tokens[0, BLOCK:].equal(other.tokens[0, BLOCK:])
    quirky = [
        dl.denoise(model, [ids], reference_quirks=True, **RUN | {"temperature": 0.0, "threshold": 0.0})
        for ids in both
    ]
    assert quirky[0].tokens[0, BLOCK:].equal(quirky[1].tokens[0, BLOCK:])


def test_the_first_token_of_a_block_is_sampled_too() -> None:
    """Its distribution is that of the last output of the block before, within the nucleus."""
    model, prompt = model_of(), PROMPTS[2]
    visible = torch.ones(1, 1, BLOCK, BLOCK, dtype=torch.bool)
    likely = (forward64(model, torch.tensor([prompt]), visible=visible)["logits"][0, -1] / 2.0).softmax(-1)
    likely[MASK] = 0
    run = dl.denoise(model, [prompt] * 4000, gen_length=1, temperature=2.0, top_p=1.0, seed=list(range(4000)))
    found = torch.bincount(run.tokens[:, -1], minlength=64) / 4000
    # Standard errors of a frequency are at most 0.008.
    assert (found - likely / likely.sum()).abs().max() < 0.03
    assert (found > 0).sum() > 5
    greedy = dl.denoise(
        model, [prompt] * 2, gen_length=8, temperature=0.0, reference_quirks=True, sub_block_length=SUB
    )
    assert greedy.tokens[0].equal(greedy.tokens[1])


def test_rows_of_unequal_prompts_end_for_themselves() -> None:
    model = model_of()
    plain = dl.denoise(model, PROMPTS, **RUN | {"temperature": 0.0})
    stop = int(plain.tokens[0, plain.prompt_length + 3])
    model.config.eos_token_id = stop
    run = dl.denoise(model, PROMPTS, **RUN | {"temperature": 0.0})
    for row in range(4):
        answer = run.tokens[row, run.prompt_length :].tolist()
        before = plain.tokens[row, plain.prompt_length :].tolist()
        until = before.index(stop) + 1 if stop in before else len(answer)
        assert answer[:until] == before[:until]
    assert int(run.masks_left[0]) > 0


def alone64(model: Any, run: dl.DenoisingRun, step: int, row: int, **options: Any) -> dict[str, Tensor]:
    """Everything that a float64 network computes of one row at a step."""
    keep = present(run, step, row)
    of = [place // BLOCK for place in range(int(keep.sum()))]
    visible = torch.tensor([[key <= query for key in of] for query in of])[None, None]
    if "hidden" in options:
        visible[..., options.pop("hidden")] = False
    return forward64(model, run.canvases[step, row][keep][None], visible=visible, **options)


def present(run: dl.DenoisingRun, step: int, row: int) -> Tensor:
    """The row's positions up to the end of its own block."""
    keep, padding = run.attention_mask[row].clone(), int(run.padding[row])
    own = (run.prompt_length - padding) // BLOCK + run.blocks[step]
    keep[padding + (own + 1) * BLOCK :] = False
    return keep


def test_received_attention_and_its_expectation() -> None:
    model = model_of()
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    run, received = recording.run, dl.received_of(recording)
    assert run.canvases.equal(dl.denoise(model, PROMPTS, **RUN).canvases)
    expected, viewers = recording.expected(), recording.viewers()
    for step in range(0, run.steps, 3):
        for row in range(len(PROMPTS)):
            keep = present(run, step, row)
            if not keep[int(run.padding[row]) + (int(keep.sum()) - 1) // BLOCK * BLOCK]:
                continue
            if not run.masked[step:, row].any():  # the row is over
                assert not expected[step, row].any()
                continue
            kept = alone64(model, run, step, row)
            of = torch.arange(int(keep.sum())) // BLOCK
            visible = of[None, :] <= of[:, None]
            even = (visible.double() / visible.sum(-1, keepdim=True)).sum(0)
            torch.testing.assert_close(expected[step, row][keep].double(), even, atol=1e-5, rtol=1e-5)
            assert viewers[step, row][keep].tolist() == visible.sum(0).tolist()
            for layer in range(2):
                sums = received.column_sums[step, row, layer][:, keep].double()
                torch.testing.assert_close(sums, kept[f"pattern{layer}"][0].sum(-2), atol=2e-5, rtol=2e-4)
    again = dl.received_over_steps(model, run, min_viewers=1)
    torch.testing.assert_close(again.values, received.values, equal_nan=True)
    assert dl.find_sinks(recording, "top-k:1").is_sink.any()


def test_a_recorded_forward_pass_has_the_blocks_of_the_network() -> None:
    model = model_of()
    ids = torch.arange(1, 39).view(2, 19)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with dl.record_forward(model, [dl.ReceivedAttention(min_viewers=1)]) as recorded, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    received, expected, viewers = dl.received_of(recorded.recording), recorded.expected(), recorded.viewers()
    for row, padding in enumerate((0, 5)):
        of = torch.arange(19 - padding) // BLOCK
        visible = of[None, :] <= of[:, None]
        kept = forward64(model, ids[row : row + 1, padding:], visible=visible[None, None])
        even = (visible.double() / visible.sum(-1, keepdim=True)).sum(0)
        torch.testing.assert_close(expected[0, row, padding:].double(), even, atol=1e-5, rtol=1e-5)
        assert viewers[0, row, padding:].tolist() == visible.sum(0).tolist()
        for layer in range(2):
            sums = received.column_sums[0, row, layer][:, padding:].double()
            torch.testing.assert_close(sums, kept[f"pattern{layer}"][0].sum(-2), atol=2e-5, rtol=2e-4)


def test_a_hidden_column_is_hidden_in_every_block() -> None:
    model = model_of()
    seen: list[Tensor] = []
    run = dl.denoise(
        model, PROMPTS[:1], hooks=[mask_positions(2)],
        on_logits=lambda step, canvas, logits: seen.append(logits.clone()), **RUN,
    )  # fmt: skip
    for step in range(run.steps):
        logits = alone64(model, run, step, 0, hidden=2)["logits"][0]
        shifted = torch.cat([logits[:1], logits[:-1]])
        torch.testing.assert_close(seen[step][0, : len(logits)].double(), shifted, atol=2e-5, rtol=2e-4)
    assert not run.tokens.equal(dl.denoise(model, PROMPTS[:1], **RUN).tokens)


def test_hosts_run_the_same() -> None:
    model = model_of()
    plain = dl.denoise(model, PROMPTS, **RUN)
    hooked = dl.denoise(model, PROMPTS, hooks=[mask_top_sinks(1)], **RUN)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **RUN) as tracer:
        shapes = [].save()
        for _ in tracer.steps[:]:
            shapes.append(tuple(lm.layers[0].attn.pattern.shape))
        traced = tracer.result.save()
    assert traced.canvases.equal(plain.canvases)
    assert [shape[-1] for shape in shapes] == [span[1] for span in plain.spans]
    tl = dl.bridge(model_of())
    assert tl.denoise(PROMPTS, **RUN).canvases.equal(plain.canvases)
    assert tl.denoise(PROMPTS, hooks=[mask_top_sinks(1)], **RUN).canvases.equal(hooked.canvases)


def test_the_lens_at_the_last_layer_is_what_the_run_proposed() -> None:
    model = model_of()
    run = dl.denoise(model, PROMPTS, **RUN | {"temperature": 0.0})
    lens, compared = dl.probes.logit_lens(model, run, top=2), 0
    for entry in range(len(lens.step)):
        step, row, place = (int(axis[entry]) for axis in (lens.step, lens.batch, lens.predicts))
        if bool(lens.predicted[entry]) and bool(run.unmasked[step, row, place]):
            best = [token for token in lens.top_tokens[entry, -1].tolist() if token != MASK]
            assert best[0] == int(run.tokens[row, place])
            compared += 1
    assert compared == 21 * len(PROMPTS)


def test_a_recording_is_stored_and_resumed(tmp_path: Path) -> None:
    model, reducers = model_of(), [dl.ReceivedAttention(min_viewers=1), dl.ValueNorm()]
    whole = dl.record(model, PROMPTS, reducers, **RUN)
    resumed = resumed_recording(model, tmp_path / "rec", 9, PROMPTS, reducers, **RUN)
    stored = dl.Recording.load(tmp_path / "rec")
    for other in (resumed, stored):
        assert other.run.canvases.equal(whole.run.canvases)
        torch.testing.assert_close(
            dl.received_of(other).values, dl.received_of(whole).values, rtol=0, atol=0, equal_nan=True
        )


def test_the_chain_rule_sees_the_blocks() -> None:
    model, prompt, answer = model_of(), PROMPTS[0], [40, 41, 42, 43, 44, 45, 46]
    found = dl.log_likelihood(model, prompt, answer, "chain_rule")
    losses = []
    for place in range(len(answer)):
        ids = [*prompt, *answer[:place], *[MASK] * (len(answer) - place)]
        of = torch.arange(len(ids)) // BLOCK
        visible = (of[None, :] <= of[:, None])[None, None]
        logits = forward64(model, torch.tensor([ids]), visible=visible)["logits"][0]
        losses.append(-float(logits[len(prompt) + place - 1].log_softmax(-1)[answer[place]]))
    assert found.losses[0].tolist() == pytest.approx(losses, rel=1e-4)


def test_the_monte_carlo_likelihood_is_that_of_enumerated_masks() -> None:
    """Blocks of 4 from the text's first token: the prompt of three shares its block with the answer."""
    model = model_of(bd_size=4)
    got = dl.log_likelihood(model, blocks.PROMPT, blocks.ANSWER, samples=8192, strata=16, seed=5)
    error = float(got.standard_error)
    assert float(got.value) == pytest.approx(blocks.bound64(model, 4, 0), abs=4 * error)
    assert error < 0.01 * abs(float(got.value))


@pytest.mark.parametrize("options", [{}, {"use_block_cache": True}])
def test_the_steps_of_the_original_have_blocks_of_32(options: dict[str, Any]) -> None:
    """A block from 24 to 35, whose queries before 32 do not see the keys from there on."""
    model, prompt = model_of(bd_size=12), list(range(1, 27))
    settings = {"gen_length": 12, "sub_block_length": SUB, "threshold": 1.0, "reference_quirks": True}
    run = dl.denoise(model, [prompt], **settings, **options)
    assert run.tokens.shape[1] == 37
    found = run.canvases[1:, 0].tolist()
    assert found == restated(model, prompt, 11, 1.0, bool(options), block=12, window=32)
    assert found != restated(model, prompt, 11, 1.0, bool(options), block=12)
    if not options:
        assert run.canvases.equal(dl.denoise(model, [prompt], use_cache=False, **settings).canvases)


def test_the_original_draws_for_every_position_of_the_sub_block() -> None:
    """Its stream has a draw for each of them, masked or not, and none for the first token of a block."""
    seen = list[Tensor]()
    found = dl.denoise(
        tiny("fast_dllm_v2", bd_size=8), [[5, 9, 14, 3, 7]], gen_length=24, sub_block_length=4, threshold=0.1,
        temperature=1.5, top_p=1.0, seed=3, reference_quirks=True,
        on_logits=lambda _step, _canvas, logits: seen.append(logits.clone()),
    )  # fmt: skip
    generator, drawn = torch.Generator().manual_seed(3), 0
    for step, logits in enumerate(seen):
        eligible = found.confidence[step, 0].isfinite()
        first = int(eligible.int().argmax())
        if first % 8 == 0 and int(eligible.sum()) == 1:
            continue  # the block before predicts it
        span = slice(first - first % 4, first - first % 4 + 4)
        likely = (logits[0, span].float() / 1.5).softmax(-1).nan_to_num(1.0)
        tokens = torch.multinomial(likely, 1, generator=generator).squeeze(-1)
        kept = eligible[span]
        assert found.proposals[step, 0, span][kept].equal(tokens[kept]), step
        drawn += 1
    assert 4 < drawn < found.steps


def test_the_batch_of_the_original_drops_a_first_token() -> None:
    """Of a prompt of whole blocks that is neither the shortest nor the longest, as its `batch_sample` does."""
    model = model_of()
    prompts = [PROMPTS[1], [*PROMPTS[2], *PROMPTS[2]], [*PROMPTS[0], *range(40, 50)]]
    settings = {"gen_length": 8, "sub_block_length": SUB, "threshold": 1.0, "reference_quirks": True}
    run = dl.denoise(model, prompts, **settings)
    total = (21 // BLOCK + 1) * BLOCK + 1
    for row, prompt in enumerate(prompts):
        unshifted = len(prompt) if row == 1 else None
        expected = restated(model, prompt, total - len(prompt), 1.0, False, unshifted=unshifted)[-1]
        assert run.tokens[row, int(run.padding[row]) :][:total].tolist() == expected
    shifted = restated(model, prompts[1], total - 16, 1.0, False)[-1]
    assert run.tokens[1, int(run.padding[1]) :][:total].tolist() != shifted


def test_what_cannot_be() -> None:
    model = model_of()
    for given, why in {
        ("gen_length", 0): "gen_length is 0",
        ("sub_block_length", 3): "sub-blocks of 3 do not fill a block of 8",
        ("threshold", 1.5): "threshold is 1.5",
        ("top_p", 0.0): "top_p is 0.0",
        ("temperature", -1.0): "temperature is -1.0",
        ("steps", 4): "has no setting 'steps'",
        ("block_size", 8): r"block_size is block_length here",
        ("small_block_size", 4): r"small_block_size is sub_block_length here",
        ("max_new_tokens", 4): r"max_new_tokens is gen_length here",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=why):
            dl.denoise(model, PROMPTS, **RUN | {given[0]: given[1]})
    with pytest.raises(ValueError, match="use_cache=True with hooks or a recorder"):
        dl.denoise(model, PROMPTS, hooks=[mask_top_sinks(1)], use_cache=True, **RUN)
    with pytest.raises(ValueError, match="leave use_block_cache out"):
        dl.denoise(model, PROMPTS, hooks=[mask_top_sinks(1)], use_block_cache=True, **RUN)
    with pytest.raises(ValueError, match="leave it out with on_logits"):
        dl.denoise(model, PROMPTS, logits="all", use_block_cache=True, **RUN)
    with pytest.raises(ValueError, match="give one prompt"):
        dl.denoise(model, PROMPTS, reference_quirks=True, **RUN)
    with pytest.raises(ValueError, match="give one prompt"):
        dl.denoise(model, PROMPTS, reference_quirks=True, use_block_cache=True, **RUN | {"temperature": 0.0})


def test_blocks_of_one_are_refused_with_quirks_before_a_pass() -> None:
    """The original writes two tokens a round there."""
    given: dict[str, Any] = {"gen_length": 3, "block_length": 1, "sub_block_length": 1, "threshold": 1.0}
    model, passes = tiny("fast_dllm_v2", bd_size=1), list[int]()
    with pytest.raises(ValueError, match=r"block_length 1: .* give a block_length of at least 2, or leave"):
        dl.denoise(
            model, [[3, 9, 14]], **given, reference_quirks=True,
            on_canvas=lambda step, canvas: passes.append(step),
        )  # fmt: skip
    assert not passes
    assert dl.denoise(model, [[3, 9, 14]], **given).counts[:, 0].tolist() == [1] * 3


def test_other_blocks_than_the_trained_ones_warn() -> None:
    model = model_of()
    with pytest.warns(UserWarning, match="block_length is 4, but the model was trained with blocks of 8"):
        run = dl.denoise(model, [[1, 2, 3]], gen_length=4, block_length=4)
    assert run.settings["sub_block_length"] == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dl.denoise(model, [[1, 2, 3]], gen_length=4)


def test_a_run_as_the_original_is_replayed() -> None:
    model = tiny("fast_dllm_v2")
    run = dl.denoise(
        model, [[5, 9, 14] * 11, [7, 3, 2, 8, 9]], gen_length=64, temperature=0.0, reference_quirks=True
    )
    change = dl.replay(model, run, [dl.hooks.at_steps(dl.hooks.mask_tokens("prompt"), [1])]).kl.nan_to_num()
    assert [float(kl) > 0 for kl in change.flatten(1).amax(1)] == [step == 1 for step in range(run.steps)]
