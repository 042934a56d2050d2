"""Loads random mutations of a tiny checkpoint within bounds of memory and time; run by test_mutated_checkpoints.py.

Arguments: a directory to work in, a seed, a number of mutations, families. Each family has a process of its own, a
fork of this one, which has imported what takes longest. Writes JSON lines with the family: one per violation, and a
last one with the number of outcomes of each kind.
"""

import collections
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import dlm_lens
from dlm_lens.testing import tiny

SECONDS, MEMORY = 30, 2**30
IDS = torch.arange(12)[None]

MEANINGFUL = (
    "rope", "eps", "act", "placement", "zero_sink", "softmax", "gated", "tie", "bias", "sampler", "layer_types",
    "window", "partial", "dtype", "norm_epsilon", "padding_multiple", "mlp_ratio", "multi_query",
)  # fmt: skip
"""Parts of the names of fields that change what a network computes without changing a shape."""

FIELDS = (
    "hidden_size", "d_model", "n_embd", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads",
    "n_kv_heads", "num_hidden_layers", "n_layers", "n_layer", "intermediate_size", "vocab_size", "embedding_size",
    "head_dim",
    "num_sinks", "num_labels", "id2label", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "layer_types", "pad_token_id", "eos_token_id", "bos_token_id", "mask_token_id", "tie_word_embeddings", "dtype",
    "torch_dtype", "quantization_config", "sampler_defaults", "hidden_act", "max_position_embeddings", "is_causal",
    "transformers_weights", "auto_map", "attn_implementation", "_attn_implementation", "return_dict", "model_type",
    "output_attentions", "fusion_config", "per_layer_config", "architectures", "transformers_version", "use_cache",
    "initializer_range", "attention_dropout", "sliding_window", "max_window_layers", "problem_type", "to_dict",
    "name", "mlp_ratio", "padding_multiple", "alibi", "bias", "codebook_size", "partial_rotary_factor",
    "pretraining_tp",
)  # fmt: skip
SETTINGS = (
    "tokenizer_class", "auto_map", "added_tokens_decoder", "mask_token", "eos_token", "pad_token", "unk_token",
    "chat_template", "model_max_length", "padding_side", "extra_special_tokens", "additional_special_tokens",
    "tokenizer_file", "vocab_file", "model_input_names", "add_bos_token", "clean_up_tokenization_spaces", "backend",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 63, 64, 65, 1.5, -0.0, 1e308, float("nan"), float("inf"), 10**9, 10**18, 10**400, "", "x",
    "32", "../x", "\x1b[2J\n", "\ud800", None, True, False, [], [1], [[1]], {}, {"a": 1},
    {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 0}, {"type": "dynamic"},
    {"content": "x"}, "x" * 5000, ["full_attention"] * 2,
)  # fmt: skip


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def change_object(values: dict[str, Any], names: tuple[str, ...], dice: random.Random) -> str:
    """Change one entry; says which."""
    name = dice.choice([*values, *names])
    kind = dice.random()
    if kind < 0.15:
        values.pop(name, None)
    elif kind < 0.2:
        values[name] = nested(dice.choice([2, 40, 500]))
    elif kind < 0.3 and type(values.get(name)) is int:
        values[name] = dice.choice(
            [float(values[name]), str(values[name]), values[name] + dice.choice([-1, 1, 2, 1000])]
        )
    else:
        values[name] = dice.choice(VALUES)
    return name


def flip(file: Path, dice: random.Random, reach: int) -> None:
    """Change, cut or repeat some bytes near the beginning."""
    content = bytearray(file.read_bytes())
    place = dice.randrange(min(reach, len(content)))
    kind = dice.randrange(4)
    if kind == 0:
        content[place] ^= 1 << dice.randrange(8)
    elif kind == 1:
        content[place : place + dice.randrange(20)] = dice.randbytes(dice.randrange(20))
    elif kind == 2:
        del content[place:]
    else:
        content[place:place] = content[place : place + dice.randrange(200)]
    file.write_bytes(content)


def mutate(path: Path, dice: random.Random) -> tuple[str, str]:
    """Mutate one file of a checkpoint: what was done, and the field if one."""
    kind = dice.choice(["config"] * 6 + ["settings"] * 2 + ["index", "header", "header", "bytes", "bytes"])
    if kind in ("config", "settings"):
        file = path / {"config": "config.json", "settings": "tokenizer_config.json"}[kind]
        values = json.loads(file.read_text())
        done = [
            change_object(values, FIELDS if kind == "config" else SETTINGS, dice)
            for _ in range(dice.choice([1, 1, 2]))
        ]
        file.write_text(json.dumps(values))
        return f"{kind} {[(name, str(values.get(name, 'gone'))[:60]) for name in done]}", " ".join(done)
    if kind == "index":
        header = read(path / "model.safetensors")[0]
        (path / "model.safetensors").rename(path / "part.safetensors")
        index: dict[str, Any] = {"metadata": {"total_size": 1}}
        index["weight_map"] = {name: "part.safetensors" for name in header if name != "__metadata__"}
        target = dice.choice([index, index["weight_map"], index["metadata"]])
        name = change_object(target, ("metadata", "weight_map", "dtype", "total_size"), dice)
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        return f"index {name} = {str(target.get(name, 'gone'))[:60]}", ""
    if kind == "header":
        header, data = read(path / "model.safetensors")
        name = dice.choice([one for one in header if one != "__metadata__"])
        if dice.random() < 0.3:
            header[dice.choice([name + "x", "model.extra", "lm_head.weight"])] = header.pop(name)
            said = f"{name} renamed"
        else:
            said = f"{name}.{change_object(header[name], ('shape', 'dtype', 'data_offsets'), dice)}"
        text = json.dumps(header).encode()
        (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        return f"header {said} {str(header.get(name))[:80]}", ""
    names = ("config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")
    file = path / dice.choice(names)
    flip(file, dice, 2000)
    return f"bytes of {file.name}", file.name if file.name != "model.safetensors" else ""


def read(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def judge(path: Path, plain: torch.Tensor, done: str, field: str) -> tuple[str, str | None]:
    """The kind of outcome, and what is wrong with it if anything."""
    try:
        model = dlm_lens.load(path)
    except (ValueError, FileNotFoundError, ImportError) as error:
        said = str(error)
        if not said.isprintable() or len(said) > 2000 or said.count(" ") < 4:
            return "refusal", f"no sentence: {said!r:.400}"
        return "refusal", None
    except BaseException as error:
        return "traceback", f"{type(error).__name__}: {str(error)!r:.400}"
    with torch.no_grad():
        logits = model(input_ids=IDS).logits.float()
    if logits.shape != plain.shape or not (logits - plain).abs().max() < 1e-4:
        allowed = field.endswith(".json") or any(part in field for part in MEANINGFUL)
        return "another model", None if allowed else "another model than the unchanged checkpoint's"
    return "the same model", None


def say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()  # what a process that is ended has not written is lost


def mutate_many(place: Path, family: str, seed: int, count: int) -> None:
    """Mutate, load, judge; within bounds that a whole model of the true size keeps easily."""
    source = place / "source"
    tiny(family).save_pretrained(source)
    tiny(family).tokenizer.save_pretrained(source)
    with torch.no_grad():
        plain = dlm_lens.load(source)(input_ids=IDS).logits.float()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    counted: collections.Counter[str] = collections.Counter()
    for number in range(seed, seed + count):
        dice, path = random.Random(number), place / "mutated"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(source, path)
        done, field = mutate(path, dice)
        signal.alarm(SECONDS)  # whose default action ends the process, which the parent reports
        say(family=family, begins=f"{number}: {done}")
        kind, wrong = judge(path, plain, done, field)
        signal.alarm(0)
        counted[kind] += 1
        if wrong is not None:
            say(family=family, wrong=f"{family} {number}: {done}: {wrong}")
    say(family=family, counted=dict(counted))


def main() -> None:
    """Every family in a child."""
    place, seed, count, *families = sys.argv[1:]
    for family in families:
        child = os.fork()
        if child == 0:
            try:
                mutate_many(Path(place) / family, family, int(seed), int(count))
            except BaseException:
                say(family=family, wrong=traceback.format_exc()[-4000:])
            finally:
                os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 0:
            say(family=family, wrong=f"{family}: its process ended with {status}")


if __name__ == "__main__":
    main()
