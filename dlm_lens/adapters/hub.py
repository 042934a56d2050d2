"""Files of a checkpoint, in a directory or on the hub, and the reason where one is unavailable."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import PreTrainedConfig
from transformers.utils import cached_file

from dlm_lens.adapters.model_names import LONGEST_PART, embedded_models
from dlm_lens.arguments import near_name
from dlm_lens.files.json_objects import read_object
from dlm_lens.printable import one_line, printable_name, shown


def needed_file(repository: str, name: str, options: dict[str, Any]) -> str:
    """Path of a single file of a hub repository.

    Raises:
        FileNotFoundError: it is unavailable, with the reason.
    """
    try:
        _check_connection(repository, name, options)
        return str(cached_file(repository, name, **options))
    except (OSError, HFValidationError) as error:
        raise FileNotFoundError(
            f"{repository}/{name} is no file here, and on the hub {_why(error, repository, name, options)}"
        ) from error


def optional_file(source: str, name: str, options: dict[str, Any]) -> str | None:
    """Path of a file of a directory or of a hub name, None where there is none.

    Raises:
        ValueError: a name that leads out of the checkpoint.
    """
    if Path(source).is_dir():
        held = file_within(Path(source), name)
        return None if held is None else str(held)
    check_name(source, name)
    return cached_file(
        source,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
        **options,
    )


def local_file(source: str, name: str, options: dict[str, Any]) -> Path | None:
    """As `optional_file`, without a request to the hub: only files on this disk."""
    if Path(source).is_dir():
        return file_within(Path(source), name)
    check_name(source, name)
    found = try_to_load_from_cache(source, name, revision=options.get("revision"))
    return Path(found) if isinstance(found, str) else None


def file_within(directory: Path, name: str) -> Path | None:
    """A file of a checkpoint's directory, None where there is none.

    A symbolic link may lead to a file of the same directory, or to the blobs of the Hugging Face cache.

    Raises:
        ValueError: a name, or a symbolic link, that leads out of the directory.
    """
    check_name(str(directory), name)
    path = directory / name
    if not path.is_file():
        return None
    target, root = path.resolve(), directory.resolve()
    blobs = [place.parent / "blobs" for place in root.parents if place.name == "snapshots"]
    cache = Path(constants.HF_HUB_CACHE).resolve()
    in_cache = target.is_relative_to(cache) and target.parent.name == "blobs"
    if in_cache or any(target.is_relative_to(place) for place in (root, *blobs)):
        return path
    raise ValueError(
        f"{printable_name(str(path), 500)} is a symbolic link to {printable_name(str(target), 500)}, outside the "
        "checkpoint's directory, and is not followed: copy the file into the directory, or load the directory that "
        "holds it"
    )


def check_name(source: str, name: str) -> None:
    """Refuse a file name that leads out of the checkpoint, or is longer than a file's name can be.

    Raises:
        ValueError: an absolute path, or one through "..", or a part of more than `LONGEST_PART` characters.
    """
    path = PurePosixPath(name)
    long = any(len(part) > LONGEST_PART for part in path.parts)
    if long or not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or ":" in name:
        raise ValueError(
            f"{source} names the file {printable_name(name)!r}, which is no path inside the checkpoint, and is not "
            "read: fetch the checkpoint again"
        )


def config_values(source: str, options: dict[str, Any]) -> dict[str, Any]:
    """The contents of config.json.

    Raises:
        FileNotFoundError: it is unavailable, with the reason.
        ValueError: it is no JSON file.
    """
    what = f"the config.json of {source}"
    if Path(source).is_dir() and (held := file_within(Path(source), "config.json")) is not None:
        return read_object(held, what)
    try:
        _check_connection(source, "config.json", options)
        values, _ = PreTrainedConfig.get_config_dict(source, **options)
    except RecursionError as error:
        raise ValueError(f"{what} is nested too deeply; fetch it again") from error
    except (OSError, HFValidationError) as error:
        if isinstance(error.__context__, json.JSONDecodeError | UnicodeDecodeError):
            raise ValueError(f"the config.json of {source} is no JSON file; fetch it again") from error
        hint = near_name(source, embedded_models(), {})
        raise FileNotFoundError(
            f"{shown(source)} is neither an embedded model ({', '.join(embedded_models())}) nor a directory{hint}, "
            f"and as a hub name {_why(error, source, 'config.json', options)}"
        ) from error
    # Read again, with bounds and without the other config files that `configuration_files` may name.
    fetched = local_file(source, "config.json", options)
    return dict(values) if fetched is None else read_object(fetched, what)


def _check_connection(repository: str, name: str, options: dict[str, Any]) -> None:
    """Raise where the hub cannot be reached for a file that is not on this disk.

    One try: transformers makes six of them, which take half a minute, before it says so.

    Raises:
        LocalEntryNotFoundError: no connection.
    """
    if constants.HF_HUB_OFFLINE or local_file(repository, name, options) is not None:
        return
    try:
        get_hf_file_metadata(hf_hub_url(repository, name, revision=options.get("revision")))
    except (OSError, ValueError):
        return  # an answer of the hub or a name that cannot be, of which transformers makes the error
    except Exception as error:  # of the HTTP client, which is another one in other versions of huggingface_hub
        raise LocalEntryNotFoundError(one_line(error)) from error


def _why(error: BaseException, repository: str, name: str, options: dict[str, Any]) -> str:
    """The end of a message: the cause and the remedy."""
    causes: list[BaseException | None] = [error, error.__cause__, error.__context__]
    revision = options.get("revision")
    requested = f"{repository!r}" + (f" at revision {revision!r}" if revision else "")
    reasons: tuple[tuple[Any, str], ...] = (
        (GatedRepoError, f"{requested} is gated: accept its terms on its page, then run `hf auth login`"),
        (
            RevisionNotFoundError,
            f"{requested} does not exist: give a branch, tag or commit of it, or leave revision out",
        ),
        (
            RepositoryNotFoundError,
            f"{requested} does not exist or is private: check the name, or run `hf auth login`",
        ),
        (HFValidationError, f"{shown(repository)} is not of the form 'organisation/name': check the spelling"),
        ((LocalEntryNotFoundError, OfflineModeIsEnabled), _unreachable(requested, repository, name)),
    )
    for kinds, reason in reasons:
        if any(isinstance(cause, kinds) for cause in causes):
            return reason
    return f"{requested} could not be read: {one_line(error)}"


def _unreachable(requested: str, repository: str, name: str) -> str:
    cache = Path(constants.HF_HUB_CACHE)
    snapshots = cache / f"models--{repository.replace('/', '--')}" / "snapshots"
    commits = sorted(path.name for path in snapshots.glob("*") if (path / name).exists())
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
    held = f"pass revision= one of the cached commits ({', '.join(commits[:3])}), or " if commits else ""
    return (
        f"{requested} has no {name} in the cache {cache} while {reason}: {held}load it once with a connection, or "
        "give a checkpoint's directory"
    )
