"""The JSON files of a recording, as pydantic models."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from dlm_lens.files.sealed_json import Document

FORMAT = 2
"""Version of the file format; since 2 every file has a checksum."""

Count = Annotated[int, Field(ge=0, le=2**48)]
Sinks = Annotated[int, Field(ge=0, le=2**16)]
"""Learned sink tokens, for each of which every canvas gets a key; published models have at most a few."""

Window = Annotated[int, Field(ge=1, le=2**48)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Span = Annotated[list[Count], Field(min_length=2, max_length=2)]


def _named_hooks(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings whose hooks, if there are any, are texts."""
    hooks = settings.get("hooks", [])
    if not isinstance(hooks, list) or not all(isinstance(hook, str) for hook in hooks):
        raise ValueError(f"hooks is {hooks!r:.80}; it must be a list of texts")
    return settings


class ArrayDescription(Document):
    """An `ArraySpec`."""

    name: str
    dims: Annotated[list[str], Field(min_length=3)]
    unit: str
    formula: str
    reducer: str
    labels: dict[str, list[str]]
    positions: bool
    settings: dict[str, str | int | float | bool]
    zero_padding: bool = False


class ModelDescription(Document):
    """The model of a recording."""

    name: str
    class_name: str = Field(alias="class")
    dtype: str
    weights: str
    windows: list[Window | None] = Field(default_factory=list)


class PromptsDescription(Document):
    """The prompts of a batch: their number and digest."""

    count: Count
    digest: str


class BatchDescription(Document):
    """The batch in a directory: the rows [first, last + 1] of all prompts, and the batch size."""

    prompts: Count
    size: Count
    rows: Span

    @model_validator(mode="after")
    def _among_the_prompts(self) -> "BatchDescription":
        first, end = self.rows
        if not first < end <= self.prompts:
            raise ValueError(f"the rows {first} to {end - 1} are none of {self.prompts} prompts")
        return self


class Header(Document):
    """header.json of a recorded run: the request."""

    format: Literal[2]
    model: ModelDescription
    prompts: PromptsDescription
    settings: dict[str, str | list[int]]
    hooks: list[str]
    reducers: dict[str, ArrayDescription]
    layers: list[Count]
    dtype: Literal["float32", "float16"]
    batch: BatchDescription | None
    config: dict[str, str] = Field(default_factory=dict)
    defaults: dict[str, str] = Field(default_factory=dict)
    identities: dict[str, str] = Field(default_factory=dict)


class SavedHeader(Document):
    """header.json of a recording that was saved from memory."""

    format: Literal[2]
    saved: Literal[True]


class ManifestLine(Document):
    """A line of manifest.jsonl, for a shard that is written completely.

    `of` is the checksum of the header; `plan` has the step's index, total, block, span and remaining steps, and
    `computed` the span that it computed under an approximate cache.
    """

    step: Count
    file: str
    bytes: Count
    digest: Digest
    of: str
    plan: Annotated[list[Count], Field(min_length=6, max_length=6)]
    computed: Span | None = None
    over: bool
    remembers: bool


class DecodingDescription(Document):
    """Settings that decode the token texts, see `StoredTokenizer`."""

    all_special_ids: list[Count]
    mask_token_id: Count | None
    eos_token_id: Count | None
    between: Literal["", " "]
    strip: bool


class RunFacts(Document):
    """run.json: the data of a finished run that are not tensors, and the digests of the other files."""

    files: dict[Literal["header.json", "manifest.jsonl", "run.safetensors"], Digest]
    steps_in_all: Count
    prompt_length: Count
    spans: list[Span]
    blocks: list[Count]
    settings: Annotated[dict[str, Any], AfterValidator(_named_hooks)]
    eos_token_ids: list[Count]
    specs: list[ArrayDescription]
    rows: list[Count]
    layers: list[Count]
    steps: list[Count]
    heads: list[Count] | None
    sinks: Sinks
    causal: bool
    unpadded: bool
    windows: list[Window | None] = Field(default_factory=list)
    model: str
    scale: float | None
    query_heads: Count
    versions: dict[str, str]
    words: dict[Annotated[str, Field(pattern=r"^-?\d{1,18}$")], str]
    decoding: DecodingDescription | None = None
    rows_ran: list[Count] | None = None
    joined_at: list[Count] | None = None
    rows_planned: list[Count] | None = None
    computed: list[Span | None] = Field(default_factory=list)
    hooks: list[str] | None = None
    steps_planned: Count | None = None
    block_numbers: list[Count] = Field(default_factory=list)
    rows_ran_in_all: list[Count] | None = None
