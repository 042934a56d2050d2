"""dlm-lens record: a file of prompts, one process and two."""

import inspect
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import dlm_lens
from dlm_lens.cli import app as cli
from dlm_lens.cli.errors import as_command_line
from dlm_lens.cli.options import LOADING_NAMES
from dlm_lens.cli.record import read_prompts
from dlm_lens.recording import ReceivedAttention, Recording, RecordingSet, ValueNorm, record
from dlm_lens.testing import tiny
from tests.preloaded import python

TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9", "w10 w11"]
OPTIONS = ["--batch-size", "1", "--steps", "4", "--gen-length", "8", "--temperature", "0.5", "--seed", "3"]


@pytest.fixture
def files(tmp_path):
    model = tiny("llada")
    model.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    model.save_pretrained(tmp_path / "model")
    model.tokenizer.save_pretrained(tmp_path / "model")
    lines = [{"prompt": text} for text in TEXTS[:3]] + [{"messages": [{"role": "user", "content": TEXTS[3]}]}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return tmp_path


def arguments(files, out, *more):
    prompts = ["--prompts", str(files / "prompts.jsonl"), "--out", str(files / out)]
    return ["record", str(files / "model"), *prompts, *OPTIONS, *more]


def assert_recorded(path, reducers):
    wanted = record(tiny("llada"), TEXTS, reducers, steps=4, gen_length=8, temperature=0.5, seed=3)
    found = Recording.load(path)
    assert list(found.specs) == list(wanted.specs)
    for name in wanted.specs:
        torch.testing.assert_close(
            getattr(found, name), getattr(wanted, name), equal_nan=True, rtol=1e-4, atol=1e-5
        )
    content = wanted.run.attention_mask
    assert torch.equal(found.run.tokens[content], wanted.run.tokens[content])


def test_a_file_of_prompts(files):
    reducers = ["--reducers", "received:all+masked,value-norm:both"]
    result = CliRunner().invoke(cli.app, arguments(files, "out", *reducers))
    assert result.exit_code == 0, result.output
    assert "4 of 4 prompts recorded" in result.output
    assert_recorded(files / "out", [ReceivedAttention(("all", "masked")), ValueNorm("both")])
    before = {path: path.stat().st_mtime_ns for path in (files / "out").rglob("*.safetensors")}
    # What is gone is recorded again, and nothing else.
    gone = files / "out" / "rows-00001-00001"
    for path in gone.iterdir():
        path.unlink()
    assert len(RecordingSet(files / "out")) == 3
    assert CliRunner().invoke(cli.app, arguments(files, "out", *reducers)).exit_code == 0
    assert len(RecordingSet(files / "out")) == 4
    after = {path: path.stat().st_mtime_ns for path in (files / "out").rglob("*.safetensors")}
    assert {p for p in before if before[p] != after[p]} == {p for p in before if p.parent == gone}


def test_masks_of_prompts_are_filled_in_alone(files):
    lines = [{"prompt": "w1 [MASK] w3 [MASK]"}, {"input_ids": [1, 63, 2]}]
    (files / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    given = ["record", str(files / "model"), "--prompts", str(files / "prompts.jsonl"), "--out", str(files / "out")]
    result = CliRunner().invoke(cli.app, [*given, "--gen-length", "0"])
    assert result.exit_code == 0, result.output
    wanted = record(tiny("llada"), [[1, 63, 3, 63], [1, 63, 2]], gen_length=0)
    found = Recording.load(files / "out")
    assert found.run.canvases.equal(wanted.run.canvases)
    assert found.run.row_steps.equal(wanted.run.row_steps)


def test_every_setting_of_a_sampler_can_be_given(files):
    """Dream's alg_temp and top_p, and LLaDA's guidance, have no options of their own."""
    tiny("dream").save_pretrained(files / "dream")
    tiny("dream").tokenizer.save_pretrained(files / "dream")
    (files / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in TEXTS))
    runs = {
        "model": {"cfg_scale": 1.5, "confidence_eos_eot_inf": True},
        "dream": {"remasking": "maskgit_plus", "alg_temp": 0.4, "top_p": 0.9},
    }
    for directory, settings in runs.items():
        command = arguments(files, f"of-{directory}")
        command[1] = str(files / directory)
        for name, value in settings.items():
            command += ["--remasking", value] if name == "remasking" else ["--set", f"{name}={json.dumps(value)}"]
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code == 0, result.output
        found = Recording.load(files / f"of-{directory}")
        model = tiny("llada" if directory == "model" else directory)
        wanted = record(
            model, TEXTS, [ReceivedAttention()], steps=4, gen_length=8, temperature=0.5, seed=3, **settings
        )
        assert settings.items() <= found.run.settings.items()
        assert torch.equal(
            found.run.tokens[wanted.run.attention_mask], wanted.run.tokens[wanted.run.attention_mask]
        )


def test_arguments_of_load_can_be_given(files):
    """A directory of MBD weights says nothing of its sampler; one of a toy says which token is [MASK]."""
    tiny("sdar").save_pretrained(files / "sdar")
    tiny("sdar").tokenizer.save_pretrained(files / "sdar")
    (files / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in TEXTS))
    command = ["record", str(files / "sdar"), "--prompts", str(files / "prompts.jsonl"), "--gen-length", "8"]
    given = ["--load", "sampler=multi_block", "--load", "mask_token_id=60", "--set", "running_blocks=3"]
    result = CliRunner().invoke(cli.app, [*command, "--out", str(files / "out"), *given])
    assert result.exit_code == 0, result.output
    found = Recording.load(files / "out").run
    assert (found.settings["sampler"], found.settings["running_blocks"]) == ("multi_block", 3)
    assert (found.canvases[0][found.masked[0]] == 60).all()
    # The directory goes on with its own sampler alone.
    other = CliRunner().invoke(cli.app, [*command, "--out", str(files / "out"), "--load", "mask_token_id=60"])
    assert other.exit_code == 1
    assert "running_blocks = '3', and now it is None; " in str(other.exception)
    wrong = CliRunner().invoke(cli.app, [*command, "--out", str(files / "no"), "--load", "sampler=llada3"])
    assert wrong.exit_code == 1
    assert "'llada3'" in str(wrong.exception)
    assert not (files / "no").exists()


def test_a_recording_of_another_sampler_says_how_the_model_is_loaded(files):
    tiny("dream").save_pretrained(files / "dream")
    tiny("dream").tokenizer.save_pretrained(files / "dream")
    (files / "one.jsonl").write_text(json.dumps({"prompt": TEXTS[2]}))
    command = ["record", str(files / "dream"), "--prompts", str(files / "one.jsonl"), "--out", str(files / "rec")]
    recorded = CliRunner().invoke(cli.app, [*command, "--gen-length", "8", "--load", "sampler=d2f"])
    assert recorded.exit_code == 0, recorded.output
    (held,) = (files / "rec").glob("rows-*")
    lens = ["lens", str(held), "--positions", "3"]
    refused = CliRunner().invoke(cli.app, lens)
    assert "If not, load it with sampler='d2f' (--load sampler=d2f)" in str(refused.exception)
    assert CliRunner().invoke(cli.app, [*lens, "--load", "sampler=d2f"]).exit_code == 0


def test_the_arguments_of_load_are_those_of_the_function():
    names = set(inspect.signature(dlm_lens.load).parameters)
    own = {"path_or_hub_name", "dtype", "device_map", "quantization_config"}  # the last is an object
    assert set(LOADING_NAMES) == names - own


def test_token_ids_of_a_checkpoint_without_a_tokenizer(files):
    ids = [[5, 9, 13], [7], [2, 40, 3, 11]]
    tiny("llada").save_pretrained(files / "bare")
    (files / "prompts.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in ids))
    command = arguments(files, "out")
    command[1] = str(files / "bare")
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    wanted = record(tiny("llada"), ids, [ReceivedAttention()], steps=4, gen_length=8, temperature=0.5, seed=3)
    for row, found in enumerate(RecordingSet(files / "out")):
        length = len(ids[row]) + 8
        assert torch.equal(found.run.tokens[0], wanted.run.tokens[row, -length:])
        torch.testing.assert_close(
            found.received[:, 0, ..., -length:], wanted.received[:, row, ..., -length:], rtol=1e-4, atol=1e-5
        )


def test_a_cache_and_parallel_decoding(files):
    options = ["--cache", "dual", "--threshold", "0.2", "--block-length", "4", "--gen-length", "8"]
    result = CliRunner().invoke(cli.app, arguments(files, "cached", *options))
    assert result.exit_code == 0, result.output
    settings = {
        "cache": "dual",
        "threshold": 0.2,
        "block_length": 4,
        "gen_length": 8,
        "temperature": 0.5,
        "seed": 3,
    }
    for row, found in enumerate(RecordingSet(files / "cached")):
        wanted = record(tiny("llada"), [TEXTS[row]], [ReceivedAttention()], steps=4, **settings)
        assert found.run.computed == wanted.run.computed
        assert any(found.run.computed)
        assert found.run.tokens.equal(wanted.run.tokens)


def test_a_run_that_is_refused_leaves_no_directory(files):
    wrong = ["--hooks", "mask_positions(99)"]
    result = CliRunner().invoke(cli.app, arguments(files, "out", *wrong))
    assert "position 99 is not there" in str(result.exception)
    assert not (files / "out").exists()
    (files / "out").mkdir()
    CliRunner().invoke(cli.app, arguments(files, "out", *wrong))
    assert (files / "out").is_dir(), "one that was there before stays"
    assert CliRunner().invoke(cli.app, arguments(files, "out")).exit_code == 0


@pytest.mark.long
def test_an_error_in_a_run_has_a_line_of_its_own_after_the_progress_bar(files):
    # Of several batches it would be refused before the first one begins.
    (files / "prompts.jsonl").write_text(json.dumps({"prompt": TEXTS[0]}))
    wrong = arguments(files, "out", "--hooks", "mask_positions(99)")
    done = subprocess.run(
        [sys.executable, "-m", "dlm_lens.cli", *wrong],
        capture_output=True, text=True, env={**os.environ, "TQDM_DELAY": "0"},
    )  # fmt: skip
    assert done.returncode != 0
    assert "denoising" in done.stderr
    assert any(line.startswith("dlm-lens: position 99 is not there") for line in done.stderr.splitlines())


@pytest.mark.long
def test_two_processes_share_the_prompts(files):
    command = [
        python(), "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--standalone",
    ]  # fmt: skip
    command += ["--no-python", python(), "-m", "dlm_lens.cli", *arguments(files, "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(2):
        assert f"2 of 4 prompts recorded in {files / 'out'} (process {rank} of 2)" in done.stdout
    assert_recorded(files / "out", [ReceivedAttention()])


def test_of_two_processes_each_takes_every_other_batch(files, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(cli.app, arguments(files, "out", "--layers", "-1", "--storage", "float16"))
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in (files / "out").iterdir()) == ["rows-00001-00001", "rows-00003-00003"]
    (one, _) = RecordingSet(files / "out")
    assert one.layers == (1,)
    assert one.arrays["received"].dtype == torch.float16


@pytest.mark.parametrize(
    ("rank", "world", "sentence"),
    [
        ("5", "2", "RANK=5 and WORLD_SIZE=2: the rank must be below the number of processes"),
        ("-1", "2", "RANK=-1 and WORLD_SIZE=2: the rank must be below the number of processes"),
        ("0", "0", "RANK=0 and WORLD_SIZE=0: the rank must be below the number of processes"),
        (
            "x",
            "2",
            "RANK=x and WORLD_SIZE=2: both must be whole numbers, as torchrun sets them",
        ),
    ],
)
def test_processes_that_cannot_be_are_refused(files, monkeypatch, rank, world, sentence):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    assert str(CliRunner().invoke(cli.app, arguments(files, "out")).exception) == sentence
    assert not (files / "out").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--reducers", "received,mass"], "--reducers 'mass' (did you mean 'massive'?): there are channels"),
        (["--reducers", "entropy:all"], "takes nothing after a colon"),
        (["--reducers", "received:some"], "classes of queries are"),
        (["--reducers", "top-keys:x"], "--reducers top-keys is 'x'; give a whole number"),
        (["--layers", "0;1"], "--layers takes whole numbers"),
        (["--layers", "5"], "layer 5 of 2"),
        (["--steps", "0"], "steps is 0"),
        (["--storage", "int8"], "'float32' or 'float16'"),
    ],
)
def test_a_wrong_option_is_one_sentence(files, change, sentence):
    result = CliRunner().invoke(cli.app, arguments(files, "out", *change))
    assert isinstance(result.exception, ValueError)
    assert sentence in str(result.exception)
    assert not list(files.glob("out/*/*.safetensors"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "w1"}\nw2\n', 'prompts.jsonl line 2 is not JSON .*; a line is \\{"prompt"'),
        ('{"text": "w1"}\n', r"line 1 is .*text.*; a line is"),
        ('{"prompt": "w1"}\n{"prompt": " "}\n', "prompts.jsonl line 2: "),
        ('{"prompt": "w1"}\n{"input_ids": []}\n', "prompts.jsonl line 2: "),
        ('{"input_ids": [5, 64000]}\n', "prompts.jsonl line 1: .*64000"),
    ],
)
def test_a_wrong_line_is_named(files, content, sentence):
    (files / "prompts.jsonl").write_text(content)
    result = CliRunner().invoke(cli.app, arguments(files, "out"))
    with pytest.raises(ValueError, match=sentence):
        raise result.exception


def test_the_program_says_it_in_one_line(files):
    command = [python(), "-m", "dlm_lens.cli", *arguments(files, "out")]
    command[command.index("--prompts") + 1] = str(files / "none.jsonl")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1]
        == f"dlm-lens: {files / 'none.jsonl'} does not exist; --prompts takes a file of JSON lines"
    )


def test_what_can_be_read_once_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, sentence in (
        (
            tmp_path / "pipe",
            "is a pipe or a device, which cannot be read twice; --prompts takes a file",
        ),
        (tmp_path, "is a directory; --prompts takes a file"),
    ):
        with pytest.raises(FileNotFoundError, match=re.escape(f"{path} {sentence}")):
            read_prompts(path)


SEPARATORS = ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"]
"""Where `str.splitlines` cuts and JSON lines do not."""


def test_a_line_ends_with_a_newline_alone(tmp_path):
    texts = [f"w1{mark}w2 w3" for mark in SEPARATORS]
    # Characters below U+0020 are escaped in JSON; the others may stand as they are.
    lines = [json.dumps({"prompt": text}, ensure_ascii=ord(text[2]) < 0x20) for text in texts]
    path = tmp_path / "prompts.jsonl"
    for ending in ("\n", "\r\n"):
        path.write_bytes(b"\xef\xbb\xbf" + ending.join([*lines, ""]).encode())
        assert read_prompts(path) == texts


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 100_000, "line 1 is nested too deeply to be a prompt"),
        (b'{"prompt": "w1"}\n{"prompt": ' + b'{"a":' * 50_000, "line 2 is nested too deeply"),
        (b"9" * 10_000, "line 1 is not JSON"),
        (b'{"prompt": "w1\xff"}', r"prompts.jsonl is not UTF-8 \(byte 14\)"),
        (b'{"prompt": 7}', "line 1 is '{\"prompt\": 7}'; a line is"),
        (b'{"input_ids": [1, true]}', r"true\]\}'; a line is .* or \{\"input_ids\": "),
        (b'{"input_ids": [1, 2.5]}', "a line is"),
        (b"\n\r\n \n", "holds no prompts"),
    ],
)
def test_files_that_are_no_prompts_are_refused_in_a_sentence(tmp_path, data, message):
    (tmp_path / "prompts.jsonl").write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(tmp_path / "prompts.jsonl")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_lone_surrogate_in_a_file_names_the_prompt(files):
    (files / "prompts.jsonl").write_text('{"prompt": "w1"}\n{"prompt": "w1 \\ud800 w2"}\n')
    result = CliRunner().invoke(cli.app, arguments(files, "out"))
    assert isinstance(result.exception, ValueError)
    assert "prompts.jsonl line 2: the prompt holds a lone surrogate, '\\ud800' at character 3" in str(
        result.exception
    )
    assert not (files / "out").exists()


def test_an_empty_prompt_is_named_by_its_line_once(files):
    (files / "prompts.jsonl").write_text('{"prompt": "w1"}\n\n{"prompt": " "}\n')
    result = CliRunner().invoke(cli.app, arguments(files, "out"))
    sentence = as_command_line(str(result.exception), {})
    remedy = 'give a text with a word in it, or {"input_ids": [...]} with the BOS token alone'
    assert sentence == f"{files / 'prompts.jsonl'} line 3: the prompt is empty; {remedy}"


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("seed=4", "give --seed in place of --set"),
        ("topp=1", "--set topp: no sampler has such a setting (did you mean 'top_p'?); "),
        ("alg=entropy", "--set alg: no sampler has such a setting (alg is remasking here); "),
        ("num_steps=4", "--set num_steps: no sampler has such a setting (num_steps is steps or steps_per_block"),
    ],
)
def test_an_unknown_setting_is_named_before_the_model_is_loaded(files, setting, sentence, monkeypatch):
    monkeypatch.setattr("dlm_lens.adapters.load", lambda *_, **__: pytest.fail("a model was loaded"))
    result = CliRunner().invoke(cli.app, arguments(files, "out", "--set", setting))
    assert isinstance(result.exception, ValueError)
    assert str(result.exception).startswith(sentence)


def test_a_setting_of_other_samplers_is_refused_by_a_plan_and_a_recording(files):
    sentence = "the llada sampler has no setting 'top_p'"
    for command in (["plan", str(files / "model")], arguments(files, "out")):
        result = CliRunner().invoke(cli.app, [*command, "--set", "top_p=0.9"])
        assert str(result.exception).startswith(sentence)
