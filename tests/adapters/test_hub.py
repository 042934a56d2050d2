"""A Hugging Face cache made by hand, read in processes without a network; and what the hub may refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

import dlm_lens
from dlm_lens.adapters.model_names import check_model_name
from dlm_lens.testing import tiny

OLD, NEW, BARE, SHARDED = ("a" * 40, "b" * 40, "c" * 40, "d" * 40)

PROGRAM = """
import json, logging, sys
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
import dlm_lens
for arguments in json.loads(sys.argv[1]):
    try:
        model = dlm_lens.load(**arguments)
        print(json.dumps([len(model.model.layers), model.tokenizer is not None]))
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


REQUESTS: dict[str, list[dict[str, Any]]] = {
    "cached": [
        {"path_or_hub_name": "org/name"},
        *({"path_or_hub_name": "org/name", "revision": revision} for revision in (OLD, "v1", SHARDED)),
        {"path_or_hub_name": "org/name", "device_map": "auto"},
    ],
    "bare": [{"path_or_hub_name": "org/name", "revision": BARE}],
    "not cached": [
        {"path_or_hub_name": "org/name", "revision": "e" * 40},
        {"path_or_hub_name": "org/other"},
        {"path_or_hub_name": "org//name"},
        {"path_or_hub_name": "org/name/weights/mdm.safetensors"},
    ],
    "incomplete": [{"path_or_hub_name": f"org/{name}", "revision": NEW} for name in ("shard", "weights")],
}
"""Arguments of `load`, by the test that reads what comes of them."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("hub")
    repository = cache / "models--org--name"
    for commit, layers in ((OLD, 1), (NEW, 2), (BARE, 3), (SHARDED, 2)):
        directory = repository / "snapshots" / commit
        directory.mkdir(parents=True)
        model = tiny("llada", num_hidden_layers=layers)
        model.save_pretrained(directory, max_shard_size="20KB" if commit == SHARDED else "5GB")
        if commit != BARE:
            model.tokenizer.save_pretrained(directory)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(NEW)
    (repository / "refs" / "v1").write_text(OLD)
    for name, lost in (("shard", "model-00001-of-00005.safetensors"), ("weights", "model.safetensors.index.json")):
        directory = cache / f"models--org--{name}" / "snapshots" / NEW
        directory.mkdir(parents=True)
        for file in (repository / "snapshots" / SHARDED).iterdir():
            if file.name != lost:
                (directory / file.name).write_bytes(file.read_bytes())
    return cache


def load_all(cache: Path, *arguments: dict[str, Any]) -> tuple[list[list[Any]], str]:
    """What comes of each load, and standard error; in one process: the hub's variables are read at an import."""
    environment = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


Loads = tuple[dict[str, list[list[Any]]], str]


@pytest.fixture(scope="module")
def loads(cache: Path) -> Loads:
    """What came of every request, and standard error."""
    results, errors = load_all(cache, *(one for each in REQUESTS.values() for one in each))
    left = iter(results)
    return {name: [next(left) for _ in requests] for name, requests in REQUESTS.items()}, errors


@pytest.mark.long
def test_a_cached_checkpoint_loads_offline_at_any_cached_revision(loads: Loads) -> None:
    assert loads[0]["cached"] == [[2, True], [1, True], [1, True], [2, True], [2, True]]


@pytest.mark.long
def test_a_missing_tokenizer_is_none_and_said(loads: Loads) -> None:
    results, said = loads
    assert results["bare"] == [[3, False]]
    assert "org/name has no tokenizer in the cache or on the hub: ids work, text needs model.tokenizer" in said


@pytest.mark.long
def test_what_is_not_cached_is_one_sentence_with_the_remedy(cache: Path, loads: Loads) -> None:
    results = loads[0]["not cached"]
    assert [kind for kind, _ in results] == ["FileNotFoundError"] * 4
    assert all("\n" not in text for _, text in results)
    revision, name, spelling, file = (text for _, text in results)
    assert f"has no config.json in the cache {cache} while HF_HUB_OFFLINE is set" in revision
    assert f"pass revision= one of the cached commits ({OLD}, {NEW}, {BARE}), or load it once" in revision
    assert name.endswith("load it once with a connection, or give a checkpoint's directory")
    assert "'org//name' is not of the form 'organisation/name': check the spelling" in spelling
    assert "has no weights/mdm.safetensors in the cache" in file


@pytest.mark.long
def test_an_incomplete_cache_is_named(loads: Loads) -> None:
    shard, weights = loads[0]["incomplete"]
    assert shard[0] == "FileNotFoundError"
    assert "names 5 files, of which model-00001-of-00005.safetensors is missing: fetch it too" in shard[1]
    assert weights[0] == "ValueError"
    assert "org/weights has, in the cache or on the hub as far as it can be reached, no model.safet" in weights[1]


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (GatedRepoError, "is gated: accept its terms on its page, then run `hf auth login`"),
        (RepositoryNotFoundError, "does not exist or is private: check the name, or run `hf auth login`"),
        (RevisionNotFoundError, "does not exist: give a branch, tag or commit of it, or leave revision out"),
        (LocalEntryNotFoundError, "while the hub cannot be reached: load it once with a connection, or give a che"),
        (RuntimeError, "could not be read: two lines"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], remedy: str
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("two\nlines") from kind.__new__(kind)  # as transformers does; their making needs a response

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("dlm_lens.adapters.hub.get_hf_file_metadata", lambda url: None)
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", refuse)
    with pytest.raises(FileNotFoundError) as caught:
        dlm_lens.load("nobody/nothing", revision="v9")
    said = str(caught.value)
    assert "'nobody/nothing' at revision 'v9'" in said
    assert remedy in said
    assert "\n" not in said


def test_a_missing_network_costs_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def unreachable(url: str) -> None:
        tries.append(url)
        raise RuntimeError("Name or service not known")  # as the HTTP client's own class, which is no OSError

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("dlm_lens.adapters.hub.get_hf_file_metadata", unreachable)
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", lambda *_, **__: pytest.fail("more tries"))
    with pytest.raises(FileNotFoundError, match="while the hub cannot be reached: load it once with a connection"):
        dlm_lens.load("nobody/nothing")
    with pytest.raises(FileNotFoundError, match=r"weights.safetensors in the cache .* the hub cannot be reached"):
        dlm_lens.load("nobody/nothing/weights.safetensors")
    assert len(tries) == 2


def test_a_name_close_to_an_embedded_model_is_refused_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlm_lens.adapters.hub.get_hf_file_metadata", lambda url: pytest.fail("the hub was asked"))
    with pytest.raises(FileNotFoundError, match=r"'toyy' is neither .* \(did you mean 'toy'\?\); a hub name has"):
        dlm_lens.load("toyy")
    assert check_model_name("owner/toyy") == "owner/toyy"
    assert check_model_name("gpt2") == "gpt2"
