"""`insertion_loss` against losses of forward passes whose block is edited by hand, and a perfect autoencoder."""

import pytest
import torch

import dlm_lens as dl
from dlm_lens.features import SparseAutoencoder, untrained
from dlm_lens.probes import insertion_loss
from dlm_lens.sampling import StoredRun
from dlm_lens.testing import tiny
from tests.hooks.test_feature_edits import PROMPTS, RUN, autoencoder


def perfect(model, layer=1):
    """Features that are the positive and the negative part of every entry: the reconstruction is exact."""
    eye = torch.eye(model.config.hidden_size)
    both, zero = torch.cat([eye, -eye]), torch.zeros(len(eye))
    return SparseAutoencoder(
        both.T.contiguous(), torch.cat([zero, zero]), both, zero, activation="relu", layer=layer
    )


def _by_hand(model, run, step, edit):
    """Cross-entropy at open positions per row, with the output of block 1 edited; LLaDA predicts in place."""

    def replaced(module, args, output):
        states = output if isinstance(output, torch.Tensor) else output[0]
        return edit(states) if isinstance(output, torch.Tensor) else (edit(states), *output[1:])

    handle = model.model.layers[1].register_forward_hook(replaced)
    with torch.no_grad():
        logits = model(
            input_ids=run.canvases[step], attention_mask=run.attention_mask.long(), use_cache=False
        ).logits.double()
    handle.remove()
    logits[..., model.config.mask_token_id] = -torch.inf
    log = logits.log_softmax(-1)
    start, stop = run.spans[step]
    open_ = run.masked[step].clone()
    open_[:, :start], open_[:, stop:] = False, False
    loss = -log.gather(-1, run.tokens[..., None])[..., 0]
    return (loss * open_).sum(-1), log, open_


@pytest.mark.long
def test_losses_are_those_of_passes_edited_by_hand():
    model = tiny("llada")
    sae = autoencoder(model)
    run = dl.denoise(model, PROMPTS, steps=4, gen_length=8, block_length=8)
    found = insertion_loss(model, run, sae)
    content = run.attention_mask
    kept = [dl.hooks.capture(model, run, "resid", layers=[1])["resid", 1, step] for step in range(4)]
    mean = torch.cat([states[content] for states in kept]).double().mean(0).float()
    edits = {"sae": sae, "zero": torch.zeros_like, "mean": lambda x: mean.expand_as(x), "untrained": untrained(sae)}
    for step in range(4):
        plain, p, open_ = _by_hand(model, run, step, lambda x: x)
        torch.testing.assert_close(found.plain[step].double(), plain, rtol=1e-4, atol=1e-4)
        assert found.positions[step].equal(open_.sum(-1))
        for place in ("all", "open", "decided"):
            at = {"all": content, "open": run.masked[step] & content, "decided": ~run.masked[step] & content}[place]
            for name, edit in edits.items():
                loss, q, _ = _by_hand(
                    model, run, step, lambda x, at=at, edit=edit: torch.where(at[..., None], edit(x), x)
                )
                place_of = (0, found.insertions.index(name), found.places.index(place), step)
                torch.testing.assert_close(found.loss[place_of].double(), loss, rtol=1e-3, atol=1e-3)
                kl = (p.exp() * (p - q).nan_to_num()).sum(-1)
                torch.testing.assert_close(found.kl[place_of].double(), (kl * open_).sum(-1), rtol=1e-3, atol=1e-3)
    total, count = found.loss[0, 0, 0].sum(), found.positions.sum()
    assert found.added(1).value == pytest.approx(float((total - found.plain.sum()) / count), abs=1e-6)
    zero = found.loss[0, 1, 0].sum()
    assert found.recovered(1).value == pytest.approx(float((zero - total) / (zero - found.plain.sum())), rel=1e-5)
    line = found.table().query("insertion == 'sae' and place == 'all'").iloc[0]
    assert line["added"] == pytest.approx(found.added(1).value)
    assert len(found.by_step()) == 4 * 5 * 3


def test_the_mean_of_a_guided_run_is_that_of_its_conditional_half():
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, steps=2, gen_length=4, cfg_scale=1.5)
    found = insertion_loss(model, run, autoencoder(model), places=["all"], nulls=())
    kept = dl.hooks.capture(model, run, "resid", layers=[1])
    both = [kept["resid", 1, step] for step in range(2)]
    assert [len(each) for each in both] == [2 * len(PROMPTS)] * 2
    mean = torch.cat([each[: len(PROMPTS)][run.attention_mask] for each in both]).double().mean(0).float()
    stored = StoredRun(model, run, hooks=[dl.hooks.at_layers(dl.hooks.ablate("resid", None, mean), [1])])
    for step in range(2):
        logits = stored.logits(stored.states(step)).double()
        logits[:, model.config.mask_token_id] = -torch.inf
        predicted = stored.predicted(step)
        losses = -logits.log_softmax(-1).gather(1, run.tokens[predicted][:, None])[:, 0]
        rows = torch.zeros(len(PROMPTS), dtype=torch.float64).index_add(0, predicted.nonzero()[:, 0], losses)
        torch.testing.assert_close(found.loss[0, 2, 0, step].double(), rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("placement", ["front", "end"])
def test_the_mean_is_without_learned_sink_tokens_and_replaces_theirs_too(placement):
    model = tiny("sink_qwen", num_sinks=2, sink_placement=placement)
    run = dl.denoise(model, PROMPTS, steps=3, gen_length=8, seed=[1, 2])
    stored, content, seen = StoredRun(model, run), run.attention_mask, []
    canvas, sinks = (slice(2, None), slice(2)) if placement == "front" else (slice(0, -2), slice(-2, None))

    def losses(edit):
        """The summed cross-entropy of every step and row, with the output of block 1 edited."""
        handle = model.model.layers[1].register_forward_hook(lambda module, args, output: edit(output))
        found = torch.zeros(3, 2, dtype=torch.float64)
        with torch.no_grad():
            for step in range(3):
                logits = stored.logits(stored.states(step)).double()
                logits[:, model.config.mask_token_id] = -torch.inf
                row, position = stored.predicted(step).nonzero().unbind(-1)
                loss = -logits.log_softmax(-1).gather(-1, run.tokens[row, position][:, None])[:, 0]
                found[step] = found[step].index_add(0, row, loss)
        handle.remove()
        return found

    plain = losses(seen.append)
    mean = torch.cat([states[:, canvas][content] for states in seen]).double().mean(0).float()

    def replaced(states):
        states = states.clone()
        states[:, canvas][content] = mean
        states[:, sinks] = mean
        return states

    found = insertion_loss(model, run, perfect(model), places=["all"], nulls=[])
    torch.testing.assert_close(found.plain.double(), plain, rtol=1e-5, atol=1e-5)
    mean_loss = found.loss[0, found.insertions.index("mean"), 0].double()
    torch.testing.assert_close(mean_loss, losses(replaced), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["dream", "sdar"])
def test_a_perfect_autoencoder_costs_nothing_and_recovers_everything(family):
    model = tiny(family)
    run = dl.denoise(model, PROMPTS[:1], **RUN)
    found = insertion_loss(model, run, perfect(model), nulls=["random_decoder"], steps=[0, -1])
    assert found.steps == (0, 3)
    assert found.added(1).value == pytest.approx(0, abs=1e-5)
    assert float(found.kl[0, 0].max()) < 1e-6
    assert found.recovered(1).value == pytest.approx(1, abs=1e-4)
    assert found.recovered(1, "zero").value == 0
    null = found.kl[0, found.insertions.index("random_decoder"), 0]
    assert float(null.max()) > 1e-3


def test_tables_are_means_of_the_sums_over_predictions():
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, steps=4, gen_length=8, block_length=8)
    found = insertion_loss(model, run, autoencoder(model), nulls=[], places=["all", "open"])
    count, plain = found.positions.double(), found.plain.double()
    at = 0, found.insertions.index("zero"), found.places.index("open")
    loss, kl = found.loss[at].double(), found.kl[at].double()
    line = found.table().query("insertion == 'zero' and place == 'open'").iloc[0]
    assert line["predictions"] == int(run.open[:-1].sum()) == int(count.sum())
    sums = {"plain": plain, "loss": loss, "kl": kl, "added": loss - plain}
    assert {name: line[name] for name in sums} == pytest.approx(
        {name: float(each.sum() / count.sum()) for name, each in sums.items()}, rel=1e-5
    )
    by_step = found.by_step().query("insertion == 'zero' and place == 'open'").set_index("step").added
    wanted = (loss - plain).sum(-1) / count.sum(-1)
    assert by_step.to_dict() == pytest.approx(dict(enumerate(wanted.tolist())), rel=1e-5)
    assert len(set(by_step.round(6))) == 4


@pytest.mark.parametrize("steps", [[1, 2], [1, 3], [0, 2]])
def test_losses_of_a_part_are_those_of_the_whole_run_at_its_steps(steps):
    model = tiny("llada")
    recording = dl.record(model, PROMPTS, layers=[1], **RUN)
    part = recording.select(step=steps).run
    found = insertion_loss(model, part, autoencoder(model), nulls=[], places=["all", "open"])
    whole = insertion_loss(model, recording.run, autoencoder(model), nulls=[], places=["all", "open"], steps=steps)
    assert found.steps == (0, 1)
    assert found.positions.equal(whole.positions)
    for name in ("plain", "loss", "kl"):
        torch.testing.assert_close(getattr(found, name), getattr(whole, name), rtol=1e-5, atol=1e-5)
    mean = found.insertions.index("mean")
    assert bool((found.loss[:, mean] != found.loss[:, found.insertions.index("zero")]).any())
    (drawn,) = dl.viz.insertion_by_step(found, insertions=["mean"], place="open").axes[0].get_lines()[:1]
    assert list(drawn.get_xdata()) == steps


def test_an_ar_run_and_a_reference():
    model = dl.load("toy-ar")
    run = dl.denoise(model, ["tom has 5 apples . tom buys 4 more . how many apples ? :"], steps=3, gen_length=3)
    sae = autoencoder(model)
    reference = torch.full_like(run.tokens, -1)
    reference[:, run.prompt_length] = 7
    found = insertion_loss(model, run, sae, places=["all"], nulls=[], reference=reference)
    assert found.positions.flatten().tolist() == [1, 0, 0]
    ids = run.tokens[:, : run.prompt_length]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, -1].double()
    assert float(found.plain[0, 0]) == pytest.approx(-float(logits.log_softmax(-1)[7]), rel=1e-4)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"places": ["prompt"]}, r"places is \['prompt'\]; give a list of some of all, open, decided"),
        ({"places": "all"}, "places is 'all'; give a list"),
        ({"nulls": ["shuffled"]}, "give a list of some of untrained, random_decoder"),
        ({"reference": torch.zeros(1, 2)}, r"reference has shape \[1, 2\]"),
    ],
)
def test_wrong_arguments_are_refused(given, why):
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, **RUN)
    with pytest.raises(ValueError, match=why):
        insertion_loss(model, run, autoencoder(model), **given)
    with pytest.raises(ValueError, match=r"autoencoders of the layers \[1, 1\]; give at least one"):
        insertion_loss(model, run, [autoencoder(model), autoencoder(model)])
    with pytest.raises(ValueError, match="insertion_loss: None is no SparseAutoencoder; read one with load_sae"):
        insertion_loss(model, run, None)


def test_steps_of_a_result_are_those_that_were_measured():
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, **RUN)
    found = insertion_loss(model, run, autoencoder(model), steps=[0, -1], places=["all"], nulls=[])
    last = run.steps - 1
    assert str(found.added(1, steps=[-1])) == str(found.added(1, steps=[last]))
    for steps, why in (
        ([1], f"step 1 was not measured; there are 0, {last}"),
        ([99], f"step 99 of {run.steps}"),
        (0, "steps is 0; give a list"),
    ):
        with pytest.raises(ValueError, match=why):
            found.added(1, steps=steps)
