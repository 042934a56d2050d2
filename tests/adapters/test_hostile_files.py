"""Checkpoints whose files lead elsewhere or hold code: nothing of it is read or run, or a sentence says why not."""

import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import dlm_lens
from dlm_lens.adapters.tokenizer_files import load_tokenizer
from dlm_lens.adapters.weight_headers import read_header
from dlm_lens.testing import tiny

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    model = tiny("llada")
    model.save_pretrained(path)
    model.tokenizer.save_pretrained(path)
    return path


def rewrite(file: Path, **changes: Any) -> None:
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(values | changes))


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


def sharded(path: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    """Put an index over the one file; `change` makes its weight_map."""
    os.replace(path / "model.safetensors", path / "part.safetensors")
    names = dict.fromkeys(load_file(path / "part.safetensors"), "part.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": change(names)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def elsewhere(names: dict[str, str], to: str) -> dict[str, str]:
    return dict.fromkeys(names, to)


def cases(root: Path, plain: Path, marker: Path) -> dict[str, tuple[Path, str | None]]:
    """Name -> directory, and the sentence that refuses it or None where it loads as the plain one."""
    found: dict[str, tuple[Path, str | None]] = {}
    trap = f"open({str(marker)!r}, 'w')\n"
    secret = root / "secret.json"
    shutil.copy(plain / "tokenizer.json", secret)
    outside = root / "outside.safetensors"
    weights = load_file(plain / "model.safetensors")
    save_file(
        {name: torch.zeros_like(value) for name, value in weights.items()}, outside, metadata={"format": "pt"}
    )

    def case(name: str, sentence: str | None = None) -> Path:
        path = root / name
        shutil.copytree(plain, path)
        found[name] = (path, sentence)
        return path

    case("plain")
    path = case("pickle_by_name")
    rewrite(path / "config.json", transformers_weights="adapter_model.bin")
    with (path / "adapter_model.bin").open("wb") as file:
        pickle.dump(Bomb(marker), file)
    path = case("other_weights")
    rewrite(path / "config.json", transformers_weights="other.safetensors")
    shutil.copy(outside, path / "other.safetensors")
    path = case("pickles_beside")
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "vocab.pkl", "model.pt"):
        (path / name).write_bytes(pickle.dumps(Bomb(marker)))
    path = case("pickles_alone", "pickled weights are refused")
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    path = case("pickle_named_safetensors", "is no readable safetensors file")
    (path / "model.safetensors").write_bytes(pickle.dumps(Bomb(marker)))
    path = case("adapter", "holds adapter_config.json, an adapter of PEFT: give its base model and adapter=")
    rewrite(path / "adapter_config.json", base_model_name_or_path=str(root / "plain"), peft_type="LORA")
    path = case(
        "distributed", "holds shard-00001-model-00001-of-00001.safetensors, a part of a distributed checkpoint"
    )
    shutil.copy(outside, path / "shard-00001-model-00001-of-00001.safetensors")

    path = case("code")
    for name in (
        "configuration_llada",
        "modeling_llada",
        "tokenization_llada",
        "__init__",
        "sitecustomize",
        "torch",
    ):
        (path / f"{name}.py").write_text(trap)
    (path / "custom_generate").mkdir()
    (path / "custom_generate" / "generate.py").write_text(trap + "def generate(model): ...\n")
    auto = {"AutoConfig": "configuration_llada.C", "AutoModel": "modeling_llada.M", "AutoModelForCausalLM": "a.M"}
    rewrite(path / "config.json", auto_map=auto, custom_generate="custom_generate", trust_remote_code=True)
    path = case("tokenizer_code")
    (path / "tokenization_llada.py").write_text(trap + "class T: ...\n")
    rewrite(
        path / "tokenizer_config.json", tokenizer_class="T", trust_remote_code=True,
        auto_map={"AutoTokenizer": ["tokenization_llada.T", "tokenization_llada.T"]},
    )  # fmt: skip
    for number, named in enumerate(
        ("AutoModel", "Trainer", "pipeline", "os", "RagTokenizer", "BertJapaneseTokenizer")
    ):
        path = case(f"tokenizer_class_{number}", None if number < 4 else "|the tokenizer of .*")
        rewrite(path / "tokenizer_config.json", tokenizer_class=named)
    path = case("tokenizer_class_path", "tokenizer_class = .*; it must be the name of a class")
    rewrite(path / "tokenizer_config.json", tokenizer_class="os.system")
    path = case("tokenizer_elsewhere")
    rewrite(
        path / "tokenizer_config.json", tokenizer_file=str(secret), vocab_file=str(secret), spm_file=str(secret),
        merges_file="../secret.json", gguf_file="../x.gguf", name_or_path=str(root),
        fast_tokenizer_files=["../secret.json"],
        init_inputs=[str(secret)], tokenizer_object=3, backend="custom", from_slow=True, subfolder="..",
        _commit_hash="x", local_files_only=False, is_local=False, init_kwargs={}, model_specific_special_tokens=3,
    )  # fmt: skip

    links = (("config.json", plain / "config.json"), ("model.safetensors", outside), ("tokenizer.json", secret),
             ("tokenizer_config.json", plain / "tokenizer_config.json"))  # fmt: skip
    for name, target in links:
        path = case(
            f"link_{name}", rf"{name} is a symbolic link to .*{target.name}, outside the checkpoint's directory"
        )
        (path / name).unlink()
        (path / name).symlink_to(target)
    path = case("link_inside")
    os.replace(path / "model.safetensors", path / "real.safetensors")
    (path / "model.safetensors").symlink_to("real.safetensors")
    path = case("hub_cache")
    snapshot = root / "models--org--name" / "snapshots" / "abc"
    (snapshot.parent.parent / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(path.iterdir())):
        shutil.move(file, snapshot.parent.parent / "blobs" / f"{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    found["hub_cache"] = (snapshot, None)

    sharded(case("index_of_one"), lambda names: names)
    no_path = "which is no path inside the checkpoint, and is not read"
    sharded(case("index_up", no_path), lambda names: elsewhere(names, "../outside.safetensors"))
    sharded(case("index_absolute", no_path), lambda names: elsewhere(names, str(outside)))
    sharded(case("index_pickle", "which is no safetensors file; pickled weights are"),
            lambda names: elsewhere(names, "pytorch_model.bin"))  # fmt: skip
    sharded(case("index_number", "which is no safetensors file"), lambda names: dict.fromkeys(names, 3))
    path = case("index_link", "is a symbolic link to .*outside.safetensors")
    sharded(path, lambda names: elsewhere(names, "linked.safetensors"))
    (path / "linked.safetensors").symlink_to(outside)
    path = case("index_dtype", "says dtype = 'load', which is none that weights are computed in")
    sharded(path, lambda names: names)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["metadata"]["dtype"] = "load"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))

    texts = {
        "nested": "[" * 10**5,
        "object": '{"a":' * 10**5,
        "list": "[1]",
        "nan": '{"temperature": NaN}',
        "cut": "{",
    }
    for name, text in texts.items():
        for file in ("generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"):
            path = case(f"{name}_{file}", rf"{file} of |no index of weights" if name != "nan" else None)
            if file == "model.safetensors.index.json":
                (path / "model.safetensors").unlink()
                found[path.name] = (path, "no index of weights")
            if name == "nan" and file == "generation_config.json":
                found[path.name] = (path, "temperature = nan; it must be a finite number")
            if name == "nan" and file == "tokenizer_config.json":
                found[path.name] = (path, "temperature = nan; it must be a finite number")
            (path / file).write_text(text)
    path = case("tokenizer_broken", "the tokenizer of .* cannot be read")
    (path / "tokenizer.json").write_text('{"model": {"type": "BPE"')
    path = case("tokenizer_nested", "the tokenizer of .* cannot be read")
    (path / "tokenizer.json").write_text("[" * 10**5)
    path = case("tokenizer_binary", "the tokenizer of .* cannot be read")
    (path / "tokenizer.json").write_bytes(bytes(range(256)) * 50)
    path = case("tokenizer_huge", "tokenizer.json of .* has 300000000 bytes; 268435456 is the most")
    with (path / "tokenizer.json").open("wb") as file:
        file.truncate(300_000_000)
    path = case("template_huge", "chat_template = .*; it must be a template of at most 100000 characters")
    rewrite(path / "tokenizer_config.json", chat_template="x" * 100_001)
    path = case("token_number", "eos_token = 3; it must be the text of a token")
    rewrite(path / "tokenizer_config.json", eos_token=3)
    path = case("token_collision", "mask_token_id and eos_token_id are both 62")
    rewrite(path / "config.json", mask_token_id=62, eos_token_id=62)
    path = case("generation_garbage", None)
    rewrite(
        path / "generation_config.json", validate=3, to_dict="x", assistant_model="org/name", compile_config=None
    )
    path = case("quantised_garbage", "is quantised, which does not work here")
    rewrite(path / "config.json", quantization_config={"quant_method": ["os"], "bits": "x"})
    return found


@pytest.mark.long
def test_nothing_that_came_with_a_checkpoint_is_run_and_nothing_outside_it_is_read(
    tmp_path: Path, plain: Path
) -> None:
    marker = tmp_path / "marker"
    found = cases(tmp_path, plain, marker)
    listing = tmp_path / "cases.json"
    listing.write_text(json.dumps({name: str(path) for name, (path, _) in found.items()}))
    out = subprocess.run(
        [sys.executable, Path(__file__).parent / "hostile_loads.py", listing],
        capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-3000:]
    results = {one["name"]: one for one in map(json.loads, out.stdout.splitlines())}
    control = " ".join(results.pop("control")["seen"])
    events = (
        "open ",
        "exec ",
        "pickle.loads",
        "pickle.find_class",
        "subprocess.Popen",
        "socket.con",
    )
    assert [event for event in events if event not in control] == []
    assert results.keys() == found.keys()
    wrong = []
    for name, (_, sentence) in found.items():
        one = results[name]
        if one["seen"]:
            wrong.append(f"{name} did {one['seen']}")
        if one["kind"] == "model" and sentence is None:
            if (one["ids"], one["logits"]) != ([3, 4], results["plain"]["logits"]):
                wrong.append(f"{name} is another model: {one}")
        elif sentence is not None and sentence.startswith("|") and one["kind"] in ("model", "ValueError"):
            continue  # whether a class of transformers' own reads a foreign tokenizer.json is its own matter
        elif one["kind"] not in ("ValueError", "FileNotFoundError") or not re.search(sentence or "^$", one["said"]):
            wrong.append(f"{name}: {one['kind']}: {one.get('said', one)}")
        if "\n" in one.get("said", "") or len(one.get("said", "")) > 2000:
            wrong.append(f"{name} is no sentence: {one['said']!r:.300}")
    assert not wrong, "\n".join(wrong)
    assert not marker.exists()


def safetensors_file(path: Path, header: Any, data: bytes = b"\0" * 64, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def tensor(begin: int, end: int, shape: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ({"a": tensor(0, 64, [4, 4]), "b": tensor(0, 64, [16])}, r"b overlaps another tensor"),
        ({"a": tensor(0, 32, [8]), "b": tensor(28, 64, [9])}, r"b overlaps another tensor"),
        ({"a": tensor(0, 16, [4]), "b": tensor(32, 64, [8])}, r"b leaves a gap before it"),
        ({"a": tensor(0, 64, [4, 5])}, r"a of shape \[4, 5\] and dtype F32 needs 80 bytes and has 64"),
        ({"a": tensor(0, 64, [16], "F16")}, r"dtype F16 needs 32 bytes and has 64"),
        ({"a": tensor(0, 64, [-4, -4])}, r"a has the shape \[-4, -4\]"),
        ({"a": tensor(0, 64, [4.0, 4])}, r"a has the shape \[4.0, 4\]"),
        ({"a": tensor(0, 64, [True, 16])}, r"a has the shape \[True, 16\]"),
        ({"a": tensor(0, 64, "16")}, r"a has the shape '16'"),
        ({"a": tensor(0, 64, [1] * 99 + [16])}, r"a has the shape \[1, 1, 1"),
        ({"a": tensor(0, 64, [2**62, 2**62, 0])}, r"needs 0 bytes and has 64"),
        ({"a": tensor(0, 64, [10**4000])}, r"needs \d+\.\.\. bytes and has 64"),
        ({"a": tensor(0, 64, [16], "PICKLE")}, r"a has the dtype 'PICKLE', none of safetensors'"),
        ({"a": tensor(0, 64, [16], None)}, r"a has the dtype None"),
        ({"a": {"dtype": "F32", "shape": [16]}}, r"a has the offsets None"),
        ({"a": {"dtype": "F32", "shape": [16], "data_offsets": [64, 0]}}, r"needs 64 bytes and has -64"),
        ({"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64, 9]}}, r"a has the offsets \[0, 64, 9\]"),
        ({"a": [1]}, r"a is described by \[1\]"),
        ({"a\x1b[2J": 3}, r"a\\x1b\[2J is described by 3"),
        ({f"layers.{'9' * 5000}.a": tensor(0, 64, [16])}, r"a name of 5009 characters, 1000 is the most: layers.9"),
        ({"a": tensor(0, 32, [8])}, r"32 bytes follow its last tensor"),
        ({"a": tensor(0, 2**60, [2**58])}, r"is cut short, \d+ of \d+ bytes"),
        (b'{"a": 1, "a": 2}', r"its header holds a twice"),
        (b"[1]", r"is no readable safetensors file; fetch it again"),
        (b"[" * 10**5, r"is no readable safetensors file; fetch it again"),
        (b"\xff" * 10, r"is no readable safetensors file; fetch it again"),
        (b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}", r"is no readable safetensors file"),
    ],
)
def test_headers_that_contradict_themselves(header: Any, sentence: str, tmp_path: Path) -> None:
    file = safetensors_file(tmp_path / "model.safetensors", header)
    with pytest.raises(ValueError, match=sentence) as caught:
        read_header(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_header_larger_than_the_file_or_the_bound_is_not_read(tmp_path: Path) -> None:
    for length in (2**63, 2**40, 0):
        file = safetensors_file(tmp_path / "model.safetensors", b"{}", length=length)
        with pytest.raises(ValueError, match="is no readable safetensors file"):
            read_header(file)
    file = safetensors_file(tmp_path / "model.safetensors", b"{}", length=2**31)
    with file.open("ab") as opened:
        opened.truncate(2**32)
    with pytest.raises(ValueError, match="a header of 2147483648 bytes, 100000000 is the most"):
        read_header(file)


def test_what_the_header_says_is_what_safetensors_says(tmp_path: Path) -> None:
    held = {"a": torch.ones(2, 3), "b": torch.ones(0, 5), "c": torch.ones(()).half(), "d": torch.ones(4).bool()}
    save_file(held, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert {name: (one.shape, one.size) for name, one in found.items()} == {
        name: (tuple(value.shape), value.nbytes) for name, value in held.items()
    }


def test_a_chat_template_cannot_reach_python(plain: Path, tmp_path: Path) -> None:
    """Transformers renders templates in a sandbox of jinja; the settings reach it as they are."""
    path = tmp_path / "template"
    shutil.copytree(plain, path)
    rewrite(path / "tokenizer_config.json", chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    tokenizer = dlm_lens.load(path).tokenizer
    with pytest.raises(Exception, match="unsafe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "w1"}], tokenize=False)


@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizer", None])
def test_a_tokenizer_is_read_without_a_model(named: str | None, plain: Path, tmp_path: Path) -> None:
    """As for a new SMDM, whose settings name a directory with a tokenizer alone."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(plain / name, tmp_path / name)
    rewrite(tmp_path / "tokenizer_config.json", tokenizer_class=named)
    tokenizer = load_tokenizer(str(tmp_path), {})
    assert tokenizer is not None
    assert tokenizer.name_or_path == str(tmp_path)
    if named != "LlamaTokenizer":  # which has a model of its own kind
        assert tokenizer("w3 w4")["input_ids"] == [3, 4]


def test_a_tokenizer_of_vocabulary_and_merges_is_transformers_own(tmp_path: Path) -> None:
    """Without a tokenizer.json, as Dream and the Qwen2 models came: the class that is named builds it."""
    vocabulary = {chr(33 + i): i for i in range(94)} | {"\u0120": 94, "ab": 95, "\u0120ab": 96}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n\u0120 ab\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    read, own = load_tokenizer(str(tmp_path), {}), AutoTokenizer.from_pretrained(tmp_path)
    assert type(read) is type(own)
    for text in ("ab ab", "x ab1b2 ab", "(ab)"):
        assert read(text)["input_ids"] == own(text)["input_ids"]
    assert read("ab ab")["input_ids"] == [95, 96]
