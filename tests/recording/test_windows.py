"""Statistics of layers that attend in sliding windows, against loops over patterns of rows without padding."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import DogeConfig, DogeForCausalLM, Qwen3NextConfig

import dlm_lens
from dlm_lens.adapters.model_preparation import finish_model
from dlm_lens.adapters.registry import family_of
from dlm_lens.attention import (
    ColumnStats,
    add_hook_points,
    attach_hooks,
    attending_layers,
    expected_received,
    hide_columns,
    hooked_attentions,
    layer_windows,
    viewers,
    visible_keys,
)
from dlm_lens.files.sealed_json import CHECKSUM, sealed
from dlm_lens.hooks import mask_positions, mask_top_sinks
from dlm_lens.recording import (
    AttentionEntropy,
    ReceivedAttention,
    Recorder,
    Recording,
    TopKeys,
    record,
    record_forward,
)
from dlm_lens.recording.canvas_facts import CanvasFacts
from dlm_lens.recording.concatenation import joined
from dlm_lens.sampling import denoise
from dlm_lens.sinks import AboveMean, find_sinks, received_of, received_over_steps, trajectories
from dlm_lens.testing import tiny
from dlm_lens.viz.attention_snapshot import snapshot
from tests.attention.test_hook_points import build, plain

PROMPTS = [[5, 9, 11, 3, 17, 20, 8, 30, 31], [6, 12, 40]]
RUN: dict[str, Any] = {"gen_length": 6, "temperature": 1.0, "seed": [3, 4]}
WINDOWS: dict[str, tuple[dict[str, Any], tuple[int | None, ...]]] = {
    "mistral": ({"sliding_window": 5}, (5, 5, 5)),
    "gemma2": ({"sliding_window": 5}, (5, None, 5)),
    "gemma3_text": ({"sliding_window": 5, "sliding_window_pattern": 3}, (5, 5, None)),
    "gpt_oss": ({"sliding_window": 5}, (5, None, 5)),
    "qwen2": ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, (None, 4, 4)),
}
FEWEST = 3


def test_layers_of_recurrent_states_are_none_that_attend() -> None:
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    assert attending_layers(Qwen3NextConfig(num_hidden_layers=4, layer_types=kinds)) == 2
    assert attending_layers(DogeConfig(num_hidden_layers=4)) == 4


def windowed(kind: str) -> Any:
    changes, _ = WINDOWS[kind]
    model = build(kind, **changes, eos_token_id=None)
    plain(model)
    return finish_model(model, family_of(model.config.model_type), None)


def alone(kind: str, run: Any, step: int, row: int) -> tuple[Tensor, list[Tensor]]:
    """Where a row's written content is, and transformers' own patterns of it, without padding."""
    changes, _ = WINDOWS[kind]
    keep = run.attention_mask[row] & ~run.masked[step, row]
    with torch.no_grad():
        found = build(kind, **changes, eos_token_id=None)(
            input_ids=run.canvases[step, row][keep][None], use_cache=False, output_attentions=True
        )
    return keep, [pattern[0].double() for pattern in found.attentions]


def by_hand(pattern: Tensor, window: int | None, queries: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """r_j per head, e_j and how many queries see j, with loops."""
    size = pattern.shape[-1]
    sums = torch.zeros(pattern.shape[0], size, dtype=torch.float64)
    even, seen = torch.zeros(size, dtype=torch.float64), torch.zeros(size)
    for i in range(size):
        keys = [j for j in range(size) if j <= i and (window is None or i - j < window)]
        assert (pattern[:, i] > 0).nonzero()[:, 1].unique().tolist() == keys  # the layer's own mask
        for j in keys:
            if queries[i]:
                sums[:, j] += pattern[:, i, j]
                even[j] += 1 / len(keys)
                seen[j] += 1
    return sums, even, seen


@pytest.mark.parametrize("kind", WINDOWS)
def test_received_attention_equals_loops_over_the_patterns_of_every_row_alone(kind: str) -> None:
    model, windows = windowed(kind), WINDOWS[kind][1]
    recording = record(model, PROMPTS, [ReceivedAttention(("all", "prompt"), min_viewers=FEWEST)], **RUN)
    run = recording.run
    assert (recording.windows, recording.causal) == (windows, True)
    replayed = received_over_steps(model, run, min_viewers=FEWEST)
    assert replayed.expected.shape[2] == (3 if len(set(windows)) > 1 else 1)
    for step in (0, 2, 5):
        for row in (0, 1):
            keep, patterns = alone(kind, run, step, row)
            for layer, pattern in enumerate(patterns):
                for queries in ("all", "prompt"):
                    counts = [queries == "all" or i < len(PROMPTS[row]) for i in range(pattern.shape[-1])]
                    sums, even, seen = by_hand(pattern, windows[layer], counts)
                    wanted = (sums / even).masked_fill(seen < FEWEST, torch.nan)
                    name = "received" if queries == "all" else "received_prompt"
                    # float32 attention over up to 14 keys, weights times 5.
                    close: dict[str, Any] = {"rtol": 2e-4, "atol": 1e-5, "equal_nan": True}
                    scores = getattr(recording, name)[step, row, layer]
                    torch.testing.assert_close(scores[:, keep].double(), wanted, **close)
                    assert scores[:, ~keep].isnan().all()
                    raw = recording.received_sums(queries)[step, row, layer]
                    torch.testing.assert_close(
                        raw[:, keep].double(), sums.masked_fill(seen < FEWEST, torch.nan), **close
                    )
                    e = recording.expected(queries, layer=layer)[step, row]
                    torch.testing.assert_close(e[keep].double(), even, rtol=1e-6, atol=1e-7)
                    assert not e[~keep].any()
                    assert recording.viewers(queries, layer=layer)[step, row, keep].tolist() == seen.tolist()
                    if queries == "all":
                        again = replayed.values[step, row, layer][:, keep].double()
                        torch.testing.assert_close(again, wanted, **close)
                        at = layer if replayed.expected.shape[2] > 1 else 0
                        torch.testing.assert_close(
                            replayed.expected[step, row, at, 0, keep].double(), even, rtol=1e-5, atol=1e-6
                        )
                        assert replayed.viewers is not None
                        assert replayed.viewers[step, row, at, 0, keep].tolist() == seen.tolist()


def _at_peaks(sinks: Any, lives: pd.DataFrame) -> Tensor:
    """The score of every life at the step that its line calls the peak."""
    at = [torch.tensor(lives[name].to_numpy()) for name in ("peak_step", "batch", "canvas_position")]
    parts = [torch.tensor(lives[name].to_numpy()) for name in ("layer", "head") if name in lives]
    return sinks.scores[at[0], at[1], *parts, at[2]]


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gpt_oss"])
def test_sinks_of_a_recording_are_those_of_the_patterns(kind: str) -> None:
    model = windowed(kind)
    recording = record(model, PROMPTS, [ReceivedAttention(min_viewers=FEWEST), AttentionEntropy()], **RUN)
    recorded, replayed = received_of(recording), received_over_steps(model, recording.run, min_viewers=FEWEST)
    torch.testing.assert_close(recorded.values, replayed.values, rtol=1e-4, atol=1e-5, equal_nan=True)
    for name in ("expected", "viewers"):
        torch.testing.assert_close(getattr(recorded, name), getattr(replayed, name), rtol=1e-5, atol=1e-6)
    rule = AboveMean(0.1)
    for level in ("head", "layer", "model"):
        first, second = (find_sinks(each, rule, level=level) for each in (recorded, replayed))
        lives = [trajectories(each, rule, level=level).table() for each in (recording, replayed)]
        assert len(lives[0])
        pd.testing.assert_frame_equal(*(life.drop(columns="peak_step") for life in lives))
        # A window that no written token has entered has the same score at every step: its peak is then a tie.
        later = [_at_peaks(second, life) for life in lives]
        torch.testing.assert_close(*later, rtol=1e-5, atol=1e-6)
        assert first.is_sink.any()
        assert torch.equal(first.is_sink, second.is_sink)
    # With gpt-oss a part of every row goes to the spare entry; of the others all attention goes to keys.
    shares = recorded.on_scale("column sum").values.nansum(-1)
    assert (shares <= recorded.counted[..., None, None] * (1 + 1e-5)).all()
    # Even attention gives away all of every counted query in each layer.
    total = recording.expected_by_layer().sum(-1)
    torch.testing.assert_close(total, recording.counted()[..., None].float().expand_as(total))


def test_expected_asks_for_a_layer_where_layers_differ() -> None:
    model = windowed("gemma2")
    recording = record(model, PROMPTS, [ReceivedAttention(min_viewers=FEWEST)], **RUN)
    for ask in (recording.expected, recording.viewers):
        with pytest.raises(
            ValueError, match=r"different sliding windows \(5, None\).*expected\(queries, layer=0\)"
        ):
            ask()
    with pytest.raises(ValueError, match="layer 3 was not recorded; there are 0, 1, 2"):
        recording.expected(layer=3)
    windows = recording.select(layer=[0, 2])
    assert windows.windows == (5, 5)
    assert torch.equal(windows.expected(), recording.expected(layer=2))
    full = recording.select(layer=1)
    assert full.windows == ()
    assert torch.equal(full.expected(), recording.expected(layer=1))
    assert not torch.equal(full.expected(), windows.expected())
    assert torch.equal(recording.counted(), full.counted())
    part, whole = recording.select(layer=[1, 2]).received_sums(), recording.received_sums()[:, :, 1:]
    assert torch.equal(part.nan_to_num(-1), whole.nan_to_num(-1))


def test_files_keep_the_windows(tmp_path: Path) -> None:
    model = windowed("gemma2")
    reducers = [ReceivedAttention(min_viewers=FEWEST), TopKeys(2, min_viewers=FEWEST)]
    first = record(model, PROMPTS, reducers, to=tmp_path / "first", **RUN)
    first.save(tmp_path / "second")
    for name in ("first", "second"):
        loaded = Recording.load(tmp_path / name)
        assert loaded.windows == (5, None, 5)
        for layer in range(3):
            assert torch.equal(loaded.expected(layer=layer), first.expected(layer=layer))
        assert torch.equal(loaded.received_sums().nan_to_num(), first.received_sums().nan_to_num())
    other = record(windowed("mistral"), PROMPTS, reducers, **RUN)
    with pytest.raises(ValueError, match=r"differ in .*windows: \(5, None, 5\) and \(5, 5, 5\)"):
        joined([first, replace(other, model=first.model)])
    both = joined([first, record(model, [[7, 8, 9, 10]], reducers, **{**RUN, "seed": 9})])
    assert both.windows == (5, None, 5)
    assert torch.equal(both.expected(layer=0)[:, :2], first.expected(layer=0))


def test_a_directory_refuses_the_same_weights_with_other_windows(tmp_path: Path) -> None:
    def model(window: int) -> Any:
        return tiny(
            "causal", model_type="qwen2", use_sliding_window=True, sliding_window=window, max_window_layers=1
        )

    first = record(model(4), PROMPTS, [ReceivedAttention()], to=tmp_path, **RUN)
    again = record(model(4), PROMPTS, [ReceivedAttention()], to=tmp_path, **RUN)
    assert first.windows == again.windows == (None, 4)
    with pytest.raises(ValueError, match="model"):
        record(model(6), PROMPTS, [ReceivedAttention()], to=tmp_path, **RUN)


def test_a_bridge_records_the_same() -> None:
    model = tiny("causal", model_type="qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    plain_run = record(model, PROMPTS, [ReceivedAttention(min_viewers=2)], **RUN)
    bridge = dlm_lens.bridge(model)
    recorder = dlm_lens.BridgeRecorder(bridge, [ReceivedAttention(min_viewers=2)])
    bridged = recorder.recording(bridge.denoise(PROMPTS, observers=recorder, **RUN))
    assert bridged.windows == plain_run.windows == (None, 4)
    torch.testing.assert_close(bridged.received, plain_run.received, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_files_from_before_windows_load(tmp_path: Path) -> None:
    recording = record(tiny("causal"), PROMPTS, [ReceivedAttention()], **RUN)
    recording.save(tmp_path / "old")
    file = tmp_path / "old" / "run.json"
    facts = json.loads(file.read_text())
    del facts["windows"], facts[CHECKSUM]
    file.write_text(json.dumps(sealed(facts)))
    loaded = Recording.load(tmp_path / "old")
    assert loaded.windows == ()
    assert torch.equal(loaded.expected(), recording.expected())


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "window", "padding"), [(40, 7, 0), (40, 7, 5), (40, 40, 3), (40, 39, 3), (3000, 128, 900)]
)
def test_facts_of_a_window_equal_the_dense_mask_in_float64(size: int, window: int, padding: int) -> None:
    content = torch.arange(size) >= padding
    written = torch.arange(size) < size - size // 4
    block = (torch.arange(size) > size // 3) & (torch.arange(size) < size // 2)
    facts = CanvasFacts(
        content[None],
        ~written[None],
        (torch.arange(size) > size // 2)[None],
        block[None],
        causal=True,
        window=window,
    )
    seen = content & written
    dense = seen & torch.ones(size, size).tril().triu(1 - window).bool()
    for name in ("all", "prompt", "block"):
        counts = facts.queries(name)[0].double()
        even = counts @ (dense.double() / dense.sum(-1, keepdim=True).clamp(min=1))
        torch.testing.assert_close(facts.expected(name)[0].double(), even, rtol=1e-6, atol=1e-12)
        assert torch.equal(facts.viewers(name)[0].double(), counts @ dense.double())
    mask = visible_keys(seen, causal=True, window=window)
    assert torch.equal(mask[0], dense)
    torch.testing.assert_close(expected_received(mask, seen)[0], facts.expected("all")[0], rtol=1e-4, atol=1e-6)
    assert torch.equal(viewers(mask, seen)[0], facts.viewers("all")[0])


@pytest.mark.parametrize(("size", "window", "padding"), [(20, 4, 3), (20, 19, 3), (20, 20, 0), (300, 64, 90)])
def test_facts_of_a_window_to_both_sides_equal_the_dense_mask_in_float64(
    size: int, window: int, padding: int
) -> None:
    where = torch.arange(size)
    content, masked, answer = where >= padding, where % 3 == 1, where > size // 2
    facts = CanvasFacts(content[None], (content & masked)[None], answer[None], answer[None], window=window)
    dense = content & ((where[:, None] - where).abs() <= window)
    for name in ("all", "masked", "prompt", "block"):
        counts = facts.queries(name)[0].double()
        even = counts @ (dense.double() / dense.sum(-1, keepdim=True).clamp(min=1))
        torch.testing.assert_close(facts.expected(name)[0].double(), even, rtol=1e-6, atol=1e-12)
        assert torch.equal(facts.viewers(name)[0].double(), counts @ dense.double())
        for least in (0, 1, 5):  # each of its own, though facts are computed once
            few = (counts @ dense.double() < max(1, least)) | ~content
            assert torch.equal(facts.undefined(name, least)[0], few)
    weights = facts.weights(("prompt", "all"))[0]
    assert torch.equal(weights, torch.stack([content & ~answer, content]).float())
    assert torch.equal(facts.absent_keys[0], ~content)
    assert torch.equal(facts.absent_queries[0], ~content)


KINDS = (
    "mistral", "mixtral", "phi3", "phimoe", "starcoder2", "doge", "gemma2", "gemma3_text", "gpt_oss", "cohere2",
    "olmo3", "exaone4", "qwen2", "qwen2_moe", "qwen3", "llama", "granite",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_windows_of_a_config_are_those_of_the_masks(kind: str) -> None:
    """The masks that transformers hands every layer; Llama and Granite ignore a field of this name."""
    more = {"use_sliding_window": True, "max_window_layers": 1} if kind.startswith("qwen") else {}
    model = build(kind, sliding_window=5, **more)
    plain(model)
    windows = layer_windows(add_hook_points(model))
    assert (set(windows) == {None}) == (kind in ("llama", "granite"))
    seen: dict[int, Tensor] = {}
    for attention in hooked_attentions(model):
        attention.hook_z.readers = (lambda inputs: seen.__setitem__(inputs.layer, inputs.seen()),)
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
    content = torch.arange(12) >= torch.tensor([[0], [4]])
    with torch.no_grad():
        model(input_ids=ids, attention_mask=content.long(), use_cache=False)
    for layer, window in enumerate(windows):
        wanted = visible_keys(content, causal=True, window=window)
        got = seen[layer][:, :1].expand_as(wanted)
        assert torch.equal(got[content[:, None]], wanted[content[:, None]])


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("stage", ["before_softmax", "after"])
def test_columns_as_many_as_a_window_holds_are_hidden_in_stream_as_in_the_pattern(kind: str, stage: Any) -> None:
    """A query whose window is hidden whole keeps itself, in the middle of the canvas too."""
    model = windowed(kind)
    run, prompts = {**RUN, "temperature": 0.0}, [list(range(5, 19)), list(range(40, 54))]
    for hook in (mask_positions(5, 6, 7, 8, 9, stage=stage), mask_top_sinks(6, stage=stage)):
        recorded = []
        for name in ("sdpa", "hooked"):
            if name == "sdpa":
                plain(model)
            else:
                model.set_attn_implementation(name)
            recorded.append(
                record(model, prompts, [ReceivedAttention(min_viewers=1), AttentionEntropy()], hooks=[hook], **run)
            )
        streamed, formed = recorded
        assert torch.equal(streamed.run.tokens, formed.run.tokens)
        for name in ("received", "entropy"):
            torch.testing.assert_close(
                getattr(streamed, name), getattr(formed, name), rtol=1e-3, atol=1e-4, equal_nan=True
            )


def test_a_snapshot_of_a_windowed_layer_has_the_scores_of_the_run() -> None:
    model = windowed("gemma2")
    run = denoise(model, PROMPTS, **RUN)
    received = received_over_steps(model, run, min_viewers=1)
    for layer in (0, 1):
        shot = snapshot(model, run, step=5, layer=layer, row=1)
        shown, at = shot.received(), (5, 1, layer, 0, shot.positions)
        torch.testing.assert_close(shown.expected.flatten(), received.expected[at], rtol=1e-6, atol=1e-7)
        assert received.viewers is not None
        assert torch.equal(shown.mean_attention.isnan(), (received.viewers[at] < 8).expand_as(shown.values))


def test_windows_that_statistics_do_not_know_are_refused() -> None:
    model = add_hook_points(build("llama4_text"))
    with pytest.raises(ValueError, match="has chunked_attention layers; statistics of attention support"):
        Recorder(model, [ReceivedAttention()])
    sink_model = tiny("sink_qwen", use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with pytest.raises(ValueError, match="has sliding_attention layers and is not causal"):
        Recorder(sink_model, [ReceivedAttention()])
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    for kept, positions in ((2048, 2048), (4, 2048)):
        lengths = {"max_position_embeddings": positions, "keep_window_size": kept}
        config = DogeConfig(**sizes, num_attention_heads=4, **lengths)
        chooses = add_hook_points(DogeForCausalLM(config))
        if kept == positions:
            assert layer_windows(chooses) == (None,)
            continue
        with pytest.raises(ValueError, match=r"sees the 4 keys that it chooses \(keep_window_size\)"):
            layer_windows(chooses)
    for window, causal in ((0, True), (3, False)):
        with pytest.raises(ValueError, match="window"):
            visible_keys(torch.ones(4), causal=causal, window=window)


def test_every_query_of_an_encoder_sees_every_key() -> None:
    model = add_hook_points(build("bert"))
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with record_forward(model, [ReceivedAttention(min_viewers=1)]) as recorded:
        model(input_ids=ids)
    recording = recorded.recording
    with torch.no_grad():
        patterns = build("bert")(input_ids=ids, output_attentions=True).attentions
    assert not recording.causal
    assert torch.equal(recording.expected(), torch.ones(1, 1, 6))
    for layer, pattern in enumerate(patterns):
        torch.testing.assert_close(recording.received[0, 0, layer], pattern[0].sum(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gpt_oss"])
def test_statistics_that_hooks_judge_are_those_of_the_patterns(kind: str) -> None:
    """Without a run, as in a forward pass of one's own: in stream, or by the pattern where it has to be formed."""
    model, windows = windowed(kind), WINDOWS[kind][1]
    ids = torch.randint(3, 120, (2, 14), generator=torch.Generator().manual_seed(2))
    content = torch.arange(14) >= torch.tensor([[0], [4]])
    found: dict[tuple[str, int], ColumnStats] = {}

    class Asking:
        """Asks for the statistics and hides nothing."""

        site: Any = "scores"
        stage: Any = "before_softmax"
        name = ""

        def __call__(self, tensor: Tensor, hook: Any = None) -> Tensor:
            return hide_columns(self, tensor, hook)

        def hidden(self, keys: int, columns: Any, hook: Any = None) -> None:
            found[self.name, hook.layer()] = columns()

    asking = Asking()
    for name in ("stream", "pattern"):
        asking.name = name
        if name == "pattern":
            model.set_attn_implementation("eager")
        with attach_hooks(model, asking), torch.no_grad():
            model(input_ids=ids, attention_mask=content.long(), use_cache=False)
    for row in (0, 1):
        keep = content[row]
        changes, _ = WINDOWS[kind]
        with torch.no_grad():
            single = build(kind, **changes, eos_token_id=None)(
                input_ids=ids[row][keep][None], output_attentions=True, use_cache=False
            )
        for layer, pattern in enumerate(single.attentions):
            sums, even, seen = by_hand(pattern[0].double(), windows[layer], [True] * int(keep.sum()))
            for name in ("stream", "pattern"):
                columns = found[name, layer]
                got = columns.sums[row][:, keep].double()
                torch.testing.assert_close(got, sums, rtol=2e-4, atol=1e-5)
                torch.testing.assert_close(columns.expected[row, 0, keep].double(), even, rtol=1e-5, atol=1e-6)
                assert columns.viewers[row, 0, keep].tolist() == seen.tolist()
                assert int(columns.counted[row]) == int(keep.sum())
