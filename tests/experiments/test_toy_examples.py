"""The example of the README: chosen by its rule, it shows what the text says, and the library agrees."""

import pytest
import torch

import dlm_lens as dl
from dlm_lens.cli.demo_run import EXAMPLE, PROMPT
from experiments.toy import examples

pytestmark = pytest.mark.long  # its fixture generates and measures sixteen answers


@pytest.fixture(scope="module")
def shown() -> examples.MovingSinkExample:
    return examples.choose(dl.load(examples.MODEL), examples.drawn_examples(16))


def test_the_head_and_the_prompt_are_those_of_the_rule(shown: examples.MovingSinkExample) -> None:
    assert (shown.layer, shown.head, shown.moving) == (2, 3, 16)
    assert shown.examples[0].prompt == PROMPT
    assert {"gen_length": examples.LENGTH, "block_length": examples.BLOCK} == EXAMPLE
    assert examples.right(shown.run, shown.examples) == 16
    # No end of text is written: the sink moves during the answer.
    answers = shown.run.tokens[:, shown.run.prompt_length :]
    assert not torch.isin(answers, torch.tensor(shown.run.eos_token_ids)).any()


def test_the_library_calls_it_moving_and_the_sink_stands_on_the_running_total(
    shown: examples.MovingSinkExample,
) -> None:
    summary = shown.paths.summary(by="pattern")
    here = summary[(summary["batch"] == 0) & (summary["layer"] == 2) & (summary["head"] == 3)].iloc[0]
    assert here["kind"] == "moving"
    assert here["moves"] == 4
    assert here["static_share"] < 0.5
    # By hand, from the main path: the token under the largest sink in the middle of each block.
    main = shown.paths.main[:, 0, 2, 3]
    canvases, words = shown.run.canvases[:, 0], shown.run.tokenizer
    assert [words.decode([int(canvases[step, main[step]])]) for step in (3, 10, 17)] == ["26", "20", "11"]
    assert not shown.run.masked[[3, 10, 17], 0][range(3), main[[3, 10, 17]]].any()


def test_hiding_the_heads_sinks_has_an_effect_and_as_much_mass_elsewhere_has_none(
    shown: examples.MovingSinkExample,
) -> None:
    model = dl.load(examples.MODEL)
    pair = examples.knock_out(model, shown)
    assert examples.right(pair.hooked, shown.examples) == 9
    assert pair.hooked.answers[0] == "26 - 6 = 0 . 0 + 9 = 9 . 9 + 12 = 21 . answer 21 ."
    assert int(pair.tokens_changed[0]) == 7
    for seed in range(3):
        control = examples.knock_out(model, shown, seed)
        assert examples.right(control.hooked, shown.examples) == 16
        assert int(control.tokens_changed.sum()) == 0
