"""Tuned lenses: trained, saved and read again; their first loss and their memory."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.probes import TunedLens, logit_lens, train_tuned_lens
from dlm_lens.probes.unembedding import Unembedding
from dlm_lens.testing import tiny
from tests.probes.test_lens import started
from tests.reference import normed


def test_a_tuned_lens_is_trained_saved_and_refused_for_another_model(tmp_path: Any) -> None:
    model, run = started("llada")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{(7 * i * i + i) % 50}" for i in range(200)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lens = train_tuned_lens(model, text, steps=60, batch_size=4, length=20, learning_rate=5e-3)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
    plain, tuned = logit_lens(model, run), logit_lens(model, run, tuned=lens)
    # A canvas that it has not seen: closer to what the model says, and the last layer is as it was.
    assert float(tuned.kl[:, 0].nanmean()) < 0.8 * float(plain.kl[:, 0].nanmean())
    assert tuned.entropy[:, 1].equal(plain.entropy[:, 1])
    assert (plain.lens, tuned.lens) == ("logit lens", repr(lens))
    again = TunedLens.load(lens.save(tmp_path / "lens.safetensors"), model)
    # Training takes hours: a directory that is not there loses no lens.
    below = TunedLens.load(lens.save(str(tmp_path / "lenses/of/toy.safetensors")), model)
    assert below.weight.equal(lens.weight)
    with pytest.raises(IsADirectoryError, match=r"is a directory; give the name of a file, such as .*/file"):
        lens.save(tmp_path)
    with pytest.raises(ValueError, match="path is None; it must be the path of a file"):
        lens.save(cast(Any, None))
    assert again.weight.equal(lens.weight)
    assert again.training == lens.training
    assert again.layers == (0,)
    stream = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    by_hand = stream.double() + stream.double() @ lens.weight[0].double().T + lens.bias[0].double()
    torch.testing.assert_close(again.translate(0, stream).double(), by_hand, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="was trained for"):
        TunedLens.load(tmp_path / "lens.safetensors", tiny("llada", seed=1))
    with pytest.raises(ValueError, match="was trained for"):
        logit_lens(tiny("llada", seed=1), run, tuned=lens)
    with pytest.raises(ValueError, match="is no tuned lens"):
        TunedLens.load(text, model)
    with pytest.raises(FileNotFoundError):
        TunedLens.load(tmp_path / "none", model)


@pytest.mark.parametrize("name", ["llada", "dream", "ar"])
def test_the_first_loss_of_a_tuned_lens_is_the_divergence_of_the_logit_lens(name: str, tmp_path: Any) -> None:
    model, _ = started(name)
    (tmp_path / "text.txt").write_text(" ".join(f"w{(7 * i * i + i) % 50}" for i in range(200)))
    seen: list[Tensor] = []

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["input_ids"])

    handle = model.get_decoder().register_forward_pre_hook(keep, with_kwargs=True)
    lens = train_tuned_lens(model, tmp_path / "text.txt", steps=1, batch_size=3, length=20)
    handle.remove()
    (tokens,) = seen
    with torch.no_grad():
        layers = model(input_ids=tokens, output_hidden_states=True).hidden_states[1:]
        # The last one is after the final norm.
        weight = model.get_output_embeddings().weight.double()
        norm = model.get_decoder().norm.weight.double()
        before = normed(layers[0].double(), norm, model.config.rms_norm_eps)
        logs = [(each.double() @ weight.T).log_softmax(-1) for each in (before, layers[1])]
    each = (logs[1].exp() * (logs[1] - logs[0])).sum(-1)
    masked = tokens == (-1 if name == "ar" else model.config.mask_token_id)
    learned = {"llada": masked, "dream": masked.roll(-1, 1), "ar": ~masked}[name]
    learned[:, -1] &= name != "dream"  # the output at the last position predicts none there
    divergences = each[learned]
    assert lens.training["last_loss"] == pytest.approx(float(divergences.mean()), rel=1e-3)


@pytest.mark.parametrize(("name", "most"), [("dream", 0.9), ("ar", 0.95)])
def test_a_tuned_lens_learns_where_the_model_predicts(name: str, most: float, tmp_path: Any) -> None:
    model, run = started(name)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{(7 * i * i + i) % 50}" for i in range(200)))
    lens = train_tuned_lens(model, text, steps=60, batch_size=4, length=20, learning_rate=5e-3)
    plain, tuned = (logit_lens(model, run, tuned=t) for t in (None, lens))
    assert float(tuned.kl[:, 0].nanmean()) < most * float(plain.kl[:, 0].nanmean())


@pytest.mark.parametrize(
    "family", ["sdar", "llada2", "sdlm", "i_dlm", "nemotron_labs_diffusion", "efficient_dlm", "stable_diffcoder"]
)
def test_no_tuned_lens_is_trained_on_passes_that_no_run_makes(family: str, tmp_path: Any) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 50}" for i in range(200)))
    how = "through a window of masks" if family in ("sdlm", "i_dlm") else "block by block"
    with pytest.raises(ValueError, match=f"attends {how}, and a tuned lens is trained on whole pieces of a text"):
        train_tuned_lens(tiny(family), text, steps=1, batch_size=1, length=12)
    # Every forward pass of these is in blocks, or of a canvas behind an encoder.
    for other in ("bd3lm", "fast_dllm_v2", "diffusion_gemma"):
        assert train_tuned_lens(tiny(other), text, steps=1, batch_size=1, length=12).layers


def test_a_model_of_one_layer_has_nothing_to_train(tmp_path: Any) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 50}" for i in range(200)))
    model = tiny("llada", num_hidden_layers=1)
    lens = train_tuned_lens(model, text, steps=2, batch_size=1, length=12)
    assert lens.layers == ()
    run = dl.denoise(model, [[1, 2, 3]], steps=2, gen_length=4)
    plain, tuned = (logit_lens(model, run, tuned=each) for each in (None, lens))
    assert torch.equal(plain.entropy.nan_to_num(-1), tuned.entropy.nan_to_num(-1))


def test_there_are_logits_of_a_few_positions_at_a_time(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of all positions of a batch, kept for the gradients of every layer, do not fit into a GPU."""
    model, _ = started("llada")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{(7 * i * i + i) % 50}" for i in range(200)))
    settings: dict[str, Any] = {"steps": 3, "batch_size": 3, "length": 20, "learning_rate": 5e-3}
    rows: list[int] = []
    logits = Unembedding.logits

    def counted(self: Unembedding, stream: Tensor) -> Tensor:
        rows.append(len(stream))
        return logits(self, stream)

    monkeypatch.setattr(Unembedding, "logits", counted)
    whole = train_tuned_lens(model, text, **settings)
    assert max(rows) > 5
    rows.clear()
    monkeypatch.setattr("dlm_lens.probes.unembedding.ENTRIES_AT_ONCE", 64 * 5)
    parts = train_tuned_lens(model, text, **settings)
    assert max(rows) == 5
    # Sums of float32 in another order; Adam divides by the gradient's own size.
    torch.testing.assert_close(parts.weight, whole.weight, atol=1e-4, rtol=1e-3)
    assert float(whole.weight.abs().max()) > 1e-3
    assert parts.training["last_loss"] == pytest.approx(whole.training["last_loss"], rel=1e-4)


def test_settings_out_of_range_are_refused(tmp_path: Any) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 50}" for i in range(200)))
    model = tiny("llada")
    for name, value in (
        ("steps", 1.5), ("steps", 0), ("batch_size", "4"), ("length", 1), ("learning_rate", float("nan")),
        ("learning_rate", 0), ("seed", "a"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be "):
            train_tuned_lens(model, text, **{name: value})


def test_a_text_in_place_of_its_file_is_told() -> None:
    with pytest.raises(FileNotFoundError, match=r"w1 .* is not there; .* on a text file: give its path"):
        train_tuned_lens(tiny("llada"), "w1 " * 3000)
    with pytest.raises(ValueError, match="text is None; it must be the path of a file"):
        train_tuned_lens(tiny("llada"), cast(Any, None))
