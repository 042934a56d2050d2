"""The language of the embedded checkpoints: right, in range, reproducible, and scored exactly."""

import re
from itertools import islice

import pytest

from experiments.toy.language import (
    LARGEST_NUMBER,
    MAX_ANSWER_TOKENS,
    MAX_PROMPT_TOKENS,
    Example,
    extract_answer,
    is_correct,
    stream,
    words,
)

SEEDS = (0, 7)


def examples(task: str, count: int = 600) -> list[Example]:
    return [e for seed in SEEDS for e in islice(stream("test", seed, [task]), count // len(SEEDS))]


def replay_story(prompt: str) -> list[tuple[int, str, int, int]]:
    """(before, sign, amount, after) of every step, read from the sentences and not from the answer."""
    first, *sentences = [s.strip() for s in prompt.split(" . ")][:-1]
    name, has, start, thing = first.split()
    assert has == "has"
    total, steps = int(start), []
    for sentence in sentences:
        subject, verb, amount, *rest = sentence.split()
        assert subject in (name, "he", "she")
        loses = verb in {"breaks", "drops", "gives", "loses", "sells"}
        assert loses or verb in {"buys", "finds", "gets", "picks", "wins"}
        assert set(rest) - {"more", thing, "to"} <= (set(words()) - {name} if verb == "gives" else set())
        after = total - int(amount) if loses else total + int(amount)
        steps.append((total, "-" if loses else "+", int(amount), after))
        total = after
    assert prompt.split(" . ")[-1].startswith(f"how many {thing}")
    return steps


def test_same_seed_same_examples_whatever_was_drawn_before() -> None:
    once = list(islice(stream("train", 3), 50))
    again = stream("train", 3)
    next(stream("train", 4))  # another stream in between shares no state
    assert once == list(islice(again, 50))


@pytest.mark.parametrize(("split", "seed"), [("train", 4), ("test", 3)])
def test_other_seeds_and_splits_give_other_examples(split: str, seed: int) -> None:
    here = {e.prompt for e in islice(stream("train", 3), 200)}
    there = {e.prompt for e in islice(stream(split, seed), 200)}
    assert len(here & there) < 10


def test_chain_of_thought_follows_from_the_story() -> None:
    lengths = set()
    for example in examples("A"):
        steps = replay_story(example.prompt)
        thoughts = [f"{before} {sign} {amount} = {after} ." for before, sign, amount, after in steps]
        assert example.answer == " ".join([*thoughts, f"answer {steps[-1][3]} ."])
        assert example.target == str(steps[-1][3])
        lengths.add(len(steps))
    assert lengths == {1, 2, 3, 4}


def test_lists_are_sorted_reversed_copied() -> None:
    seen = set()
    for example in examples("L"):
        operation, *digits, colon = example.prompt.split()
        expected = {"copy": digits, "reverse": list(reversed(digits)), "sort": sorted(digits)}[operation]
        assert colon == ":"
        assert 4 <= len(digits) <= 7
        assert all(re.fullmatch(r"\d", digit) for digit in digits)
        assert example.target.split() == expected
        seen.add(operation)
    assert seen == {"copy", "reverse", "sort"}


def test_lookups_restate_the_fact_that_was_asked_for() -> None:
    for example in examples("F"):
        facts = dict(re.findall(r"the (\w+) is (?:in the )?(\w+) \.", example.prompt))
        asked = re.search(r"is the (\w+) \? :$", example.prompt)
        assert asked is not None
        assert len(facts) == 3
        assert example.target == facts[asked[1]]
        assert example.answer.startswith(f"the {asked[1]} is ")
        assert example.answer.removesuffix(f" answer {example.target} .") + " " in example.prompt


@pytest.mark.parametrize("task", ["A", "L", "F"])
def test_every_token_is_in_the_language_and_fits(task: str) -> None:
    known = set(words())
    for example in examples(task):
        tokens = example.text.split()
        assert set(tokens) <= known
        assert all(0 <= int(t) <= LARGEST_NUMBER for t in tokens if t.isdigit())
        assert len(example.prompt.split()) + 1 <= MAX_PROMPT_TOKENS
        assert len(example.answer.split()) <= MAX_ANSWER_TOKENS
        assert example.prompt.endswith(" :")
        assert is_correct(example.answer, example.target)


def test_mixture_has_the_stated_weights() -> None:
    tasks = [e.task for e in islice(stream("train", 0), 4000)]
    shares = {task: tasks.count(task) / len(tasks) for task in "ALF"}
    # Three standard deviations of a share among 4000, at most.
    assert shares["A"] == pytest.approx(0.60, abs=0.023)
    assert shares["L"] == pytest.approx(0.15, abs=0.017)
    assert shares["F"] == pytest.approx(0.25, abs=0.021)


@pytest.mark.parametrize(
    ("text", "target", "right"),
    [
        ("5 + 4 = 9 . answer 9 .", "9", True),
        ("5 + 4 = 8 . answer 9 .", "9", True),  # the final answer alone counts
        ("5 + 4 = 9 . answer 8 .", "9", False),
        ("5 + 4 = 9 .", "9", False),
        ("5 + 4 = 9 . answer 9", "9", False),  # not finished
        ("answer 1 . answer 9 . and more", "9", True),  # the last one counts
        ("answer . 9 .", "9", False),
        ("answer 1 3 5 .", "1 3 5", True),
        ("answer 1 5 3 .", "1 3 5", False),
        ("answer 1 3 5 5 .", "1 3 5", False),
        ("", "9", False),
    ],
)
def test_scorer(text: str, target: str, right: bool) -> None:
    assert is_correct(text, target) is right


def test_extraction_stops_at_the_first_full_stop() -> None:
    assert extract_answer("answer 1 2 . 3 .") == "1 2"
    assert extract_answer("no such word .") is None
