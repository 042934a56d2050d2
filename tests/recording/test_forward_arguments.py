"""What `record_forward` reads of the arguments of a forward pass."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, StaticCache

from dlm_lens import DiffusionLM, add_hook_points
from dlm_lens.attention import hooked_attentions
from dlm_lens.recording import ReceivedAttention, record_forward
from dlm_lens.testing import tiny


def test_record_forward_reads_arguments_by_their_names() -> None:
    # LayoutLM's decoder takes the boxes, and not the mask, as its second argument.
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "layoutlm", hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=128
    )
    model = add_hook_points(AutoModelForMaskedLM.from_config(config).eval())
    ids, mask = torch.randint(3, 120, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    boxes = torch.randint(0, 50, (2, 6, 4)).sort(-1).values
    cases: list[dict[str, Any]] = [{}, {"bbox": boxes}]
    for given in cases:
        patterns: list[torch.Tensor] = []
        point = hooked_attentions(model)[0].hook_pattern
        handle = point.register_forward_hook(lambda module, args, out: patterns.append(out.double()))  # noqa: B023
        with torch.no_grad(), record_forward(model, [ReceivedAttention(min_viewers=1)]) as rec:
            model(input_ids=ids, attention_mask=mask, **given)
        handle.remove()
        wanted = patterns[0][1][:, 2:, 2:].sum(1)  # four queries that see four keys
        torch.testing.assert_close(rec.received[0, 1, 0, :, 2:].double(), wanted, rtol=1e-5, atol=1e-5)
        assert rec.received[0, 1, 0, :, :2].isnan().all()


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("t5", {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}),
        ("bart", {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}),
    ],
)
def test_the_encoder_of_an_encoder_decoder_is_recorded_alone(kind: str, sizes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, d_model=32, vocab_size=128, **sizes)
    model = add_hook_points(AutoModelForSeq2SeqLM.from_config(config).eval())
    ids, mask = torch.randint(3, 120, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[0, 8:] = 0
    with torch.no_grad(), record_forward(model.get_encoder(), [ReceivedAttention(min_viewers=1)]) as rec:
        model.get_encoder()(input_ids=ids, attention_mask=mask)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        patterns = model.get_encoder()(input_ids=ids, attention_mask=mask, output_attentions=True).attentions
    wanted = (torch.stack(patterns, 1) * mask[:, None, None, :, None]).sum(-2)
    torch.testing.assert_close(rec.received_sums()[0].nan_to_num(), wanted, rtol=1e-5, atol=1e-5)
    for part in (model, model.get_decoder()):
        with (
            pytest.raises(ValueError, match="record the encoder alone"),
            record_forward(part, [ReceivedAttention()]),
        ):
            pass


def test_record_forward_refuses_a_static_cache() -> None:
    model = tiny("causal")
    cache = StaticCache(config=model.config, max_cache_len=32)
    with (
        record_forward(model, [ReceivedAttention(min_viewers=1)]),
        pytest.raises(ValueError, match="run the forward without a cache"),
    ):
        model(torch.tensor([[5, 9, 14]]), past_key_values=cache)


@torch.no_grad()
def test_record_forward_reads_positional_arguments_after_a_trace_was_prepared() -> None:
    # DiffusionLM sets another `forward` in every module, whose signature begins with self.
    model = tiny("llada")
    ids = torch.tensor([[61, 61, 14, 3, 7, 8, 1, 2, 11, 12, 5, 9]])
    mask = torch.tensor([[0, 0] + [1] * 10])
    DiffusionLM(model)
    for given, content in (((ids, mask), 10), ((ids,), 12)):
        with record_forward(model, [ReceivedAttention(min_viewers=1)]) as rec:
            model.model(*given)
        assert torch.equal(rec.tokens[0], ids)
        received = rec.received[0, 0, 1, 0]
        assert int(received.isnan().sum()) == 12 - content
        torch.testing.assert_close(float(received.nansum()), float(content), rtol=1e-5, atol=1e-5)
