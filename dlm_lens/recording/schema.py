"""The JSON files of a recording: every field of each, with its kind."""

from typing import Annotated, Any, Literal

from pydantic import Field

from dlm_lens.files.sealed_json import Document

FORMAT = 2
"""Since 2 every file has a checksum."""

Count = Annotated[int, Field(ge=0, le=2**48)]
Window = Annotated[int, Field(ge=1, le=2**48)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Span = Annotated[list[Count], Field(min_length=2, max_length=2)]


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


class ModelDescription(Document):
    """What identifies a model."""

    name: str
    class_name: str = Field(alias="class")
    dtype: str
    weights: str
    windows: list[Window | None] = Field(default_factory=list)


class PromptsDescription(Document):
    """What identifies the prompts of a batch."""

    count: Count
    digest: str


class BatchDescription(Document):
    """Which batch of a recording a directory holds: `rows` [first, last + 1] of so many prompts."""

    prompts: Count
    size: Count
    rows: Span


class Header(Document):
    """header.json of a run: what was requested."""

    format: Literal[2]
    model: ModelDescription
    prompts: PromptsDescription
    settings: dict[str, str | list[int]]
    hooks: list[str]
    reducers: dict[str, ArrayDescription]
    layers: list[Count]
    dtype: Literal["float32", "float16"]
    batch: BatchDescription | None


class SavedHeader(Document):
    """header.json of a recording that was in memory."""

    format: Literal[2]
    saved: Literal[True]


class ManifestLine(Document):
    """A line of manifest.jsonl: a shard that is whole.

    `of` is the checksum of the header, `plan` the step's index, total, block, span and what remains.
    """

    step: Count
    file: str
    bytes: Count
    digest: Digest
    of: str
    plan: Annotated[list[Count], Field(min_length=6, max_length=6)]
    over: bool
    remembers: bool


class DecodingDescription(Document):
    """What decodes the words beside themselves, see `StoredTokenizer`."""

    all_special_ids: list[Count]
    mask_token_id: Count | None
    eos_token_id: Count | None
    between: Literal["", " "]
    strip: bool


class RunFacts(Document):
    """run.json: everything of a finished run that is no tensor, and the digests of the other files."""

    files: dict[Literal["header.json", "manifest.jsonl", "run.safetensors"], Digest]
    steps_in_all: Count
    prompt_length: Count
    spans: list[Span]
    blocks: list[Count]
    settings: dict[str, Any]
    eos_token_ids: list[Count]
    specs: list[ArrayDescription]
    rows: list[Count]
    layers: list[Count]
    steps: list[Count]
    heads: list[Count] | None
    sinks: Count
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
