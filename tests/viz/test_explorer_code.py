"""`explorer.code`: Python that computes what the explorer shows."""

import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import at_layers, keep_only, mask_sinks, mask_top_sinks, steer
from tests.sampling import test_dreamon as dreamon
from tests.viz.test_explorer import explorer_of


@pytest.mark.parametrize("name", ["llada", "sink_qwen", "causal"])
def test_the_code_computes_what_is_shown(name):
    explorer = explorer_of(name, "w1 w2 w3", temperature=0.7, seed=5)
    explorer.select(step=2, layer=1, head=3, position=4)
    for change in (
        lambda: None,
        lambda: explorer.plant(1, 4, "w9"),
        lambda: explorer.hide(1),
        lambda: explorer.hide_head(1, 2),
    ):
        change()
        space = {"model": explorer._exploration.model}
        exec(explorer.code, space)  # noqa: S102  # our own code
        assert space["recording"].run.tokens.equal(explorer.run.tokens)
        if explorer.twin is not None:
            assert space["twin"].run.tokens.equal(explorer.twin.tokens)
        shown = explorer.twin_received if explorer.twin is not None else explorer.received
        torch.testing.assert_close(space["received"], shown.values[2, 0, 1, 3], equal_nan=True)
        lens = explorer.lens(twin=explorer.twin is not None)
        assert space["lens"].top_tokens.equal(lens.top_tokens)
        pattern = torch.tensor(space["pattern"].pieces[0].props["attention"])
        there = explorer.pattern(twin=explorer.twin is not None)
        # The view has the learned sink's own row too, and no positions that are not decoded yet.
        sinks = int(name == "sink_qwen")
        seen = len(pattern) - sinks
        keys = [*range(seen), *range(there.shape[1] - sinks, there.shape[1])]
        torch.testing.assert_close(pattern[:seen], there[:seen, keys], rtol=0, atol=5.1e-5)


@pytest.mark.parametrize(
    "own",
    [
        mask_top_sinks(k=1),
        mask_sinks(dl.sinks.AboveStd(1.0)),
        keep_only(sinks=2),
        at_layers(mask_sinks(dl.sinks.AttentionShare()), [1]),
    ],
    ids=repr,
)
def test_the_code_imports_the_detectors_of_hooks(own):
    explorer = explorer_of("llada", "w1 w2 w3 w4", hooks=[own])
    for change in (lambda: None, lambda: explorer.hide(1)):
        change()
        space = {"model": explorer._exploration.model}
        exec(explorer.code, space)  # noqa: S102  # our own code
        assert space["recording"].run.tokens.equal(explorer.run.tokens)
        assert list(map(repr, space["hooks"])) == list(map(repr, explorer.hooks))
    assert space["twin"].run.tokens.equal(explorer.twin.tokens)
    assert "given_hooks" not in explorer.code


def test_the_code_names_hooks_that_their_text_does_not_make():
    own = [steer(torch.ones(32), scale=4.0), mask_top_sinks(k=1)]
    explorer = explorer_of("llada", "w1 w2 w3 w4", hooks=own)
    for change in (lambda: None, lambda: explorer.hide(1)):
        change()
        assert "# given_hooks: the list of hooks that explore was given" in explorer.code
        space = {"model": explorer._exploration.model, "given_hooks": own}
        exec(explorer.code, space)  # noqa: S102  # our own code
        assert space["recording"].run.tokens.equal(explorer.run.tokens)
    assert space["twin"].run.tokens.equal(explorer.twin.tokens)
    assert space["hooks"][:2] == own
    assert list(map(repr, space["hooks"][2:])) == ["mask_positions(1)"]


def test_tokens_around_gaps_that_grow_can_be_planted():
    """The rest of a prompt with a gap is after the room for masks, and parts of it move (DreamOn)."""
    model, settings = dreamon.resizing(seed=5), dreamon.GREEDY | {"seed": 3}
    explorer = dl.viz.explore(model, [dreamon.PROMPTS[1]], **settings)
    for position in (~explorer.run.masked[0, 0]).nonzero().flatten().tolist():
        explorer.plant(1, position, "w7")
        assert not bool((explorer.comparison.changed & (explorer.run.tokens == explorer.twin.tokens)).any())
        space = {"model": model}
        exec(explorer.code, space)  # noqa: S102  # our own code
        assert space["changed"].equal(explorer.run.tokens != explorer.twin.tokens)
        explorer.clear()
