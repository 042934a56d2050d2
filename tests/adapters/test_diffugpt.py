"""Parity with the original DiffuGPT and DiffuLLaMA: every intermediate, the loss; their files; saving."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import dlm_lens
from dlm_lens.adapters.families.diffugpt import DiffuGPTConfig, DiffuGPTModel, DiffuLlamaConfig, DiffuLlamaModel
from dlm_lens.adapters.model_preparation import prepare_config
from dlm_lens.adapters.registry import family_of, model_type_of
from dlm_lens.attention import check_hook_points
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN, collect

PATHS = {"diffugpt": GOLDEN / "diffugpt", "diffullama": GOLDEN / "diffullama"}
FACTS = {name: json.loads((path / "forward.json").read_text()) for name, path in PATHS.items()}
CASES = [(name, case["name"]) for name, facts in FACTS.items() for case in facts["cases"]]


def loaded(name: str, **options: Any) -> Any:
    """The golden's model; its vocabulary is too small for the released checkpoints' mask tokens."""
    return dlm_lens.load(PATHS[name], family="diffugpt", mask_token_id=FACTS[name]["mask_token_id"], **options)


def collected(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Every intermediate of one forward pass under the golden's names."""
    if not isinstance(model, GPT2LMHeadModel):
        return collect(model, ids)
    seen: dict[str, Tensor] = {}

    def keep(module: torch.nn.Module, name: str) -> Any:
        def store(_module: Any, _inputs: Any, output: Any) -> None:
            seen[name] = output[0] if isinstance(output, tuple) else output

        return module.register_forward_hook(store)

    handles = [keep(model.transformer.drop, "hidden.embed"), keep(model.transformer.ln_f, "hidden.final_norm")]
    for index, layer in enumerate(model.transformer.h):
        handles += [keep(layer, f"hidden.block{index}"), keep(layer.mlp, f"mlp_out{index}")]
        handles.append(keep(layer.attn.c_proj, f"attn_out{index}"))
        for point, name in (("q", "q"), ("k", "k"), ("v", "v"), ("pattern", "probs"), ("z", "z")):
            handles.append(keep(getattr(layer.attn, f"hook_{point}"), f"{name}{index}"))
    seen["logits"] = model(input_ids=ids).logits
    for handle in handles:
        handle.remove()
    for name, value in seen.items():
        if name[0] in "qkv":
            seen[name] = value.transpose(1, 2)
        elif name[0] == "z":
            seen[name] = value.flatten(-2)
    return seen


@pytest.mark.parametrize(("name", "case"), CASES)
@torch.no_grad()
def test_every_intermediate_equals_the_original(name: str, case: str) -> None:
    model, golden = loaded(name), load_file(PATHS[name] / "forward.safetensors")
    seen = collected(model, golden[f"{case}.input_ids"])
    names = [key.removeprefix(f"{case}.") for key in golden if key.startswith(f"{case}.")]
    names = [key for key in names if key not in ("input_ids", "logits_bfloat16")]
    for key in names:
        # The original differs from itself in float64 by 2.0e-5 at most.
        torch.testing.assert_close(
            seen[key], golden[f"{case}.{key}"], **CLOSE, msg=lambda m, key=key: f"{key}: {m}"
        )
    # Embedding, final norm, logits; per layer block, q, k, v, pattern, z, attention and MLP outputs.
    assert len(names) == 3 + 8 * model.config.num_hidden_layers
    plain = model(input_ids=golden[f"{case}.input_ids"]).logits
    torch.testing.assert_close(plain, golden[f"{case}.logits"], **CLOSE)


@pytest.mark.parametrize("name", PATHS)
@torch.no_grad()
def test_bfloat16_is_near_the_original(name: str) -> None:
    model = loaded(name, dtype="bfloat16", attn_implementation="eager")
    golden = load_file(PATHS[name] / "forward.safetensors")
    difference = model(input_ids=golden["plain_b1.input_ids"]).logits.float() - golden["plain_b1.logits_bfloat16"]
    # On the CPU that made the golden DiffuLLaMA is equal; the original's GPT-2 divides the rounded scores by
    # sqrt(d_head), transformers' own today scales the product. Another CPU's sums differ by a few ulps of 11.
    assert difference.abs().max() <= 0.25
    assert difference.abs().mean() < 0.03


@pytest.mark.parametrize("name", PATHS)
@torch.no_grad()
def test_the_loss_of_the_model_is_the_original_without_its_weights(name: str) -> None:
    model, golden = loaded(name), json.loads((PATHS[name] / "loss.json").read_text())
    x, noised = torch.tensor(golden["x"]), torch.tensor(golden["x_t"])
    masked = noised == FACTS[name]["mask_token_id"]
    masked[:, 0] = False  # the original scores no first position
    output = model(input_ids=noised, labels=x.masked_fill(~masked, -100))
    torch.testing.assert_close(float(output.loss), golden["unweighted_loss"], rtol=1e-5, atol=0)
    each = cross_entropy(output.logits[:, :-1].transpose(1, 2), x[:, 1:], reduction="none") * masked[:, 1:]
    torch.testing.assert_close(each, torch.tensor(golden["loss_per_token"]), **CLOSE)
    weighted = (each / torch.tensor(golden["t"])[:, None]).sum() / masked.sum()
    torch.testing.assert_close(float(weighted), golden["final_loss"], rtol=1e-5, atol=0)


def test_saving_writes_the_original_names_back(tmp_path: Path) -> None:
    for name, path in PATHS.items():
        model = loaded(name)
        check_hook_points(model)
        model.save_pretrained(tmp_path / name)
        original, written = load_file(path / "model.safetensors"), load_file(tmp_path / name / "model.safetensors")
        assert original.keys() == written.keys()
        assert all(original[key].equal(written[key]) for key in original)
        again = dlm_lens.load(tmp_path / name)
        assert (type(again), again.config.model_type) == (type(model), name)
        assert (again.config.logit_shift, again.config.use_cache) == (True, False)
        ids = torch.arange(3, 12)[None]
        assert again(input_ids=ids).logits.equal(model(input_ids=ids).logits)


def test_a_new_model_is_saved_under_the_original_names(tmp_path: Path) -> None:
    tiny("diffugpt").save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {name.split(".")[0] for name in names} == {"denoise_model", "embed_tokens"}
    assert isinstance(dlm_lens.load(tmp_path), DiffuGPTModel)


def test_the_head_is_the_embedding() -> None:
    model = loaded("diffugpt")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert loaded("diffullama").lm_head.weight is not loaded("diffullama").model.embed_tokens.weight


def test_diffugpt_is_told_by_its_tensors_or_its_class(tmp_path: Path) -> None:
    """Its config.json is GPT-2's, with the class of the authors' code or with GPT-2's own."""
    mask = FACTS["diffugpt"]["mask_token_id"]
    values = json.loads((PATHS["diffugpt"] / "config.json").read_text())
    assert (values["model_type"], values["architectures"]) == ("gpt2", ["DiscreteDiffusionModel"])
    shutil.copytree(PATHS["diffugpt"], tmp_path / "tensors")
    changed = values | {"architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "tensors" / "config.json").write_text(json.dumps(changed))
    shutil.copytree(PATHS["diffugpt"], tmp_path / "class")
    renamed = {
        key.replace("denoise_model.", "transformer.").replace("embed_tokens.", "transformer.wte."): value
        for key, value in load_file(PATHS["diffugpt"] / "model.safetensors").items()
    }
    save_file(renamed, tmp_path / "class" / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(3, 12)[None]
    wanted = loaded("diffugpt")(input_ids=ids).logits
    for name in ("tensors", "class"):
        model = dlm_lens.load(tmp_path / name, mask_token_id=mask)
        assert isinstance(model, DiffuGPTModel)
        assert model(input_ids=ids).logits.equal(wanted)
        with pytest.raises(ValueError, match="names a mask token"):
            dlm_lens.load(tmp_path / name)


def test_the_released_checkpoints_are_known_by_their_names() -> None:
    for name, own, wanted in (
        ("diffusionfamily/diffugpt-s", "gpt2", "diffugpt"),
        ("diffusionfamily/diffugpt-m", "gpt2", "diffugpt"),
        ("diffusionfamily/diffullama", "llama", "diffullama"),
    ):
        for architectures in (None, ["GPT2LMHeadModel"], ["LlamaForCausalLM"]):
            assert model_type_of({"model_type": own, "architectures": architectures}, name) == wanted
        assert model_type_of({"model_type": own}, "some-lab/other") == own
    both = {"model_type": "llama", "architectures": ["DiscreteDiffusionModel"]}
    assert model_type_of(both, "some-lab/other") == "diffullama"
    assert set(family_of("diffugpt").hub_names) == {
        f"diffusionfamily/diffu{end}" for end in ("gpt-s", "gpt-m", "llama")
    }


def test_a_directory_of_diffullama_needs_its_family(tmp_path: Path) -> None:
    causal = dlm_lens.load(PATHS["diffullama"])  # nothing in the files differs from Llama's
    assert type(causal) is LlamaForCausalLM
    model = loaded("diffullama")
    assert isinstance(model, DiffuLlamaModel)
    ids = torch.arange(3, 12)[None]
    assert (model(input_ids=ids).logits - causal(input_ids=ids).logits).abs().max() > 1


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("diffusion", r"family is 'diffusion' \(did you mean 'diffusion_gemma'\?\); there are .*diffugpt"),
        ("llada", "says model_type 'llama', and llada has llada: leave family out"),
        (7, "family is 7"),
    ],
)
def test_a_family_that_cannot_be_is_refused(family: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dlm_lens.load(PATHS["diffullama"], family=family)


def test_a_family_may_be_that_of_the_config() -> None:
    assert type(dlm_lens.load(PATHS["diffullama"], family="causal")) is LlamaForCausalLM
    assert dlm_lens.load(GOLDEN / "llada", family="llada").config.model_type == "llada"


@pytest.mark.parametrize(
    ("values", "tokens", "mask", "rows", "found"),
    [
        # diffugpt-s: GPT-2's tokenizer, whose id 10541 is the mask.
        ({"vocab_size": 50257}, 50257, None, 50257, 10541),
        # diffugpt-m: one more token, whether its config.json says so or is still GPT-2's.
        ({"vocab_size": 50257}, 50258, 50257, 50258, 50257),
        ({"vocab_size": 50258}, 50258, 50257, 50258, 50257),
        # An even number of rows, as the original's pad_to_multiple_of=2.
        ({"vocab_size": 50257}, 50259, 50258, 50260, 50258),
        ({"vocab_size": 50258}, None, None, 50258, 50257),
    ],
)
def test_the_embedding_has_the_tokenizers_rows(
    values: dict[str, int], tokens: int | None, mask: int | None, rows: int, found: int
) -> None:
    class Tokenizer:
        mask_token_id = mask

        def __len__(self) -> int:
            return tokens or 0

    config = DiffuGPTConfig(**values)
    prepare_config(config, family_of("diffugpt"), None if tokens is None else Tokenizer())
    assert (config.vocab_size, config.mask_token_id, config.eos_token_id) == (rows, found, 50256)


def test_a_config_with_fewer_rows_than_the_tokenizer_loads(tmp_path: Path) -> None:
    """As the released medium model's, if its config.json still has GPT-2's vocabulary."""
    shutil.copytree(PATHS["diffugpt"], tmp_path / "model")
    values = json.loads((PATHS["diffugpt"] / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(values | {"vocab_size": 151}))
    mask = FACTS["diffugpt"]["mask_token_id"]
    words = {"[MASK]" if index == mask else f"w{index}": index for index in range(159)}  # 160 rows: an even number
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0", mask_token="[MASK]"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    model = dlm_lens.load(tmp_path / "model")
    assert (model.config.vocab_size, model.config.mask_token_id) == (160, mask)
    ids = torch.arange(3, 12)[None]
    assert model(input_ids=ids).logits.equal(loaded("diffugpt")(input_ids=ids).logits)


def test_diffullama_has_a_token_of_llama_for_its_mask(caplog: pytest.LogCaptureFixture) -> None:
    config = DiffuLlamaConfig(vocab_size=32000)
    with caplog.at_level(logging.WARNING):
        prepare_config(config, family_of("diffullama"))
    assert (config.mask_token_id, config.vocab_size, config.eos_token_id) == (811, 32000, 2)
    assert not caplog.records


def test_the_defaults_are_those_of_the_authors_scripts() -> None:
    assert loaded("diffugpt").sampler_defaults == {
        "steps": 64,
        "gen_length": 128,
        "temperature": 0.95,
        "top_p": 0.9,
    }
    assert loaded("diffullama").sampler_defaults["temperature"] == 0.9


@pytest.mark.parametrize("name", ["reorder_and_upcast_attn", "add_cross_attention"])
def test_options_that_are_other_networks_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=True; only False is implemented"):
        DiffuGPTConfig(**{name: True})


def test_positions_end_with_the_embedding_of_positions() -> None:
    with pytest.raises(ValueError, match="64"):
        dlm_lens.denoise(loaded("diffugpt"), [[1, 2, 3]], gen_length=62, steps=2)


@pytest.mark.parametrize("name", PATHS)
@torch.no_grad()
def test_padding_is_hidden_and_positions_count_from_the_first_token(name: str) -> None:
    """The original has no padding: a padded row is what it is alone."""
    model, ids = loaded(name), torch.arange(5, 15)[None]
    padded, mask = torch.cat([torch.full((1, 3), 7), ids], 1), torch.tensor([[0] * 3 + [1] * 10])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = model(input_ids=padded, attention_mask=mask, position_ids=positions).logits[:, 3:]
    torch.testing.assert_close(found, model(input_ids=ids).logits, **CLOSE)


@pytest.mark.parametrize("stock", [GPT2LMHeadModel, LlamaForCausalLM])
@torch.no_grad()
def test_the_layers_are_transformers_with_everything_visible(stock: Any) -> None:
    name = "diffugpt" if stock is GPT2LMHeadModel else "diffullama"
    model = tiny("diffugpt", model_type=name)
    kind = GPT2Config if stock is GPT2LMHeadModel else LlamaConfig
    values = {key: value for key, value in model.config.to_dict().items() if key in kind().to_dict()}
    plain = stock._from_config(kind(**values | {"model_type": kind.model_type}), attn_implementation="eager").eval()
    plain.load_state_dict(model.state_dict())
    ids = torch.arange(1, 12)[None]
    everything = torch.zeros(1, 1, 11, 11)
    torch.testing.assert_close(
        plain(input_ids=ids, attention_mask=everything).logits, model(input_ids=ids).logits, **CLOSE
    )
