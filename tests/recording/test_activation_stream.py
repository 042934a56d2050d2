"""`activations` and `write_activations` against captured activations; an interrupted stream is the unbroken one."""

import pytest
import torch

import dlm_lens as dl
from dlm_lens.files.tensor_files import read_with_metadata
from dlm_lens.hooks import ablate, by_row, capture
from dlm_lens.recording import POSITION_CLASSES, ActivationShards, activations, write_activations
from dlm_lens.recording.activation_stream import ActivationBatch
from dlm_lens.testing import tiny
from tests.recording.test_rows_that_end import ENDS, model_and_settings

PROMPTS = [[5, 9, 11, 3, 17], [4, 8, 2], [7, 7, 1, 2]]
RUN = {"steps": 4, "gen_length": 8, "block_length": 4}


def _all(stream):
    return ActivationBatch.joined(list(stream))


def test_vectors_are_the_captured_ones_with_their_places():
    model = tiny("llada")
    found = _all(activations(model, PROMPTS, -1, batch_size=2, **RUN))
    expected, places = [], []
    for rows in ([0, 1], [2]):
        run = dl.denoise(model, [PROMPTS[row] for row in rows], seed=[0] * len(rows), **RUN)
        stream = capture(model, run, "resid", layers=[1]).stacked("resid", 1)
        for step in range(4):
            for row, prompt in enumerate(rows):
                padding = int((~run.attention_mask[row]).sum())
                for place in run.attention_mask[row].nonzero().flatten().tolist():
                    expected.append(stream[step, row, place])
                    prompt_part = place < run.prompt_length
                    klass = "prompt" if prompt_part else "open" if run.masked[step, row, place] else "decided"
                    places.append((prompt, step, place - padding, POSITION_CLASSES.index(klass)))
    torch.testing.assert_close(found.activations, torch.stack(expected), rtol=1e-5, atol=1e-5)
    columns = (found.prompt, found.step, found.position, found.position_class)
    assert torch.stack(columns, 1).tolist() == [list(place) for place in places]


@pytest.mark.parametrize(("family", "settings"), [("sdlm", {}), ("i_dlm", {}), ("wedlm", {"window_length": 4})])
def test_positions_count_from_the_first_token_where_masks_after_a_window_are_not_seen(family, settings):
    model, given = tiny(family), {"gen_length": 8, **settings}
    found = _all(activations(model, PROMPTS, 1, batch_size=2, **given))
    assert found.position[found.step == 0].min() == 0
    for row, prompt in enumerate(PROMPTS):
        first = found.part((found.prompt == row) & (found.step == 0))
        assert first.position.tolist() == list(range(len(first)))
        assert first.position[first.position_class == POSITION_CLASSES.index("prompt")].tolist() == list(
            range(len(prompt))
        )
        assert int(found.position[found.prompt == row].max()) < len(prompt) + 8


def test_canvas_positions_of_hooks_are_the_same_token_of_every_prompt(tmp_path):
    arguments = (tiny("llada"), PROMPTS, 1)
    given = {"batch_size": 3, "hooks": [ablate("resid", 2)], **RUN}
    for found in (
        _all(activations(*arguments, **given)),
        _all(write_activations(*arguments, tmp_path, **given)),
    ):
        zero = found.activations.eq(0).all(-1)
        assert zero.equal(found.position == 2)
        assert set(found.prompt[zero].tolist()) == {0, 1, 2}


def test_streams_do_not_follow_defaults_of_torch(tmp_path):
    model = tiny("sdar")  # whose rows wait, so that vectors are taken out after a run
    wanted = _all(activations(model, PROMPTS, 1, gen_length=8))
    with torch.inference_mode():
        found = _all(list(activations(model, PROMPTS, 1, gen_length=8)))
        assert found.activations.equal(wanted.activations)
        parts = list(activations(model, PROMPTS, 1, gen_length=8))
    assert not any(part.activations.is_inference() for part in parts)
    with torch.device("meta"):
        parts = list(activations(model, PROMPTS, 1, gen_length=8))
        stored = write_activations(model, PROMPTS, 1, tmp_path, gen_length=8, shard_size=100)
        drawn = torch.cat(list(stored.batches(8, seed=1)), 0)
    assert torch.cat([part.activations for part in parts]).equal(wanted.activations)
    assert drawn.equal(torch.cat(list(stored.batches(8, seed=1)), 0))


def test_classes_and_a_share_of_the_positions():
    model = tiny("llada")
    everything = _all(activations(model, PROMPTS, 1, **RUN))
    found = _all(activations(model, PROMPTS, 1, classes=["open"], **RUN))
    assert found.activations.equal(everything.activations[everything.position_class == 0])
    some = _all(activations(model, PROMPTS, 1, share=0.5, **RUN))
    assert 0.35 < len(some) / len(everything) < 0.65
    # A prompt's share does not depend on its batch.
    alone = _all(activations(model, PROMPTS, 1, share=0.5, batch_size=1, **RUN))

    def places(batch):
        columns = (batch.prompt, batch.step, batch.position)
        return sorted(zip(*(column.tolist() for column in columns), strict=True))

    assert places(some) == places(alone)
    assert places(some) != places(_all(activations(model, PROMPTS, 1, share=0.5, seed=1, **RUN)))


@pytest.mark.parametrize(("family", "end"), ENDS)
def test_a_row_that_is_over_has_no_more_vectors(family, end, tmp_path):
    model, settings, prompts = model_and_settings(family, end)

    def keyed(stream):
        found = _all(stream)
        columns = (found.prompt, found.step, found.position, found.position_class)
        places = zip(*(column.tolist() for column in columns), strict=True)
        return dict(zip(places, found.activations, strict=True))

    for share in (1.0, 0.5):
        one, two = (keyed(activations(model, prompts, 1, share=share, batch_size=b, **settings)) for b in (1, 2))
        assert set(one) == set(two)
        torch.testing.assert_close(
            torch.stack([two[key] for key in one]), torch.stack([*one.values()]), rtol=1e-4, atol=1e-5
        )
    steps = dl.denoise(model, prompts, seed=[0, 0], **settings).row_steps.tolist()
    assert [len({key[1] for key in one if key[0] == row}) for row in (0, 1)] == steps
    assert steps[0] < steps[1]
    shards = write_activations(model, prompts, 1, tmp_path / "two", batch_size=2, shard_size=30, **settings)
    in_memory = _all(activations(model, prompts, 1, batch_size=2, **settings))
    assert all(value.equal(in_memory.tensors()[name]) for name, value in _all(shards).tensors().items())


@pytest.mark.parametrize("shard_size", [1000, 25, pytest.param(14, marks=pytest.mark.long)])
def test_an_interrupted_stream_is_the_unbroken_one_bit_for_bit(tmp_path, monkeypatch, shard_size):
    model = tiny("llada")
    given = {"share": 0.7, "batch_size": 1, "shard_size": shard_size, **RUN}
    whole = write_activations(model, PROMPTS, 1, tmp_path / "whole", **given)
    stream = _all(activations(model, PROMPTS, 1, share=0.7, batch_size=1, **RUN))
    assert _all(whole).activations.equal(stream.activations)
    sizes = [len(shard) for shard in whole]
    assert sizes[:-1] == [shard_size] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= shard_size
    # Killed when some shards are whole; the next begins in the middle of a batch of prompts.
    import dlm_lens.recording.activation_shards as module

    plain = module.write_tensors
    for last in range(0, len(sizes), 1 + len(sizes) // 3):
        path = tmp_path / f"cut-{last}"
        left = [last]

        def interrupted(*args, left=left, **kwargs):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(module, "write_tensors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_activations(model, PROMPTS, 1, path, **given)
        assert not ActivationShards(path).finished
        monkeypatch.setattr(module, "write_tensors", plain)
        again = write_activations(model, PROMPTS, 1, path, **given)
        # Not the files' bytes: safetensors writes metadata in no fixed order.
        for one, two in zip(again.files, whole.files, strict=True):
            (tensors, facts), (expected, wanted) = (read_with_metadata(file, "") for file in (one, two))
            assert facts == wanted
            assert all(tensors[name].equal(value) for name, value in expected.items())
    assert write_activations(model, PROMPTS, 1, tmp_path / "whole", **given).finished


def test_batches_hold_every_vector_once_in_random_order(tmp_path):
    model = tiny("llada")
    shards = write_activations(model, PROMPTS, 1, tmp_path / "shards", shard_size=20, dtype="bfloat16", **RUN)
    stored = _all(shards)
    assert stored.activations.dtype == torch.bfloat16
    batches = list(shards.batches(16, seed=3))
    assert {tuple(batch.shape) for batch in batches} == {(16, model.config.hidden_size)}
    assert batches[0].dtype == torch.float32
    assert len(batches) == len(stored) // 16
    seen = sorted(torch.cat(batches)[:, 0].tolist())
    every = sorted(stored.activations[:, 0].float().tolist())
    assert all(seen.count(value) <= every.count(value) for value in seen)
    order = torch.cat(batches)
    assert not order.equal(stored.activations[: len(order)].float())
    assert order.equal(torch.cat(list(shards.batches(16, seed=3))))
    assert len(list(shards.batches(16, epochs=2))) == 2 * len(batches)


def test_other_arguments_and_damage_are_refused(tmp_path):
    model = tiny("llada")
    write_activations(model, PROMPTS, 1, tmp_path / "shards", **RUN)
    with pytest.raises(ValueError, match=r"holds activations of other arguments: stream is .*'layer': 1.* and .*0"):
        write_activations(model, PROMPTS, 0, tmp_path / "shards", **RUN)
    with pytest.raises(ValueError, match="prompts is"):
        write_activations(model, PROMPTS[:2], 1, tmp_path / "shards", **RUN)
    with pytest.raises(ValueError, match="hooks is"):
        write_activations(model, PROMPTS, 1, tmp_path / "shards", hooks=[dl.hooks.zero_value(0)], **RUN)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds other files \(notes\.txt\)"):
        write_activations(model, PROMPTS, 1, tmp_path / "other", **RUN)
    with pytest.raises(FileNotFoundError, match="holds no activations"):
        ActivationShards(tmp_path / "other")
    (shard,) = ActivationShards(tmp_path / "shards").files
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        list(ActivationShards(tmp_path / "shards"))


def test_what_no_header_names_is_refused_before_anything_is_written(tmp_path):
    model = tiny("llada")
    for name in ("on_logits", "on_canvas"):
        with pytest.raises(ValueError, match=f"{name} with to=: functions cannot be compared"):
            write_activations(model, PROMPTS, 1, tmp_path / "shards", **RUN, **{name: lambda *_: None})
    why = r"of attach_hooks with to=.*; give write_activations\(hooks=\[\.\.\.\]\) instead"
    with dl.hooks.attach_hooks(model, dl.hooks.zero_value(0)), pytest.raises(ValueError, match=why):
        write_activations(model, PROMPTS, 1, tmp_path / "shards", **RUN)
    assert not (tmp_path / "shards").exists()


def test_activations_that_float16_cannot_hold_are_refused(tmp_path):
    model = tiny("llada")
    model.get_input_embeddings().weight.data.mul_(1e6)
    why = r"the stream of layer 0 reaches .*e\+0\d, and float16 ends at 65,504; take float32 or bfloat16 as dtype"
    with pytest.raises(ValueError, match=why):
        next(activations(model, PROMPTS, 0, dtype=torch.float16, **RUN))
    with pytest.raises(ValueError, match=why):
        write_activations(model, PROMPTS, 0, tmp_path / "half", dtype="float16", **RUN)
    for dtype in ("float32", "bfloat16"):
        stored = _all(write_activations(model, PROMPTS, 0, tmp_path / dtype, dtype=dtype, **RUN))
        assert bool(stored.activations.isfinite().all())


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"classes": ["masked"]}, r"classes is \['masked'\]; give a list of some of open, decided, prompt"),
        ({"share": 0.0}, "share is 0.0; it is the share of vectors to keep"),
        ({"layer": 2}, "layer"),
        ({"observers": None}, "a stream of activations takes no observers"),
        ({"seed": None}, "seed is None; it must be a whole number"),
        ({"share": "half"}, "share is 'half'; it must be a finite number"),
        ({"dtype": "float16"}, "dtype is 'float16'; it must be a dtype of torch, such as torch.float32"),
        (
            {"hooks": [ablate("resid", by_row([0], [1]))], "batch_size": 2},
            "positions for 2 rows, and the prompts run in 2 batches",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_pass(given, why):
    arguments = {"layer": 1, **RUN, **given}
    with pytest.raises(ValueError, match=why):
        activations(tiny("llada"), PROMPTS, **arguments)


def test_activations_under_another_vector_or_of_other_defaults_are_not_taken_for_these(tmp_path):
    vectors = torch.eye(32)
    model = tiny("llada")

    def write(vector, model=model):
        return write_activations(model, PROMPTS, 1, tmp_path, hooks=[dl.hooks.steer(vector)], **RUN)

    write(vectors[0])
    assert repr(dl.hooks.steer(vectors[0])) == repr(dl.hooks.steer(vectors[1]))
    with pytest.raises(ValueError, match="hooks is"):
        write(vectors[1])
    model.sampler_defaults["temperature"] = 0.9
    with pytest.raises(ValueError, match=r"defaults is .*'temperature': '0.0'.* there and .*'0.9'"):
        write(vectors[0])
    again = tiny("llada")
    again.config.mask_token_id = 5
    with pytest.raises(ValueError, match=r"config is \{'mask_token_id': '63'\} there and .*'5'"):
        write(vectors[0], again)
    assert len(_all(write(vectors[0], tiny("llada")))) > 0
