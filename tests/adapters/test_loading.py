import json
import logging
import pickle
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import dlm_lens
from dlm_lens.adapters import family_of
from dlm_lens.testing import tiny

GOLDEN = Path(__file__).parent.parent / "golden" / "llada"


def copy_golden(directory: Path, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    shutil.copy(GOLDEN / "model.safetensors", directory)
    config = json.loads((GOLDEN / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    return directory


def booby_trap(directory: Path, marker: Path) -> Path:
    """A checkpoint every Python file of which writes `marker` when executed."""
    trap = f"open({str(marker)!r}, 'w').write('executed')\n"
    copy_golden(directory)
    for name in ("configuration_llada", "modeling_llada", "tokenization_llada"):
        (directory / f"{name}.py").write_text(trap + "class LLaDAConfig: ...\nclass LLaDAModelLM: ...\n")
    (directory / "custom_generate").mkdir()
    (directory / "custom_generate" / "generate.py").write_text(trap + "def generate(model, **kw): ...\n")
    tiny("llada").tokenizer.save_pretrained(directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "LLaDATokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_llada.LLaDATokenizer", "tokenization_llada.LLaDATokenizer"]},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize("environment", [{}, {"HF_HUB_TRUST_REMOTE_CODE": "1", "TRUST_REMOTE_CODE": "true"}])
def test_code_that_came_with_a_checkpoint_is_never_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    marker = tmp_path / "marker"
    path = booby_trap(tmp_path / "trap", marker)
    for options in ({}, {"dtype": "float32"}, {"attn_implementation": "hooked"}, {"mask_token_id": 247}):
        model = dlm_lens.load(path, **options)
        assert type(model).__module__ == "dlm_lens.adapters.families.llada"
        assert model.tokenizer("w3 w4")["input_ids"] == [3, 4]
    run = dlm_lens.denoise(model, "w3 w4", gen_length=4)
    assert run.masks_left.tolist() == [0]
    assert not marker.exists()


@pytest.mark.parametrize("trust", [False, True])
def test_the_auto_classes_take_the_native_ones_even_when_told_to_trust(tmp_path: Path, trust: bool) -> None:
    marker = tmp_path / "marker"
    path = booby_trap(tmp_path / "trap", marker)
    dlm_lens.families()
    assert type(AutoConfig.from_pretrained(path, trust_remote_code=trust)).__name__ == "LLaDAConfig"
    for auto in (AutoModel, AutoModelForCausalLM):
        model = auto.from_pretrained(path, trust_remote_code=trust)
        assert type(model).__module__ == "dlm_lens.adapters.families.llada"
    assert not marker.exists()


def test_pickled_weights_are_refused_and_never_opened(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self) -> Any:
            return open, (str(marker), "w")

    copy_golden(tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm": Bomb()}))
    with pytest.raises(ValueError, match=r"pickled weights are refused .* convert them to safetensors"):
        dlm_lens.load(tmp_path / "pickled")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (
            ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
            "no model.safetensors.index.json",
        ),
        (("model.fp16.safetensors",), "model.fp16.safetensors and no model.safetensors: rename the file"),
        (
            ("pytorch_model.safetensors", "pytorch_model.bin"),
            "pytorch_model.safetensors and no .*: rename the file",
        ),
        (("llada.gguf",), "llada.gguf and no model.safetensors, and GGUF files are not read: take the"),
        ((), "holds no model.safetensors, nor other weights: fetch it too"),
    ],
)
def test_weights_under_other_names_are_told_from_pickled_ones(
    held: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    content = (copy_golden(tmp_path) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").unlink()
    for name in held:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        dlm_lens.load(tmp_path)
    assert "pickled" not in str(error.value)


@pytest.mark.parametrize("name", ["a" * 5000, "x/" * 3000, Path("b" * 300)])
def test_a_name_that_is_too_long_is_told_in_a_short_sentence(name: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"longer than a path or a hub name can be \({len(str(name))} char"
    ) as error:
        dlm_lens.load(name)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize("model_type", [None, [], 5, ""])
def test_a_model_type_that_is_no_name_is_told(model_type: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"says model_type = {re.escape(repr(model_type))}; it must be the name"):
        dlm_lens.load(copy_golden(tmp_path, model_type=model_type))


def test_a_file_of_a_whole_checkpoint_asks_for_its_directory(tmp_path: Path) -> None:
    """Not for the config.json that lies beside it."""
    path = copy_golden(tmp_path / "whole") / "model.safetensors"
    with pytest.raises(
        ValueError, match=rf"^{path} is a file of a checkpoint with a config.json; give its directory, "
    ):
        dlm_lens.load(path)
    (path.parent / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"put the config.json that came with the weights beside them"):
        dlm_lens.load(path)


def test_weights_of_a_family_that_needs_a_config_ask_for_it(tmp_path: Path) -> None:
    tiny("causal").save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"are not those of a family .*: put the config.json that came with the"):
        dlm_lens.load(tmp_path)


@pytest.mark.parametrize("settings", [{"steps": -1}, {"block_length": 0}, {"gen_length": 2.5}, {"steps": True}])
def test_counts_in_a_checkpoints_sampler_defaults_are_checked(settings: dict[str, Any], tmp_path: Path) -> None:
    (name,) = settings
    message = rf"says sampler_defaults = .*; it must be an object whose {name} is a whole number from \d, not "
    with pytest.raises(ValueError, match=message):
        dlm_lens.load(copy_golden(tmp_path, sampler_defaults=settings))


def change_weights(path: Path, change: Any) -> Path:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_weights_that_do_not_fit_are_an_error_that_names_them(tmp_path: Path) -> None:
    missing = change_weights(copy_golden(tmp_path / "a"), lambda w: w.pop("model.transformer.ln_f.weight"))
    with pytest.raises(ValueError, match=r"missing keys .*model.norm.weight"):
        dlm_lens.load(missing)
    extra = change_weights(copy_golden(tmp_path / "b"), lambda w: w.update({"model.surplus": torch.ones(1)}))
    with pytest.raises(ValueError, match=r"unexpected keys .*model.surplus"):
        dlm_lens.load(extra)
    name = "model.transformer.ln_f.weight"
    with pytest.raises((ValueError, RuntimeError), match=r"model.norm.weight"):
        dlm_lens.load(change_weights(copy_golden(tmp_path / "c"), lambda w: w.update({name: torch.ones(3)})))


def test_names_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="is no directory; give a checkpoint's directory or a hub name"):
        dlm_lens.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"holds no config.json"):
        dlm_lens.load(tmp_path)
    for nothing in (None, ""):
        with pytest.raises(ValueError, match=rf"{nothing!r} names no model; give an embedded one \(toy"):
            dlm_lens.load(nothing)  # type: ignore[arg-type]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"'nobody/nothing' is neither an embedded model"):
        dlm_lens.load("nobody/nothing")
    with pytest.raises(FileNotFoundError, match=r"nor a directory \(did you mean 'toy'\?\); a hub name has"):
        dlm_lens.load("tyo")
    with pytest.raises(ValueError, match=r"no family loads model_type 'bert'; known model types: .*llada"):
        dlm_lens.load(copy_golden(tmp_path / "bert", model_type="bert"))


@pytest.mark.parametrize("name", ["a/b/c", "C:\\models\\mine", "a b/c", "/dev/null", "a\0b", "x" * 97 + "/y"])
@pytest.mark.parametrize("offline", [True, False])
def test_names_that_no_hub_has_are_told_with_and_without_a_network(
    offline: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    with pytest.raises(
        FileNotFoundError, match="is not of the form 'organisation/name': check the spelling"
    ) as told:
        dlm_lens.load(name)
    assert "is neither an embedded model" in str(told.value)
    assert str(told.value).isprintable()
    if name != "/dev/null":
        with pytest.raises(FileNotFoundError, match="is not of the form 'organisation/name': check the spelling"):
            dlm_lens.load("toy", adapter=name, check=False)


def test_the_home_of_nobody_is_told() -> None:
    sentence = r"^~nobody-here/m begins with the home directory of a user who does not exist; give the full path"
    with pytest.raises(FileNotFoundError, match=sentence):
        dlm_lens.load("~nobody-here/m")
    with pytest.raises(FileNotFoundError, match=sentence):
        dlm_lens.load("toy", adapter="~nobody-here/m", check=False)


def test_a_path_may_begin_with_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_golden(tmp_path / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert dlm_lens.load("~/mine").config.hidden_size == 64
    with pytest.raises(FileNotFoundError, match=r"other is no directory"):
        dlm_lens.load("~/other")


def test_a_mask_token_must_exist(tmp_path: Path) -> None:
    path = copy_golden(tmp_path / "silent", mask_token_id="absent")
    with pytest.raises(
        ValueError, match=r"neither config.json nor the tokenizer names a mask token; pass mask_tok"
    ):
        dlm_lens.load(path)
    assert dlm_lens.load(path, mask_token_id=247).config.mask_token_id == 247
    with pytest.raises(ValueError, match=r"mask_token_id 300 has no row in an embedding of 256"):
        dlm_lens.load(path, mask_token_id=300)


def test_the_tokenizer_supplies_a_mask_token_that_the_config_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copy_golden(tmp_path / "silent", mask_token_id="absent")
    tiny("llada").tokenizer.save_pretrained(path)
    assert dlm_lens.load(path).config.mask_token_id == 63
    with caplog.at_level(logging.WARNING, logger="dlm_lens"):
        assert dlm_lens.load(path, mask_token_id=247).config.mask_token_id == 247
    assert "the tokenizer's mask token is 63, the config's 247" in caplog.text


def test_special_ids_can_be_given(tmp_path: Path) -> None:
    model = dlm_lens.load(GOLDEN, mask_token_id=5, eos_token_id=6, eot_token_id=7)
    assert (model.config.mask_token_id, model.config.eos_token_id, model.config.eot_token_id) == (5, 6, 7)


def test_an_embedded_name_wins_over_a_directory_which_a_path_still_reaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_golden(tmp_path / "toy")
    monkeypatch.chdir(tmp_path)
    assert dlm_lens.load("toy").config.model_type == "sink_qwen"
    assert dlm_lens.load("./toy").config.model_type == "llada"


def test_a_model_is_ready_after_loading() -> None:
    model = dlm_lens.load(str(GOLDEN))
    assert not model.training
    assert model.tokenizer is None
    assert model.sampler_defaults["remasking"] == "low_confidence"
    assert model.config._attn_implementation == "sdpa"
    assert dlm_lens.load(GOLDEN, dtype=torch.float16).dtype == torch.float16
    assert dlm_lens.load(GOLDEN, attn_implementation="hooked").config._attn_implementation == "hooked"


@pytest.mark.parametrize(
    "device_map",
    ["cpu", "auto", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}, torch.device("cpu")],
    ids=["cpu", "auto", "whole", "parts", "device"],
)
def test_device_maps_work_as_in_transformers(device_map: Any) -> None:
    model, plain = dlm_lens.load(GOLDEN, device_map=device_map), dlm_lens.load(GOLDEN)
    ids = torch.arange(5)[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits.cpu()
    if model.device.type == "cpu":
        assert logits.equal(plain(input_ids=ids).logits)
    else:  # "auto" takes a GPU where there is one
        torch.testing.assert_close(logits, plain(input_ids=ids).logits, atol=1e-3, rtol=1e-3)
    run = dlm_lens.denoise(model, ids, gen_length=4)
    assert run.tokens.tolist() == dlm_lens.denoise(plain, ids, gen_length=4).tokens.tolist()


def test_a_sharded_checkpoint_is_spread_by_accelerate(tmp_path: Path) -> None:
    model = dlm_lens.load(GOLDEN)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = dlm_lens.load(tmp_path, device_map="auto")
    assert all(again.state_dict()[name].cpu().equal(value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [("bfloat16", torch.bfloat16), ("torch.float16", torch.float16), ("float64", torch.float64), ("auto", None)],
)
def test_dtypes_by_name(dtype: str, kept: torch.dtype | None) -> None:
    assert dlm_lens.load(GOLDEN, dtype=dtype).dtype == (kept or dlm_lens.load(GOLDEN).dtype)


@pytest.mark.parametrize("family", ["llada_moe", "rnd1", "llada2", "diffusion_gemma"])
def test_mixtures_of_experts_compute_in_float64(family: str, tmp_path: Path) -> None:
    """On a CPU, where torch has no product of groups of tokens in float64."""
    model = tiny(family)
    model.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    wide = dlm_lens.load(tmp_path, dtype="float64")
    assert wide.dtype == torch.float64
    seen: dict[Any, torch.Tensor] = {}
    for one in (model, wide):

        def keep(step: int, canvas: Any, logits: torch.Tensor, one: Any = one) -> None:
            seen.setdefault(one, logits[logits.isfinite()].double())

        dlm_lens.denoise(one, [[3, 4, 5]], gen_length=4, on_logits=keep)
    torch.testing.assert_close(seen[wide], seen[model], atol=1e-4, rtol=1e-4)  # float32 against float64


@pytest.mark.parametrize("dtype", ["bf16", "int8", "float8_e4m3fn", torch.int8, 3])
def test_dtypes_that_cannot_be_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype .* is none that weights are computed in; give .float32., "):
        dlm_lens.load(GOLDEN, dtype=dtype)


def test_errors_of_weights_name_sizes_and_remedies(tmp_path: Path) -> None:
    smaller = copy_golden(tmp_path / "smaller", mlp_hidden_size=64)
    sizes = r"gate_proj.weight \(\[96, 64\] in the file, \[64, 64\] in the model\)"
    with pytest.raises(ValueError, match=sizes + r".* and 4 more; config.json describes another size: take"):
        dlm_lens.load(smaller)
    with pytest.raises(ValueError, match=r"and 4 more; config.json describes a smaller or another model: take the"):
        dlm_lens.load(copy_golden(tmp_path / "shallow", n_layers=2))
    with pytest.raises(ValueError, match=r"missing keys .*; fetch the files again, or check that config.json is"):
        dlm_lens.load(copy_golden(tmp_path / "deep", n_layers=4))
    (copy_golden(tmp_path / "broken") / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"the config.json of .*broken is no JSON file; fetch it again"):
        dlm_lens.load(tmp_path / "broken")


def test_masked_models_refuse_left_to_right_generation() -> None:
    with pytest.raises(NotImplementedError, match=r"use dlm_lens.denoise"):
        tiny("llada").generate(torch.ones(1, 3, dtype=torch.long))


def test_labels_give_the_unshifted_loss() -> None:
    model = tiny("sink_qwen")
    ids = torch.tensor([[3, 63, 5, 63]])
    labels = torch.tensor([[-100, 4, -100, 6]])
    with torch.no_grad():
        out = model(input_ids=ids, labels=labels)
    by_hand = -out.logits[0, [1, 3]].double().log_softmax(-1)[[0, 1], [4, 6]].mean()
    assert out.loss.item() == pytest.approx(by_hand.item(), abs=1e-5)


@pytest.mark.parametrize(
    ("family", "model_type"),
    [(family.name, model_type) for family in dlm_lens.families() for model_type in family.layouts],
)
def test_every_family_round_trips(family: str, model_type: str, tmp_path: Path) -> None:
    model = tiny(family, model_type=model_type)
    model.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    again = dlm_lens.load(tmp_path)
    assert type(again) is type(model)
    assert all(again.state_dict()[name].equal(value) for name, value in model.state_dict().items())
    assert again.tokenizer("w1 w9")["input_ids"] == [1, 9]
    assert again.sampler_defaults == model.sampler_defaults
    assert again.tokenizer.decode([4, 5]) == "w4 w5"


def test_sampler_defaults_travel_with_a_checkpoint(tmp_path: Path) -> None:
    model = tiny("sink_qwen", sampler_defaults={"steps": 8, "gen_length": 16, "block_length": 4})
    assert model.sampler_defaults["gen_length"] == 16
    model.save_pretrained(tmp_path)
    defaults = dlm_lens.load(tmp_path).sampler_defaults
    assert (defaults["steps"], defaults["block_length"], defaults["temperature"]) == (8, 4, 0.0)


def test_families_tell_what_they_load() -> None:
    families = {family.name: family for family in dlm_lens.families()}
    blocks = {"a2d_qwen3", "fast_dllm_v2", "sdar", "llada2", "bd3lm", "nemotron_labs_diffusion", "efficient_dlm"}
    masked = {*blocks, "llada", "mmada", "dream", "smdm", "sink_qwen", "sink_llama", "mdlm", "llada_moe", "dreamon"}
    masked |= {
        "coda",
        "diffugpt",
        "i_dlm",
        "open_dcoder",
        "rnd1",
        "sdlm",
        "sedd",
        "stable_diffcoder",
        "wedlm",
        "gidd_dit",
    }
    others = {"modernbert", "uniform_qwen", "duo", "udlm", "sumi", "gidd", "diffusion_gemma", "causal"}
    assert families.keys() == masked | others
    for path in ("README.md", "CHANGELOG.md"):
        text = (Path(__file__).parents[2] / path).read_text(encoding="utf-8")
        assert f" {len(families)} families as native transformers models" in text
    without = {family.name for family in families.values() if not family.has_mask_token}
    assert without == {"uniform_qwen", "duo", "udlm", "sumi", "diffusion_gemma"}
    assert "GSAI-ML/LLaDA-8B-Instruct" in families["llada"].hub_names
    assert families["llada"].special_ids[126464] == {"mask": 126336, "eos": 126081, "eot": 126348}
    assert families["causal"].causal
    assert not families["llada"].causal
    assert list(families["sink_qwen"].samplers) == ["llada", "dream"]


def test_a_class_of_another_family_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """MDLM and BD3-LM have the same tensors, so that only the class says which one a checkpoint is."""
    model = tiny("mdlm")
    model.save_pretrained(tmp_path)
    dlm_lens.load(tmp_path)
    assert not caplog.messages
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "bd3lm"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    dlm_lens.load(tmp_path)
    assert "says model_type bd3lm and the class MDLM, which is that of mdlm; it is loaded" in caplog.text


def test_an_unknown_sampler_in_a_config_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names the sampler .os\.system.; sink_qwen has llada, dream"):
        tiny("sink_qwen", sampler="os.system")


def test_the_settings_of_a_checkpoint_are_those_of_its_own_sampler() -> None:
    # The toy's file has settings of LLaDA's sampler, cfg_scale among them, which Dream's has not.
    other = dlm_lens.load("toy", sampler="dream")
    assert other.sampler_defaults == family_of("sink_qwen").samplers["dream"]
    assert dlm_lens.denoise(other, "sort 4 2 9 1 :", steps=2, gen_length=4).steps == 2
    assert dlm_lens.load("toy", sampler="llada").sampler_defaults == dlm_lens.load("toy").sampler_defaults


def test_threads_load_at_once_in_their_own_dtypes(tmp_path: Path) -> None:
    dtypes = {"causal": torch.float32, "llada": torch.bfloat16, "sink_qwen": torch.float32}
    for family in dtypes:
        model: Any = tiny(family)
        model.save_pretrained(tmp_path / family)
        model.tokenizer.save_pretrained(tmp_path / family)

    def loaded(family: str) -> Any:
        return dlm_lens.load(tmp_path / family, dtype=dtypes[family])

    before = torch.get_default_dtype()
    try:
        with ThreadPoolExecutor(len(dtypes)) as threads:
            for _ in range(6):
                for model, dtype in zip(threads.map(loaded, dtypes), dtypes.values(), strict=True):
                    assert {value.dtype for value in model.parameters()} == {dtype}
                assert torch.get_default_dtype() == before
    finally:
        torch.set_default_dtype(before)
