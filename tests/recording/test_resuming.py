"""A killed run goes on where it was: the same tokens and the same arrays as the unbroken one."""

import json
import os
import signal
import subprocess
import time

import pytest
import torch

from dlm_lens import hooks
from dlm_lens.files.sealed_json import sealed
from dlm_lens.recording import (
    KeyNorm,
    ReceivedAttention,
    Recording,
    RecordingSet,
    RegionMass,
    TopKeys,
    ValueNorm,
    record,
)
from dlm_lens.recording.shards import HEADER, MANIFEST, RUN, ShardDirectory
from dlm_lens.sampling import denoise
from dlm_lens.sinks import AboveMean
from dlm_lens.testing import tiny
from tests.files.kills import contents
from tests.preloaded import python
from tests.recording.reference import PROMPTS

REDUCERS = (ReceivedAttention(("all", "unmasked")), ValueNorm("both"), TopKeys(2))
MMADA = {"eot_token": 7, "block_length": 4}
SAMPLERS = {
    "llada low confidence": ("llada", {"temperature": 0.7}),
    "llada random": ("llada", {"temperature": 0.7, "remasking": "random"}),
    "llada quirks": ("llada", {"temperature": 0.7, "block_length": 6, "reference_quirks": True, "seed": 5}),
    "llada guided": ("llada", {"temperature": 0.7, "cfg_scale": 1.5}),
    "mmada ending": ("mmada", {"temperature": 0.7, **MMADA}),
    "dream origin": ("dream", {"temperature": 0.7, "remasking": "origin"}),
    "dream entropy": ("dream", {"temperature": 0.7, "remasking": "entropy", "alg_temp": 0.5}),
    "diffugpt": ("diffugpt", {"temperature": 0.7}),
    # Its third step decides a position to hold the mask token.
    "diffugpt quirks": ("diffugpt", {"temperature": 9.0, "top_p": 1.0, "reference_quirks": True, "seed": 1}),
    "p2": ("open_dcoder", {"temperature": 0.7}),
    "p2 quirks": ("open_dcoder", {"temperature": 0.7, "reference_quirks": True, "seed": 5}),
    "rnd1": ("rnd1", {"temperature": 0.7}),
    "rnd1 bound": ("rnd1", {"temperature": 0.7, "entropy_bound": 3.0}),
    "rnd1 quirks": ("rnd1", {"temperature": 0.7, "reference_quirks": True, "seed": 5}),
    "sedd": ("sedd", {}),
    "sedd quirks": ("sedd", {"predictor": "euler", "reference_quirks": True, "seed": 5}),
    "duo": ("duo", {"temperature": 0.7}),
    "duo quirks": ("duo", {"noise_removal": "greedy", "reference_quirks": True, "seed": 5}),
    "udlm quirks": ("udlm", {"reference_quirks": True, "seed": 5}),
    "smdm origin": ("smdm", {"temperature": 0.7, "cfg_scale": 1.0}),
    "smdm greedy": ("smdm", {"temperature": 0.7, "remasking": "greedy"}),
    "sink": ("sink_qwen", {"temperature": 0.7}),
    "causal": ("causal", {"temperature": 1.0}),
}


class KilledError(RuntimeError):
    pass


def settings_of(sampler):
    family, settings = SAMPLERS[sampler]
    steps = {} if family == "causal" else {"steps": 6}
    return family, {"gen_length": 12, "seed": [3, 4], **steps, **settings}


def killed_behind(monkeypatch, after, /, *args, **kwargs):
    """Run record and die when so many shards are written."""
    real, count = ShardDirectory.add, [0]

    def add(self, *given):
        real(self, *given)
        count[0] += 1
        if count[0] == after:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(ShardDirectory, "add", add)
        with pytest.raises(KilledError):
            record(*args, **kwargs)


def assert_same(found, wanted):
    for name in ("canvases", "masked", "proposals", "confidence", "unmasked", "attention_mask"):
        assert torch.equal(getattr(found.run, name), getattr(wanted.run, name)), name
    assert found.run.spans == wanted.run.spans
    assert found.run.blocks == wanted.run.blocks
    assert dict(found.settings) == dict(wanted.settings)
    assert list(found.specs) == list(wanted.specs)
    for name in wanted.specs:
        assert torch.equal(
            torch.nan_to_num(getattr(found, name), -7), torch.nan_to_num(getattr(wanted, name), -7)
        ), name


def test_another_reducer_is_named_where_a_recording_was_begun(tmp_path, monkeypatch):
    model, settings = tiny("llada"), {"gen_length": 12, "steps": 6, "seed": [3, 4], "to": tmp_path}
    reducer = RegionMass(sinks=AboveMean(1.0))
    killed_behind(monkeypatch, 2, model, PROMPTS, [reducer], **settings)
    with pytest.raises(ValueError, match=r"reducers region_mass reducer = .*min_viewers=8\)', and now .*viewers=2"):
        record(model, PROMPTS, [RegionMass(sinks=AboveMean(1.0), min_viewers=2)], **settings)
    both = "with reducers region_mass, and now there is none; without reducers received, and now there is one; give"
    with pytest.raises(ValueError, match=both):
        record(model, PROMPTS, [ReceivedAttention()], **settings)
    added = "without reducers received, key_norm, and now there are 2; with dtype = 'float32', and now .*; give the"
    with pytest.raises(ValueError, match=added):
        record(model, PROMPTS, [reducer, ReceivedAttention(), KeyNorm()], dtype="float16", **settings)
    with pytest.raises(ValueError, match=r"and now it is .*; \d+ more differ; give the same to continue it"):
        record(tiny("dream", num_hidden_layers=3), PROMPTS, [reducer], **settings)
    with pytest.raises(ValueError, match="without reducers received, and now there is one; give the same"):
        record(model, PROMPTS, [reducer, ReceivedAttention()], **settings)
    # Begun before RegionMass had min_viewers, which is another statistic: the rest of the run is not added to it.
    (where,) = tmp_path.rglob(HEADER)
    header = json.loads(where.read_text())
    del header["checksum"]
    header["reducers"]["region_mass"] |= {"reducer": "RegionMass(sinks=AboveMean(eps=1.0))", "settings": {}}
    where.write_text(json.dumps(sealed(header)))
    sentence = (
        r"reducers region_mass reducer = 'RegionMass\(sinks=AboveMean\(eps=1.0\)\)', and now it is 'RegionMass\("
        r"sinks=AboveMean\(eps=1.0\), min_viewers=8\)'; with reducers region_mass settings min_viewers = None, and "
        "now it is 8; give the same to continue it, or another directory"
    )
    with pytest.raises(ValueError, match=sentence):
        record(model, PROMPTS, [reducer], **settings)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_goes_on_as_if_nothing_had_been(sampler, tmp_path, monkeypatch):
    family, settings = settings_of(sampler)
    model = tiny(family)
    whole = record(model, PROMPTS, REDUCERS, **settings)
    # The state that is lost must matter, or the test could not fail.
    assert not torch.equal(whole.run.tokens, denoise(model, PROMPTS, **{**settings, "seed": 99}).tokens)
    killed_behind(monkeypatch, 4, model, PROMPTS, REDUCERS, to=tmp_path, **settings)
    with pytest.raises(ValueError, match=r"is not finished \(it has 4 steps\)"):
        Recording.load(tmp_path)
    resumed = record(model, PROMPTS, REDUCERS, to=tmp_path, **settings)
    assert_same(resumed, whole)
    assert_same(Recording.load(tmp_path), whole)
    assert resumed.run.texts == whole.run.texts


def test_a_resumed_recording_has_the_bytes_of_the_unbroken_one(tmp_path, monkeypatch):
    # Steps with and without a computed span: a line that is written again must not gain fields.
    model, settings = tiny("llada"), {"gen_length": 8, "steps": 4, "block_length": 4, "seed": [3, 4]}
    for name, cache in (("plain", {}), ("dual", {"cache": "dual"})):
        record(model, PROMPTS, REDUCERS, to=tmp_path / name / "whole", **settings, **cache)
        killed_behind(monkeypatch, 2, model, PROMPTS, REDUCERS, to=tmp_path / name / "killed", **settings, **cache)
        record(model, PROMPTS, REDUCERS, to=tmp_path / name / "killed", **settings, **cache)
        assert contents(tmp_path / name / "killed") == contents(tmp_path / name / "whole")


def test_a_row_that_had_ended_stays_ended(tmp_path, monkeypatch):
    # MMaDA's rows end behind a block with eot_token: which have is state of the sampler.
    model = tiny("mmada")
    settings = {"gen_length": 12, "steps": 6, "block_length": 4, "temperature": 0.7, "seed": [3, 4]}
    plain = denoise(model, PROMPTS, **settings)
    eot = int(plain.tokens[0, plain.prompt_length + 3])
    assert eot != int(plain.tokens[1, plain.prompt_length + 3])
    whole = record(model, PROMPTS, REDUCERS, eot_token=eot, **settings)
    assert bool(whole.run.masks_left[0])
    assert not bool(whole.run.masks_left[1])
    killed_behind(monkeypatch, 3, model, PROMPTS, REDUCERS, to=tmp_path, eot_token=eot, **settings)
    assert_same(record(model, PROMPTS, REDUCERS, to=tmp_path, eot_token=eot, **settings), whole)


def test_progress_and_answer_count_from_the_beginning(tmp_path, monkeypatch):
    model, settings = tiny("llada"), settings_of("llada random")[1]
    reducers = [ReceivedAttention("prompt", min_viewers=1)]
    whole = record(model, PROMPTS, reducers, **settings)
    killed_behind(monkeypatch, 5, model, PROMPTS, reducers, to=tmp_path, **settings)
    resumed = record(model, PROMPTS, reducers, to=tmp_path, **settings)
    assert_same(resumed, whole)
    assert torch.equal(resumed.progress, whole.progress)
    assert float(resumed.progress[-1, 0]) == pytest.approx(10 / 12)


KILLED = """
import os, time
import torch
from dlm_lens.recording import ReceivedAttention, ValueNorm, record
from dlm_lens.recording.shards import ShardDirectory
from dlm_lens.testing import tiny
torch.set_num_threads(1)
real = ShardDirectory.add
def add(self, *given):
    real(self, *given)
    time.sleep(0.2)
ShardDirectory.add = add
print(os.getpid(), flush=True)
record(tiny("llada"), {prompts}, [ReceivedAttention(), ValueNorm()], to={to!r}, batch_size=1, steps=12,
       gen_length=12, temperature=0.7, seed=[3, 4])
"""


@pytest.mark.long
def test_kill_9_in_the_middle(tmp_path):
    script = KILLED.format(prompts=PROMPTS, to=str(tmp_path / "rec"))
    process = subprocess.Popen([python(), "-c", script], stdout=subprocess.PIPE, text=True)
    program = int(process.stdout.readline())
    shard = tmp_path / "rec" / "rows-00001-00001" / "step-00004.safetensors"
    until = time.monotonic() + 120
    while (
        not (shard.exists() and (shard.parent / MANIFEST).read_text().count("\n") > 4)
        and time.monotonic() < until
        and process.poll() is None
    ):
        time.sleep(0.01)
    os.kill(program, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert shard.exists()
    assert not (shard.parent / RUN).exists()
    half = RecordingSet(tmp_path / "rec")
    assert (len(half), len(half.unfinished)) == (1, 1)
    model, reducers = tiny("llada"), [ReceivedAttention(), ValueNorm()]
    settings = {"batch_size": 1, "steps": 12, "gen_length": 12, "temperature": 0.7, "seed": [3, 4]}
    written = shard.stat().st_mtime_ns
    resumed = record(model, PROMPTS, reducers, to=tmp_path / "rec", **settings)
    assert shard.stat().st_mtime_ns == written
    assert_same(resumed, record(model, PROMPTS, reducers, **settings))


@pytest.mark.parametrize(
    ("hook", "again"), [(None, False), (hooks.scale_attention(-2, 0.5), False), (hooks.mask_positions(-2), True)]
)
def test_a_batch_under_a_hook_that_counts_starts_from_its_beginning(hook, again, tmp_path, monkeypatch):
    model, settings = tiny("llada"), settings_of("llada low confidence")[1]
    settings = {**settings, "hooks": [] if hook is None else [hook]}
    killed_behind(monkeypatch, 4, model, PROMPTS, REDUCERS, to=tmp_path, **settings)
    (part,) = tmp_path.iterdir()
    first = sorted(part.glob("step-*"))[0]
    written = first.stat().st_mtime_ns
    resumed = record(model, PROMPTS, REDUCERS, to=tmp_path, **settings)
    assert (first.stat().st_mtime_ns != written) == again
    assert_same(resumed, record(model, PROMPTS, REDUCERS, **settings))


def test_a_torn_manifest_line_and_a_stray_part_do_not_count(tmp_path, monkeypatch):
    model, settings = tiny("llada"), settings_of("llada low confidence")[1]
    killed_behind(monkeypatch, 4, model, PROMPTS, REDUCERS, to=tmp_path, **settings)
    (part,) = tmp_path.iterdir()
    lines = (part / MANIFEST).read_text()
    (part / MANIFEST).write_text(lines[:-20])
    (part / ".step-00004.safetensors").write_bytes(b"half")
    whole = record(model, PROMPTS, REDUCERS, **settings)
    assert_same(record(model, PROMPTS, REDUCERS, to=tmp_path, **settings), whole)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"steps": 12}, "settings steps = '6', and now it is '12'"),
        ({"temperature": 0.1}, "settings temperature = '0.7', and now it is '0.1'"),
        ({"seed": [3, 5]}, r"settings seeds = \[3, 4\], and now it is \[3, 5\]"),
        ({"prompts": [PROMPTS[0], [6, 2, 41]]}, "prompts digest"),
        ({"reducers": [ReceivedAttention(), KeyNorm()]}, "reducers"),
        ({"layers": [1]}, r"layers = \[0, 1\], and now it is \[1\]"),
        ({"dtype": "float16"}, "dtype = 'float32', and now it is 'float16'"),
        ({"hooks": [hooks.mask_positions(-3)]}, "hooks"),
        ({"hooks": [hooks.mask_positions(3)]}, "other batches .*; give the same prompts, batch_size and hooks"),
        ({"model": tiny("llada", seed=1)}, "model weights"),
        ({"batch_size": 1}, "other batches"),
    ],
)
def test_other_arguments_are_refused_with_what_differs(change, named, tmp_path, monkeypatch):
    settings = {"steps": 6, "gen_length": 12, "temperature": 0.7, "seed": [3, 4], "to": tmp_path}
    given = {"model": tiny("llada"), "prompts": PROMPTS, "reducers": [ReceivedAttention()], **settings}
    killed_behind(monkeypatch, 2, **given)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ValueError, match=named):
        record(**{**given, **change})
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_fresh_seed_is_kept_for_going_on(tmp_path, monkeypatch):
    model = tiny("llada")
    settings = {"steps": 6, "gen_length": 12, "temperature": 0.7, "seed": None}
    killed_behind(monkeypatch, 3, model, PROMPTS, REDUCERS, to=tmp_path, **settings)
    resumed = record(model, PROMPTS, REDUCERS, to=tmp_path, **settings)
    assert_same(resumed, record(model, PROMPTS, REDUCERS, **{**settings, "seed": list(resumed.seeds)}))


class Remembering:
    """Scales attention's output by how often it was called in this run."""

    site, layers = "z", (0,)

    def __call__(self, tensor, hook=None):
        hook.run.memory["calls"] = hook.run.memory.get("calls", 0) + 1
        return tensor * (1 + 0.1 * hook.run.memory["calls"])

    def __repr__(self):
        return "Remembering()"


def test_hooks_that_remember_start_the_run_again(tmp_path, monkeypatch):
    model, settings = tiny("llada"), settings_of("llada low confidence")[1]
    whole = record(model, PROMPTS, REDUCERS, hooks=[Remembering()], **settings)
    assert not torch.equal(whole.run.tokens, denoise(model, PROMPTS, **settings).tokens)
    killed_behind(monkeypatch, 4, model, PROMPTS, REDUCERS, hooks=[Remembering()], to=tmp_path, **settings)
    assert_same(record(model, PROMPTS, REDUCERS, hooks=[Remembering()], to=tmp_path, **settings), whole)


def test_damage_is_named(tmp_path, monkeypatch):
    model, settings = tiny("llada"), settings_of("llada low confidence")[1]
    record(model, PROMPTS, REDUCERS, to=tmp_path, **settings)
    (part,) = tmp_path.iterdir()
    shard = part / "step-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=r"step-00002.safetensors is missing or damaged"):
        Recording.load(tmp_path)
    shard.write_bytes(whole)
    Recording.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no recording"):
        Recording.load(tmp_path / "other")


def test_a_refused_request_leaves_nothing_that_stands_in_the_way(tmp_path):
    model = tiny("llada")
    with pytest.raises(ValueError, match="gen_length is 0"):
        record(model, PROMPTS, to=tmp_path, steps=4, gen_length=0)
    corrected = record(model, PROMPTS, to=tmp_path, steps=4, gen_length=4)
    assert corrected.run.tokens.equal(denoise(model, PROMPTS, steps=4, gen_length=4, seed=0).tokens)


def test_an_error_behind_the_first_step_keeps_the_steps(monkeypatch, tmp_path):
    model, settings = tiny("llada"), {"steps": 4, "gen_length": 4}
    real, count = ShardDirectory.add, [0]

    def add(self, *given):
        real(self, *given)
        count[0] += 1
        if count[0] == 2:
            raise ValueError("not finite")

    with monkeypatch.context() as patch:
        patch.setattr(ShardDirectory, "add", add)
        with pytest.raises(ValueError, match="not finite"):
            record(model, PROMPTS, to=tmp_path, **settings)
    with pytest.raises(ValueError, match="steps = '4', and now it is '2'"):
        record(model, PROMPTS, to=tmp_path, steps=2, gen_length=4)
    assert record(model, PROMPTS, to=tmp_path, **settings).run.steps == 4


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        ("run.json", "{", r"run.json is damaged \(.*; delete .* and record again"),
        ("run.json", "[1]", "run.json is damaged; delete"),
        ("manifest.jsonl", "garbage\n", r"manifest.jsonl, line 1 is damaged \(.*; delete .* and record again"),
        ("run.safetensors", None, "run.safetensors is missing; delete .* and record again"),
    ],
)
def test_a_damaged_file_is_named_with_the_remedy(name, damage, sentence, tmp_path):
    made = record(tiny("llada"), PROMPTS, to=tmp_path, steps=2, gen_length=4)
    assert made.run.steps == 2
    (file,) = tmp_path.glob(f"*/{name}")
    if damage is None:
        file.unlink()
    else:
        file.write_text(damage)
    with pytest.raises(ValueError, match=sentence):
        Recording.load(tmp_path)


def test_a_manifest_without_checksums_is_refused(tmp_path):
    record(tiny("llada"), PROMPTS, to=tmp_path, steps=2, gen_length=4)
    (file,) = tmp_path.glob("*/manifest.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(line.pop("checksum") for line in lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"manifest.jsonl, line 1 is damaged \(has no checksum\); delete"):
        ShardDirectory(file.parent).lines()
