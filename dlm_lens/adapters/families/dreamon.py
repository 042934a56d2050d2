"""DreamOn: Dream, whose masks may become two masks or none, so that a gap gets as many tokens as it needs."""

from typing import Any

from dlm_lens.adapters.families.dream import DreamConfig, DreamModel
from dlm_lens.adapters.registry import Family

SAMPLER = {"gen_length": 60, "start_length": 4, "temperature": 0.2, "remasking": "entropy", "top_p": 0.9}
"""Of the model card's example: a gap of 4 masks that grows to 64 at most; the temperature and top_p are its own."""


class DreamOnConfig(DreamConfig):
    """Config of DreamOn: Dream's fields, and the token that a mask is expanded by. It is deleted by `eos_token_id`.

    Raises:
        ValueError: an `expand_token_id` that the vocabulary does not have.
    """

    model_type = "DreamOn"
    expand_token_id: int = 151667

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the token."""
        super().__post_init__(**kwargs)
        if not 0 <= self.expand_token_id < self.vocab_size:
            raise ValueError(
                f"expand_token_id is {self.expand_token_id}, and the vocabulary has {self.vocab_size} tokens; "
                "give the id of the token that the model was trained to expand a mask by"
            )


class DreamOnModel(DreamModel):
    """DreamOn-7B; the layers are Dream's. Its sampler changes the length of the text."""

    config_class = DreamOnConfig


FAMILY = Family(
    name="dreamon",
    layouts={"DreamOn": (DreamOnConfig, DreamOnModel)},
    samplers={"dreamon": SAMPLER},
    hub_names=("Dream-org/DreamOn-v0-7B",),
    # Its config.json is Dream's, with this field.
    adapted={"Dream": "DreamOn"},
    adapted_field="expand_token_id",
    special_ids={152064: {"mask": 151666, "eos": 151643}},
    tokenizer_classes={"DreamTokenizer": "Qwen2Tokenizer"},
    tiny={"expand_token_id": 60},
)
