"""A checkpoint's tokenizer, read from its data files alone: no code, and no other file named in its settings."""

import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from dlm_lens.adapters.hub import local_file, optional_file
from dlm_lens.adapters.tokenizer_growth import check_growth
from dlm_lens.files.json_objects import read_object
from dlm_lens.printable import one_line, printable_name, shown

WHOLE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
DATA = (
    WHOLE, "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
"""Files that a tokenizer is read from, beside its settings."""

LARGEST = 256 * 2**20
"""Bytes of one of them; tokenizers of 262,000 tokens take 35 MB."""

MOST_CHARACTERS = 100_000
"""Of a chat template or another setting that is text."""

WHOLE_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes in tokenizer_config.json for which tokenizer.json is the whole tokenizer."""

_USED = frozenset({
    "add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "additional_special_tokens",
    "bos_token", "chat_template", "clean_up_tokenization_spaces", "cls_token", "eos_token", "errors",
    "extra_special_tokens", "legacy", "mask_token", "model_input_names", "model_max_length", "pad_token",
    "padding_side", "sep_token", "sp_model_kwargs", "spaces_between_special_tokens", "split_special_tokens",
    "tokenizer_class", "truncation_side", "unk_token", "use_default_system_prompt",
})  # fmt: skip
"""Settings that describe a tokenizer. Others would name files, classes or code to load, and are left out."""

logger = logging.getLogger(__name__)


def load_tokenizer(
    source: str,
    options: dict[str, Any],
    config: Any = None,
    classes: Mapping[str, str] = MappingProxyType({}),
    *,
    fetch: bool = True,
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint, or None where the files hold none; never with the checkpoint's own code.

    It is read from copies of the files named in `DATA`, and of the settings that describe a tokenizer, so that no
    setting of tokenizer_config.json can lead transformers to another file.

    Args:
        source: a directory or a hub name.
        options: `revision`, if any.
        config: of the model, by which transformers chooses a class where the settings name none.
        classes: class that only the checkpoint's Python defines -> class of transformers for its vocabulary files,
            where there is no tokenizer.json.
        fetch: ask the hub for files that are not in the cache.

    Raises:
        ValueError: files that are damaged or too large, steps that could make a text very long, or a tokenizer that
            only its own Python code makes.
    """
    find = optional_file if fetch else local_file
    found = {name: find(source, name, options) for name in (*DATA, SETTINGS)}
    held = {name: None if path is None else str(path) for name, path in found.items()}
    if not any(held[name] for name in (WHOLE, SETTINGS, "tokenizer.model", "vocab.json")):
        if not Path(source).is_dir():
            place = (
                "in the cache or on the hub"
                if fetch
                else "in the cache, and for a local checkpoint nothing is fetched; put its files beside the weights"
            )
            logger.warning("%s has no tokenizer %s: ids work, text needs model.tokenizer", source, place)
        return None
    settings = _settings(source, held[SETTINGS])
    if held[WHOLE] is None and (named := settings.get("tokenizer_class", "")) in classes:
        settings["tokenizer_class"] = classes[named]
    general = _is_general(settings, held[WHOLE], source)
    with tempfile.TemporaryDirectory(prefix="dlm_lens_tokenizer_") as directory:
        for name in DATA:
            if (path := held[name]) is not None:
                _check_size(source, path)
                shutil.copyfile(path, Path(directory) / name)
        if held[SETTINGS] is not None:
            (Path(directory) / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
        try:
            if held[WHOLE] is not None:
                check_growth(Path(directory) / WHOLE)
            if general:
                # For some model types (qwen2) AutoTokenizer takes its own class whatever the checkpoint names.
                tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
            else:
                # There is no config.json beside the copies.
                given = PreTrainedConfig() if config is None else config
                tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, config=given)
            len(tokenizer)
        except Exception as error:  # the tokenizers library raises plain Exception
            if held[WHOLE] is None:
                raise _needs_more(source) from error
            raise ValueError(
                f"the tokenizer of {source} cannot be read ({one_line(error)}); fetch {WHOLE} and {SETTINGS} again"
            ) from error
    tokenizer.name_or_path = source
    tokenizer.init_kwargs["name_or_path"] = source
    return tokenizer


def _settings(source: str, path: str | None) -> dict[str, Any]:
    """The settings of tokenizer_config.json that are used.

    Raises:
        ValueError: it is damaged, or a setting is of the wrong kind.
    """
    if path is None:
        return {}
    what = f"the {SETTINGS} of {source}"
    settings = {name: value for name, value in read_object(path, what).items() if _is_used(name, value)}
    for name, value in settings.items():
        requirement = _requirement(name, value)
        if requirement is not None:
            raise ValueError(
                f"{what} says {printable_name(name)} = {shown(value)}; it must be {requirement}: fetch it again"
            )
    return settings


def _is_used(name: str, value: Any) -> bool:
    # Further tokens of a model (image_token, ...) are text or a mapping that says how a token is split.
    return value is not None and (name in _USED or (name.endswith("_token") and isinstance(value, str | dict)))


def _requirement(name: str, value: Any) -> str | None:
    """What a setting must be, where it does not fit; None where it does."""
    if name == "tokenizer_class":
        return None if isinstance(value, str) and value.isidentifier() else "the name of a class"
    if name == "chat_template":
        texts = [value] if isinstance(value, str) else _templates(value)
        fits = texts is not None and all(isinstance(text, str) and len(text) <= MOST_CHARACTERS for text in texts)
        return None if fits else f"a template of at most {MOST_CHARACTERS} characters, or several by name"
    if name.endswith("_token") and name not in ("add_bos_token", "add_eos_token"):
        text = value.get("content") if isinstance(value, dict) else value
        return None if isinstance(text, str) and 0 < len(text) <= 1000 else "the text of a token"
    if name == "model_max_length":
        return None if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else "a length"
    if name in ("padding_side", "truncation_side"):
        return None if value in ("left", "right") else "'left' or 'right'"
    if name == "added_tokens_decoder":
        fits = isinstance(value, dict) and all(
            key.isdecimal() and len(key) < 10 and isinstance(one, dict) and isinstance(one.get("content"), str)
            for key, one in value.items()
        )
        return None if fits else "an object of tokens by id"
    return None


def _templates(value: Any) -> list[Any] | None:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        return [one.get("template") for one in value]
    return None


def _is_general(settings: Mapping[str, Any], whole: str | None, source: str) -> bool:
    """Whether the class of tokenizer.json reads the files, and not one that transformers chooses.

    Raises:
        ValueError: a class that transformers does not have, and no tokenizer.json, which would not need it.
    """
    name = settings.get("tokenizer_class")
    if name is None:
        return False
    found = None if name in WHOLE_CLASSES else tokenizer_class_from_name(name)
    if found is not None and isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase):
        return False
    if whole is None:
        raise _needs_more(source)
    # A tokenizer class that only the checkpoint's own Python defines; its data are usually complete.
    return True


def _needs_more(source: str) -> ValueError:
    return ValueError(
        f"the tokenizer of {source} needs further files, or its own Python code, which is not executed: fetch its "
        "tokenizer.json, which holds a whole tokenizer"
    )


def _check_size(source: str, path: str) -> None:
    size = Path(path).stat().st_size
    if size > LARGEST:
        raise ValueError(f"{Path(path).name} of {source} has {size} bytes; {LARGEST} is the most: fetch it again")
