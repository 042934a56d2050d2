"""`load`: a checkpoint as a ready model, without executing anything that came with it."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import cached_file

from dlm_lens.adapters.bare import bare_config, bare_file
from dlm_lens.adapters.registry import CHECKPOINTS, Family, embedded_models, family_of
from dlm_lens.attention import add_hook_points

WHOLE_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names in tokenizer_config.json that say: tokenizer.json is the whole tokenizer."""

logger = logging.getLogger(__name__)


def load(
    path_or_hub_name: str | Path,
    dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    attn_implementation: str = "sdpa",
    revision: str | None = None,
    *,
    size: str | None = None,
    mask_token_id: int | None = None,
    eos_token_id: int | None = None,
    eot_token_id: int | None = None,
) -> PreTrainedModel:
    """Load a masked DLM or an AR baseline, ready to denoise, in eval mode.

    The result is an ordinary transformers model with hook points in its attention, `model.tokenizer` (None
    where the files hold none) and `model.sampler_defaults`. Native code only: the checkpoint's own Python is
    never executed, whatever its `auto_map` says, and pickled weights are refused.

    Args:
        path_or_hub_name: an embedded model ("toy", "toy-ar"), a directory, a hub name; weights without a config:
            a safetensors file, here or behind a hub name ("nieshen/SMDM/mdm_safetensors/mdm-....safetensors").
        dtype: "bfloat16", torch.float32, ...; None for the checkpoint's own.
        device_map: as in transformers: "cuda", "auto", a mapping.
        attn_implementation: "sdpa" (patterns are computed only while somebody watches them), "hooked" (always),
            or any other of transformers'.
        revision: branch, tag or commit on the hub.
        size: of weights that came without a config ("1028M", an SMDM's); otherwise a JSON file beside them
            describes it, of the weights' name or called config.json.
        mask_token_id: id of [MASK], where config.json is silent or wrong.
        eos_token_id: likewise for the end of the text.
        eot_token_id: likewise for the end of a turn.

    Raises:
        FileNotFoundError: nothing loadable under that name.
        ValueError: unknown family, weights that do not fit, pickled weights, or no valid mask token id.
    """
    options = {"revision": revision} if revision else {}
    source = _resolve(path_or_hub_name, options)
    values, weights = _describe(source, size, options)
    family = family_of(str(values.get("model_type")))
    config_class, model_class = family.layouts[values["model_type"]]
    ids = {"mask_token_id": mask_token_id, "eos_token_id": eos_token_id, "eot_token_id": eot_token_id}
    values.update({name: value for name, value in ids.items() if value is not None})
    values.pop("auto_map", None)
    config = config_class.from_dict(values)
    tokenizer = _load_tokenizer(str(Path(source).parent) if Path(source).is_file() else source, options)
    prepare_config(config, family, tokenizer)
    model = _load_weights(
        model_class,
        weights,
        config=config,
        dtype="auto" if dtype is None else dtype,
        device_map=device_map,
        attn_implementation=attn_implementation,
        **options,
    )
    return attach(model, family, tokenizer)


def attach(model: PreTrainedModel, family: Family, tokenizer: Any = None) -> PreTrainedModel:
    """Finish a model: hook points, tokenizer, the sampler's settings, eval mode."""
    add_hook_points(model)
    extras: Any = model  # attributes that transformers' class does not declare
    extras.tokenizer = tokenizer
    own = getattr(model.config, "sampler_defaults", None) or {}
    extras.sampler_defaults = {**family.samplers[family.sampler_of(model.config)], **own}
    return model.eval()


def prepare_config(config: Any, family: Family, tokenizer: Any = None) -> None:
    """Fill in the special ids and check them.

    Raises:
        ValueError: an unknown sampler, a masked DLM without a mask token id, or with one that has no embedding row.
    """
    family.sampler_of(config)
    if family.causal:
        return
    vocabulary = config.vocab_size
    for name, value in family.special_ids.get(vocabulary, {}).items():
        if getattr(config, f"{name}_token_id", None) is None:
            setattr(config, f"{name}_token_id", value)
    known = getattr(tokenizer, "mask_token_id", None)
    if config.mask_token_id is None:
        config.mask_token_id = known
    if config.mask_token_id is None:
        raise ValueError(
            "neither config.json nor the tokenizer names a mask token; pass mask_token_id= to dlm_lens.load"
        )
    rows = getattr(config, "embedding_rows", vocabulary)
    if not 0 <= config.mask_token_id < rows:
        raise ValueError(
            f"mask_token_id {config.mask_token_id} has no row in an embedding of {rows}; "
            "pass the right mask_token_id= to dlm_lens.load"
        )
    if known is not None and known != config.mask_token_id:
        logger.warning(
            "the tokenizer's mask token is %d, the config's %d; the config is used", known, config.mask_token_id
        )


def _resolve(name: str | Path, options: dict[str, Any]) -> str:
    if str(name) in embedded_models():
        return str(CHECKPOINTS / str(name))
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        raise FileNotFoundError(f"{path} holds no config.json; give the directory that does, or a hub name")
    if not path.exists() and (isinstance(name, Path) or str(name).startswith((".", "/", "~"))):
        raise FileNotFoundError(f"{path} is no directory; give a checkpoint's directory or a hub name")
    if not path.exists() and path.suffix == ".safetensors" and len(path.parts) > 2:
        return _hub_file("/".join(path.parts[:2]), "/".join(path.parts[2:]), options)
    return str(name)


def _hub_file(repository: str, name: str, options: dict[str, Any]) -> str:
    try:
        return str(cached_file(repository, name, **options))
    except OSError as error:
        raise FileNotFoundError(
            f"{repository}/{name} is no file here, and {name} could not be read from the hub's {repository!r}: "
            f"{error}"
        ) from error


def _describe(source: str, size: str | None, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The config's values, and where the weights are: those of a transformers checkpoint, or weights alone."""
    path = Path(source)
    alone = path.is_file() or (path.is_dir() and not (path / "config.json").is_file())
    values = {} if alone else _config_dict(source, options)
    if "model_type" in values:
        if size is not None:
            raise ValueError(f"size is for weights without a config; {source} has one: leave size out")
        return values, source
    held = _optional_file(source, "model.safetensors", options) if not path.exists() else None
    weights = bare_file(path) if path.exists() else held and Path(held)
    if not weights:
        raise ValueError(f"the config.json of {source} names no model_type, and there are no safetensors weights")
    return bare_config(weights, size), str(weights)


def _config_dict(source: str, options: dict[str, Any]) -> dict[str, Any]:
    try:
        values, _ = PreTrainedConfig.get_config_dict(source, **options)
    except OSError as error:
        raise FileNotFoundError(
            f"{source!r} is neither an embedded model ({', '.join(embedded_models())}) nor a directory, and no "
            f"config.json could be read from the hub under that name: {error}"
        ) from error
    return dict(values)


def _load_tokenizer(source: str, options: dict[str, Any]) -> Any:
    """The tokenizer, or None where the files hold none; never with the checkpoint's own code."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    held = {name: _optional_file(source, name, options) for name in names}
    if not any(held.values()):
        return None
    if held["tokenizer.json"] and _named_class(held["tokenizer_config.json"]) in WHOLE_TOKENIZERS:
        # For some model types (qwen2) AutoTokenizer takes its own class whatever the checkpoint names.
        return PreTrainedTokenizerFast.from_pretrained(source, **options)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
    except ValueError as error:
        # A tokenizer class that only the checkpoint's own Python defines; its data are usually complete.
        if held["tokenizer.json"] is None:
            raise ValueError(
                f"the tokenizer of {source} needs its own Python code, which is not executed, and there is no "
                "tokenizer.json to read instead"
            ) from error
        return PreTrainedTokenizerFast.from_pretrained(source, **options)


def _named_class(tokenizer_config: str | None) -> str | None:
    if tokenizer_config is None:
        return None
    name: str | None = json.loads(Path(tokenizer_config).read_text(encoding="utf-8")).get("tokenizer_class")
    return name


def _optional_file(source: str, name: str, options: dict[str, Any]) -> str | None:
    return cached_file(
        source,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
        **options,
    )


def _load_weights(model_class: type[PreTrainedModel], source: str, **options: Any) -> PreTrainedModel:
    weights = ("model.safetensors", "model.safetensors.index.json")
    revision = {"revision": options["revision"]} if "revision" in options else {}
    if Path(source).is_file():
        # Weights alone: there is no config.json from which transformers could read how to generate.
        options["generation_config"] = GenerationConfig.from_model_config(options["config"])
    elif not any(_optional_file(source, name, revision) for name in weights):
        raise ValueError(
            f"{source} holds no model.safetensors; pickled weights are refused because loading them executes "
            "code: convert them to safetensors first"
        )
    # Sizes that do not match are reported like the rest, by name, instead of by an error that names nothing.
    model, report = model_class.from_pretrained(
        source, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(name if isinstance(name, str) else str(name[0]) for name in report.get(kind) or ())
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(
                f"the weights in {source} do not fit {model_class.__name__}: {kind.replace('_', ' ')} "
                f"{', '.join(names[:5])}{more}"
            )
    return model
