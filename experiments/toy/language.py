"""The synthetic language of the embedded checkpoints (word problems, lists, look-ups) and its scorer.

A sequence is `<bos> prompt : answer . <eos>*`. Every word, sign and number from 0 to 30 is one token, and
tokens are separated by single spaces, so that `text.split()` is the tokenisation. Three tasks:

- `A` (arithmetic, 60%): one to four step word problems, answered with a chain of thought.
- `L` (list, 15%): sort, reverse or copy four to seven digits.
- `F` (fact, 25%): look up the colour or the place of one of three animals.

Examples are a pure function of (split, seed, index): nothing depends on the order in which they are drawn.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Task = Literal["A", "L", "F"]

LARGEST_NUMBER = 30
MAX_PROMPT_TOKENS = 32  # with <bos>; leaves 32 of the 64 positions for the answer
MAX_ANSWER_TOKENS = 31  # one more position is kept for <eos>
TASK_WEIGHTS: dict[Task, float] = {"A": 0.60, "L": 0.15, "F": 0.25}

PRONOUNS = {
    "tom": "he",
    "ben": "he",
    "sam": "he",
    "max": "he",
    "leo": "he",
    "anna": "she",
    "lucy": "she",
    "mia": "she",
    "eva": "she",
    "nina": "she",
}
NAMES = tuple(PRONOUNS)
OBJECTS = ("apples", "books", "cards", "coins", "cups", "eggs", "pens", "shells", "stones", "toys")
GAIN_VERBS = ("buys", "finds", "gets", "picks", "wins")
LOSS_VERBS = ("breaks", "drops", "gives", "loses", "sells")
LIST_OPERATIONS: dict[str, Callable[[list[int]], list[int]]] = {
    "sort": sorted,
    "reverse": lambda digits: digits[::-1],
    "copy": list,
}
ANIMALS = ("bear", "bird", "cat", "cow", "dog", "fox", "horse", "pig")
COLOURS = ("black", "blue", "brown", "green", "grey", "red", "white", "yellow")
PLACES = ("barn", "field", "garden", "house", "park", "river", "town", "wood")
FUNCTION_WORDS = (
    "has",
    "more",
    "to",
    "how",
    "many",
    "does",
    "have",
    "now",
    "are",
    "left",
    "he",
    "she",
    "answer",
    "what",
    "colour",
    "where",
    "is",
    "the",
    "in",
)
SIGNS = (".", ":", "?", "+", "-", "=")


@dataclass(frozen=True)
class Example:
    """One problem: `prompt` ends with ":", `answer` with ".", `target` is what the scorer expects."""

    task: Task
    prompt: str
    answer: str
    target: str

    @property
    def text(self) -> str:
        """Prompt and answer as they stand in the training corpus, without special tokens."""
        return f"{self.prompt} {self.answer}"


def words() -> tuple[str, ...]:
    """All words, signs and numbers of the language, without duplicates, in the order of their ids."""
    numbers = tuple(str(n) for n in range(LARGEST_NUMBER + 1))
    groups = (
        numbers,
        SIGNS,
        FUNCTION_WORDS,
        NAMES,
        OBJECTS,
        GAIN_VERBS,
        LOSS_VERBS,
        tuple(LIST_OPERATIONS),
        ANIMALS,
        COLOURS,
        PLACES,
    )
    return tuple(dict.fromkeys(word for group in groups for word in group))


def generate(task: Task, rng: random.Random) -> Example:
    """Draw one example of a task, redrawing the rare ones that are too long for the sequence."""
    make = {"A": _word_problem, "L": _list_problem, "F": _lookup_problem}[task]
    while True:
        example = make(rng)
        # One more token than words in the prompt: <bos>.
        if len(example.prompt.split()) < MAX_PROMPT_TOKENS and len(example.answer.split()) <= MAX_ANSWER_TOKENS:
            return example


def stream(split: str, seed: int, tasks: Iterable[Task] | None = None) -> Iterator[Example]:
    """Yield examples without end; example i depends on (split, seed, i) and on nothing else.

    With `tasks` given they are drawn evenly from these; otherwise by `TASK_WEIGHTS`.
    """
    weights = TASK_WEIGHTS if tasks is None else dict.fromkeys(tasks, 1.0)
    names, masses = list(weights), list(weights.values())
    index = 0
    while True:
        rng = random.Random(f"{split}/{seed}/{index}")
        yield generate(rng.choices(names, masses)[0], rng)
        index += 1


def extract_answer(text: str) -> str | None:
    """The words between the last "answer" and the next ".", or None where a text has no complete answer."""
    tokens = text.split()
    if "answer" not in tokens:
        return None
    tail = tokens[len(tokens) - tokens[::-1].index("answer") :]
    return " ".join(tail[: tail.index(".")]) if "." in tail else None


def is_correct(text: str, target: str) -> bool:
    """Exact match of the final answer of a completion (or prompt and completion) without special tokens."""
    return extract_answer(text) == target


def _word_problem(rng: random.Random) -> Example:
    # tom has 5 apples . tom buys 4 more . how many apples ? : 5 + 4 = 9 . answer 9 .
    name, thing = rng.choice(NAMES), rng.choice(OBJECTS)
    total = rng.randint(0, LARGEST_NUMBER)
    sentences, thoughts = [f"{name} has {total} {thing} ."], []
    for _ in range(rng.randint(1, 4)):
        gains = total == 0 or (total < LARGEST_NUMBER and rng.random() < 0.5)
        amount = rng.randint(1, LARGEST_NUMBER - total if gains else total)
        after = total + amount if gains else total - amount
        who = PRONOUNS[name] if rng.random() < 0.25 else name
        sentences.append(_gain(who, amount, thing, rng) if gains else _loss(who, name, amount, thing, rng))
        thoughts.append(f"{total} {'+' if gains else '-'} {amount} = {after} .")
        total = after
    prompt = " ".join([*sentences, _question(name, thing, rng), ":"])
    return Example("A", prompt, " ".join([*thoughts, f"answer {total} ."]), str(total))


def _gain(who: str, amount: int, thing: str, rng: random.Random) -> str:
    tail = rng.choices(("more", f"more {thing}", thing), (0.6, 0.2, 0.2))[0]
    return f"{who} {rng.choice(GAIN_VERBS)} {amount} {tail} ."


def _loss(who: str, owner: str, amount: int, thing: str, rng: random.Random) -> str:
    verb = rng.choice(LOSS_VERBS)
    tails = [[], [thing]]
    if verb == "gives":
        receiver = rng.choice([name for name in NAMES if name != owner])
        tails = [["to", receiver], [thing, "to", receiver]]
    return " ".join([who, verb, str(amount), *rng.choices(tails, (0.7, 0.3))[0], "."])


def _question(name: str, thing: str, rng: random.Random) -> str:
    ends = ("", " now", " are left", f" does {name} have")
    return f"how many {thing}{rng.choices(ends, (0.55, 0.15, 0.15, 0.15))[0]} ?"


def _list_problem(rng: random.Random) -> Example:
    # sort 5 3 9 1 : answer 1 3 5 9 .
    operation = rng.choice(list(LIST_OPERATIONS))
    digits = [rng.randint(0, 9) for _ in range(rng.randint(4, 7))]
    target = " ".join(map(str, LIST_OPERATIONS[operation](digits)))
    return Example("L", f"{operation} {' '.join(map(str, digits))} :", f"answer {target} .", target)


def _lookup_problem(rng: random.Random) -> Example:
    # the cat is red . the dog is blue . the fox is red . what colour is the dog ? :
    # the dog is blue . answer blue .
    # Restating the fact is this task's chain of thought.
    animals = rng.sample(ANIMALS, 3)
    asks_colour = rng.random() < 0.5
    values = [rng.choice(COLOURS if asks_colour else PLACES) for _ in animals]
    link = "is" if asks_colour else "is in the"
    facts = [f"the {animal} {link} {value} ." for animal, value in zip(animals, values, strict=True)]
    chosen = rng.randrange(3)
    question = f"{'what colour' if asks_colour else 'where'} is the {animals[chosen]} ? :"
    return Example("F", " ".join([*facts, question]), f"{facts[chosen]} answer {values[chosen]} .", values[chosen])
