"""`check_checkpoint`: what is right passes, and every kind of wrong checkpoint is named."""

import json
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import dlm_lens
from dlm_lens.cli.app import app
from dlm_lens.evaluation import ReferenceLogits, check_checkpoint, checkpoint_check
from dlm_lens.evaluation.checkpoint_check import TEXTS, default_texts, least_successes, relative_gap
from dlm_lens.files.sealed_json import DamagedFileError
from dlm_lens.findings import Finding, checked
from dlm_lens.testing import tiny
from tests.adapters.golden import GOLDEN

FAMILIES = ("llada", "dream", "mdlm", "duo", "sdar", "smdm", "causal", "diffusion_gemma", "fast_dllm_v2", "wedlm")
FAMILIES += ("nemotron_labs_diffusion", "efficient_dlm", "stable_diffcoder", "sdlm", "i_dlm", "gidd_dit")
WORDS = [" ".join(f"w{(7 * i * j + 3 * i + j * j) % 55}" for j in range(1, 13)) for i in range(1, 13)]


def found(model: Any, *args: Any, **options: Any) -> dict[str, Finding]:
    return {each.subject: each for each in check_checkpoint(model, *args, **options)}


def found_first(name: str, model: Any, *args: Any) -> Finding:
    """One finding, without the checks behind it."""
    return next(each for each in check_checkpoint(model, *args) if each.subject == name)


@pytest.fixture(scope="module")
def toy() -> Any:
    return dlm_lens.load("toy")


@pytest.fixture(scope="module")
def of_toy(toy: Any) -> dict[str, Finding]:
    return found(toy)


def test_the_embedded_models_pass(of_toy: dict[str, Finding]) -> None:
    for findings in (of_toy, found(dlm_lens.load("toy-ar"))):
        assert [each.subject for each in findings.values() if each.good is False] == []
        assert [name for name, each in findings.items() if each.good] == [
            "special ids", "texts", "patterns", "reading", "denoising"
        ]  # fmt: skip
        assert "12 of 12 texts better in order" in findings["reading"].found
        assert "answer 6 ." in findings["denoising"].found  # the first problem, 7 + 8 + 10 - 19
    assert "mask 3 ([MASK])" in of_toy["special ids"].found


def test_a_special_token_writes_no_line_of_its_own(tmp_path: Path) -> None:
    model = tiny("llada")
    model.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    forged = "[MASK])\nok  reading  0.10 nats a token"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = tmp_path / name
        file.write_text(file.read_text().replace('"[MASK]"', json.dumps(forged)))
    said = found_first("special ids", dlm_lens.load(tmp_path)).found
    assert "\n" not in said
    assert "[MASK])\\nok  reading" in said


@pytest.mark.parametrize("family", FAMILIES)
def test_a_network_that_was_never_trained_does_not_read(family: str) -> None:
    findings = found(tiny(family), WORDS, gen_length=8)
    # No likelihood of DiffusionGemma is defined.
    assert findings["reading"].good is (None if family == "diffusion_gemma" else False)
    assert {name for name, each in findings.items() if each.good} == {
        "special ids",
        "texts",
        "patterns",
        "denoising",
    }


def test_another_mask_token_is_named(toy: Any) -> None:
    wrong = dlm_lens.load("toy", mask_token_id=100)
    finding = found_first("special ids", wrong)
    assert finding.good is False
    assert "mask token is 100, and the tokenizer's is 3" in finding.found


def test_the_nats_of_reading_are_those_of_the_likelihood(toy: Any, of_toy: dict[str, Finding]) -> None:
    texts = default_texts(toy)
    prompts = [" ".join(text.split()[:4]) for text in texts]
    answers = [" " + " ".join(text.split()[4:]) for text in texts]
    value = dlm_lens.log_likelihood(toy, prompts, answers, samples=16, seed=0)
    nats = float((-value.value / torch.tensor([len(answer.split()) for answer in answers])).mean())
    assert of_toy["reading"].found.startswith(f"{nats:.2f} nats a token")


def test_texts_that_the_tokenizer_does_not_know_stop_the_checks_of_text(toy: Any) -> None:
    findings = found(toy, TEXTS)
    assert findings["texts"].good is False
    assert "--texts" in findings["texts"].found
    assert not findings.keys() & {"patterns", "reading", "denoising"}


@pytest.mark.parametrize("texts", [[], ["too short"], ["one two three four five six seven eight", 3]])
def test_texts_that_cannot_be_are_refused_before_any_work(toy: Any, texts: Any) -> None:
    with pytest.raises(ValueError, match=r"texts is empty|at least 8 words"):
        check_checkpoint(toy, texts)


def test_few_texts_prove_nothing(toy: Any) -> None:
    finding = found_first("reading", toy, default_texts(toy)[:6])
    assert finding.good is None
    assert "6 of 6 texts" in finding.found


def test_a_pattern_that_is_not_the_fused_kernels_is_found(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.nn.functional.scaled_dot_product_attention

    def colder(*args: Any, **options: Any) -> Any:
        return plain(*args, **{**options, "scale": 0.9 * (options.get("scale") or args[0].shape[-1] ** -0.5)})

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", colder)
    assert found_first("patterns", toy).good is False


@pytest.mark.parametrize("count", [1, 6, 7, 12, 40])
def test_the_sign_test(count: int) -> None:
    def tail(successes: int) -> float:
        return sum(comb(count, k) for k in range(successes, count + 1)) / 2**count

    needed = least_successes(count)
    if needed is None:
        assert tail(count) > 0.01
    else:
        assert tail(needed) <= 0.01 < tail(needed - 1)


def write(path: Path, **tensors: torch.Tensor) -> Path:
    save_file({name: value.clone() for name, value in tensors.items()}, path)
    return path


def of_golden(family: str, case: str, path: Path) -> Path:
    """A file of logits that the family's own code computed."""
    golden = load_file(GOLDEN / family / "forward.safetensors")
    names = ("input_ids", "logits", "attention_mask", "sigma")
    return write(path, **{name: golden[f"{case}.{name}"] for name in names if f"{case}.{name}" in golden})


@pytest.mark.parametrize(
    ("family", "case"),
    [("llada", "plain_b1"), ("llada", "left_padded_b2"), ("dream", "left_padded"), ("mdlm", "sigma_0"),
     ("duo", "noisy"), ("sedd", "two_levels"), ("smdm", "plain_b2"), ("sdar", "one_block")],
)  # fmt: skip
def test_the_authors_logits_are_ours(family: str, case: str, tmp_path: Path) -> None:
    model = dlm_lens.load(GOLDEN / family)
    reference = ReferenceLogits.read(of_golden(family, case, tmp_path / "logits.safetensors"), model)
    finding = reference.compare(model)
    assert finding.good, finding
    assert "the same at 100.0%" in finding.found


@pytest.mark.parametrize("wrong", ["rope_theta", "ids", "weight"])
def test_logits_of_another_network_are_found(wrong: str, tmp_path: Path) -> None:
    model = dlm_lens.load(GOLDEN / "llada")
    path = of_golden("llada", "plain_b1", tmp_path / "logits.safetensors")
    if wrong == "rope_theta":
        for each in model.modules():
            if hasattr(each, "inv_freq"):
                each.inv_freq *= 0.5
    elif wrong == "ids":
        tensors = load_file(path)
        write(path, input_ids=tensors["input_ids"].flip(1), logits=tensors["logits"])
    else:
        with torch.no_grad():
            model.get_decoder().layers[0].self_attn.k_proj.weight.mul_(-1)
    finding = ReferenceLogits.read(path, model).compare(model)
    assert finding.good is False
    # Several times what half precision is allowed.
    assert float(finding.found.partition("differ by ")[2].split()[0]) > 0.5, finding.found


def test_the_page_shows_what_the_command_finds(of_toy: dict[str, Finding]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    for name in ("network", "special ids", "texts", "reading", "sinks"):
        assert of_toy[name].found in page, name


def test_the_gap_by_hand() -> None:
    theirs = torch.tensor([[1.0, 3.0, -torch.inf], [5.0, 7.0, -torch.inf]])
    # Standard deviation of 1, 3, 5, 7: sqrt(20 / 3); differences of 1, 1, 1, 1.
    assert relative_gap(theirs + 1, theirs) == pytest.approx((3 / 20) ** 0.5, rel=1e-12)
    assert not relative_gap(theirs.masked_fill(theirs == 3.0, torch.nan), theirs) <= 1


def test_files_that_are_no_reference_are_refused(toy: Any, tmp_path: Path) -> None:
    ids, logits = torch.tensor([[5, 6, 7]]), torch.zeros(1, 3, 118)
    path = tmp_path / "logits.safetensors"
    with pytest.raises(DamagedFileError):
        check_checkpoint(toy, reference=path)
    refused: dict[str, dict[str, torch.Tensor]] = {
        "has no logits": {"input_ids": ids},
        "must be whole numbers": {"input_ids": ids[0], "logits": logits},
        "the model embeds": {"input_ids": ids + 500, "logits": logits},
        "does not take": {"input_ids": ids, "logits": logits, "hidden": logits},
    }
    for sentence, tensors in refused.items():
        with pytest.raises(ValueError, match=sentence):
            check_checkpoint(toy, reference=write(path, **tensors))
    # With texts that toy's tokenizer does not know: the checks of text are not made.
    finding = found(toy, TEXTS, reference=write(path, input_ids=ids, logits=logits[..., :100]))["reference"]
    assert finding.good is False
    assert "logits of 100 tokens" in finding.found


def test_sinks_of_the_first_step_are_not_those_of_the_first_step_that_has_some() -> None:
    text = "sam has 16 shells . sam sells 13 shells . how many"
    recording = dlm_lens.record(dlm_lens.load("toy-ar"), text, [dlm_lens.ReceivedAttention()], gen_length=16)
    sinks = dlm_lens.find_sinks(dlm_lens.sinks.received_of(recording), dlm_lens.AboveMean(3.0)).table()
    assert sinks["step"].min() > 0
    assert checkpoint_check._sinks(recording) == "no head has a sink at the first step"
    later = recording.select(step=slice(int(sinks["step"].min()), None))
    assert "with a sink at the first step" in checkpoint_check._sinks(later)


def test_a_failure_of_a_check_is_its_finding() -> None:
    def fails() -> str:
        raise RuntimeError("no\nsuch\x1b thing")

    finding = checked("this", fails)
    assert finding == Finding("this", "RuntimeError: no such\\x1b thing", False)
    assert checked("that", lambda: "fine") == Finding("that", "fine", True)


def test_the_command(toy: Any, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "toy", "--json", "--gen-length", "21"])
    assert result.exit_code == 0, result.output
    assert {each["subject"]: each["good"] for each in json.loads(result.stdout)} == {
        "network": None, "special ids": True, "texts": True, "patterns": True, "reading": True, "denoising": True,
        "sinks": None,
    }  # fmt: skip
    texts = tmp_path / "texts.txt"
    texts.write_text("a line of eight words that toy lacks\n\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["doctor", "toy", "--texts", str(texts)])
    assert result.exit_code == 1
    assert any(line.startswith("bad  texts") for line in result.output.splitlines())
    for wrong in (["doctor", "--texts", str(texts)], ["doctor", "toy", "--reference", str(tmp_path / "none")]):
        assert CliRunner().invoke(app, wrong).exit_code != 0
