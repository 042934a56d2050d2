"""Loading's checks of a family of one's own: its logits are its output embedding of its decoder's states."""

from typing import Any

import pytest
import torch

from dlm_lens.adapters.model_preparation import check_model
from dlm_lens.testing import tiny


def changed(**methods: Any) -> Any:
    """A tiny LLaDA of a class that overrides these methods."""
    model = tiny("llada")
    model.__class__ = type("Own", (type(model),), methods)
    return model


def test_logits_that_are_no_output_embedding_of_the_states_are_refused() -> None:
    host = type(tiny("llada"))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = host.forward(self, *args, **kwargs)
        output.logits = 0.25 * output.logits
        return output

    with pytest.raises(ValueError, match="the logits of Own are not its output embedding applied to its decoder's"):
        check_model(changed(forward=forward))


def test_a_family_without_an_output_embedding_is_refused_by_name() -> None:
    message = r"Own has no decoder with an output embedding: .* get_output_embeddings\(\) give the two"
    with pytest.raises(ValueError, match=message):
        check_model(changed(get_output_embeddings=lambda self: None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llada", {}),
        ("sink_qwen", {"num_sinks": 2}),
        ("modernbert", {}),
        ("sedd", {}),
        ("gidd_dit", {}),
        ("bd3lm", {}),
    ],
)
def test_families_pass_in_two_forward_passes(family: str, fields: dict[str, Any], dtype: torch.dtype) -> None:
    model, passes = tiny(family, **fields).to(dtype), list[int]()
    model.get_decoder().register_forward_hook(lambda module, args, output: passes.append(1))
    check_model(model)
    assert len(passes) == 2
