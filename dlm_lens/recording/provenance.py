"""What a recording says of where it comes from: the model's name, versions, the text of its tokens."""

from functools import cache
from importlib.metadata import version
from typing import Any

from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.token_text import TokenTexts, tokenizer_of


def name_of(model: Any) -> str:
    """Name or path of a model."""
    return str(getattr(model.config, "_name_or_path", "") or type(model).__name__)


@cache
def versions() -> dict[str, str]:
    """Of the packages whose arithmetic the numbers are."""
    import dlm_lens

    return {"dlm_lens": dlm_lens.__version__} | {name: version(name) for name in ("torch", "transformers")}


def words_of(model: Any, run: DenoisingRun) -> dict[int, str]:
    """The text of every token id that occurs in a run; none without a tokenizer."""
    tokenizer = tokenizer_of(run, model)
    if tokenizer is None:
        return {}
    texts = TokenTexts(tokenizer)
    return {i: texts.exact(i) for i in run.canvases.unique().tolist()}
