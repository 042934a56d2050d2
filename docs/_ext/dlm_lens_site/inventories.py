"""Intersphinx inventories of the names that our annotations use, so that no build fetches anything.

transformers publishes no inventory, and torch's has to be fetched; a table of what we use is enough.
"""

import zlib
from pathlib import Path

from dlm_lens_site.files import DOCS

PYTHON = "https://docs.python.org/3/"
TORCH = "https://docs.pytorch.org/docs/stable/"
TRANSFORMERS = "https://huggingface.co/docs/transformers/"
PANDAS = "https://pandas.pydata.org/docs/reference/api/"
NUMPY = "https://numpy.org/doc/stable/"
MATPLOTLIB = "https://matplotlib.org/stable/api/"
JAXTYPING = "https://docs.kidger.site/jaxtyping/"

NAMES: dict[str, dict[str, str]] = {
    PYTHON: {
        **{
            name: f"library/functions.html#{name}"
            for name in ("bool", "int", "float", "complex", "object", "type", "property", "super", "slice")
        },
        **{name: f"library/stdtypes.html#{name}" for name in ("str", "bytes", "list", "tuple", "dict", "set")},
        **{name: f"library/stdtypes.html#{name}" for name in ("range", "frozenset", "memoryview")},
        "None": "library/constants.html#None",
        "Ellipsis": "library/constants.html#Ellipsis",
        **{
            name: f"library/exceptions.html#{name}"
            for name in (
                *("ValueError", "TypeError", "KeyError", "IndexError", "AttributeError", "RuntimeError", "OSError"),
                *("ImportError", "MemoryError", "NotImplementedError", "FileNotFoundError", "FileExistsError"),
                *(
                    "Exception",
                    "BaseException",
                    "ArithmeticError",
                    "FloatingPointError",
                    "TimeoutError",
                    "LookupError",
                ),
                *("StopIteration", "ModuleNotFoundError", "PermissionError", "KeyboardInterrupt", "EOFError"),
                *("IsADirectoryError", "NotADirectoryError", "UserWarning", "AssertionError"),
            )
        },
        **{
            f"typing.{name}": f"library/typing.html#typing.{name}"
            for name in ("Any", "Literal", "Annotated", "NamedTuple", "TypedDict", "Unpack", "ClassVar", "Protocol")
        },
        **{
            f"collections.abc.{name}": f"library/collections.abc.html#collections.abc.{name}"
            for name in (
                *("Callable", "Sequence", "Mapping", "Iterable", "Iterator", "Generator", "Collection", "Hashable"),
                *("Sized", "MutableMapping", "KeysView", "Set", "ItemsView"),
            )
        },
        "pathlib.Path": "library/pathlib.html#pathlib.Path",
        "enum.Enum": "library/enum.html#enum.Enum",
        "abc.ABC": "library/abc.html#abc.ABC",
        "contextlib.AbstractContextManager": "library/contextlib.html#contextlib.AbstractContextManager",
        "fractions.Fraction": "library/fractions.html#fractions.Fraction",
        "types.ModuleType": "library/types.html#types.ModuleType",
        "types.TracebackType": "library/types.html#types.TracebackType",
        "os.PathLike": "library/os.html#os.PathLike",
        "random.Random": "library/random.html#random.Random",
    },
    TORCH: {
        "torch.Tensor": "tensors.html#torch.Tensor",
        "torch.device": "tensor_attributes.html#torch.device",
        "torch.dtype": "tensor_attributes.html#torch.dtype",
        "torch.Size": "size.html#torch.Size",
        "torch.Generator": "generated/torch.Generator.html#torch.Generator",
        "torch.nn.Module": "generated/torch.nn.Module.html#torch.nn.Module",
        "torch.nn.Linear": "generated/torch.nn.Linear.html#torch.nn.Linear",
        "torch.nn.Embedding": "generated/torch.nn.Embedding.html#torch.nn.Embedding",
        "torch.nn.Parameter": "generated/torch.nn.parameter.Parameter.html#torch.nn.parameter.Parameter",
        "torch.optim.Optimizer": "optim.html#torch.optim.Optimizer",
        "torch.optim.lr_scheduler.LRScheduler": "optim.html",
        "torch.utils.data.Dataset": "data.html#torch.utils.data.Dataset",
        "torch.utils.data.DataLoader": "data.html#torch.utils.data.DataLoader",
        "torch.utils.data.IterableDataset": "data.html#torch.utils.data.IterableDataset",
        "torch.utils.hooks.RemovableHandle": "generated/torch.nn.Module.html#torch.nn.Module.register_forward_hook",
    },
    TRANSFORMERS: {
        "transformers.PreTrainedModel": "main_classes/model#transformers.PreTrainedModel",
        "transformers.modeling_utils.PreTrainedModel": "main_classes/model#transformers.PreTrainedModel",
        "transformers.PreTrainedConfig": "main_classes/configuration#transformers.PreTrainedConfig",
        "transformers.PretrainedConfig": "main_classes/configuration#transformers.PreTrainedConfig",
        "transformers.PreTrainedTokenizerBase": "internal/tokenization_utils#transformers.PreTrainedTokenizerBase",
        "transformers.Trainer": "main_classes/trainer#transformers.Trainer",
        "transformers.trainer.Trainer": "main_classes/trainer#transformers.Trainer",
        "transformers.TrainerCallback": "main_classes/callback#transformers.TrainerCallback",
        "transformers.trainer_callback.TrainerCallback": "main_classes/callback#transformers.TrainerCallback",
        "transformers.TrainingArguments": "main_classes/trainer#transformers.TrainingArguments",
        "transformers.training_args.TrainingArguments": "main_classes/trainer#transformers.TrainingArguments",
    },
    PANDAS: {
        "pandas.DataFrame": "pandas.DataFrame.html#pandas.DataFrame",
        "pandas.Series": "pandas.Series.html#pandas.Series",
    },
    NUMPY: {
        "numpy.ndarray": "reference/generated/numpy.ndarray.html#numpy.ndarray",
        "numpy.random.Generator": "reference/random/generator.html#numpy.random.Generator",
    },
    MATPLOTLIB: {
        "matplotlib.figure.Figure": "figure_api.html#matplotlib.figure.Figure",
        "matplotlib.axes.Axes": "_as_gen/matplotlib.axes.Axes.html#matplotlib.axes.Axes",
    },
    JAXTYPING: {
        f"jaxtyping.{name}": "api/array/"
        for name in (
            "Float",
            "Float32",
            "Float64",
            "Int",
            "Int64",
            "Integer",
            "Bool",
            "Shaped",
            "Num",
            "Real",
            "UInt8",
        )
    },
}
"""Address of a documentation -> names of Python objects -> page below it."""


def inventories() -> dict[str, tuple[str, str]]:
    """Write the inventories below `docs/_pages/inventories`; the value of `intersphinx_mapping`."""
    folder = DOCS / "_pages" / "inventories"
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for address, names in NAMES.items():
        project = next(iter(names)).split(".")[0] if address != PYTHON else "python"
        path = folder / f"{project}.inv"
        _write(path, project, names)
        mapping[project] = (address, str(path))
    return mapping


def _write(path: Path, project: str, names: dict[str, str]) -> None:
    head = (
        "# Sphinx inventory version 2\n"
        f"# Project: {project}\n"
        "# Version: \n"
        "# The remainder of this file is compressed using zlib.\n"
    )
    lines = "".join(f"{name} py:class 1 {place} -\n" for name, place in sorted(names.items()))
    path.write_bytes(head.encode() + zlib.compress(lines.encode()))
