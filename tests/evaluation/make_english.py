"""Writes the English data of the shipped tasks: `python -m tests.evaluation.make_english`."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

DIRECTORY = Path(__file__).parents[2] / "dlm_lens/evaluation/tasks"
SEED = 7
PROBLEMS, PROMPTS = 240, 192

NAMES = (
    "Ada", "Ben", "Clara", "David", "Emma", "Finn", "Grace", "Hugo", "Ivy", "Jonas", "Kate", "Leo", "Mara", "Noah",
    "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor",
)  # fmt: skip
OBJECTS = (
    "apples", "pens", "books", "coins", "cups", "keys", "stamps", "buttons", "shells", "cards", "plums", "candles",
)  # fmt: skip
MORE = ("{0} buys {1} more {2}.", "{0} finds {1} more {2}.", "A friend gives {0} {1} more {2}.")
LESS = ("{0} loses {1} {2}.", "{0} sells {1} {2}.", "{0} gives {1} {2} to a friend.")

QUESTIONS = (
    "Tell me something interesting about {}.",
    "Write two sentences about {}.",
    "Why do people write songs about {}?",
    "What would a child ask about {}?",
    "Describe {} to a friend who lives far away.",
    "Give three words that go well with {}.",
    "What did people think about {} a hundred years ago?",
    "Begin a short story about {}.",
    "Which season goes best with {}, and why?",
    "Where could I learn more about {}?",
    "Explain in simple words what is special about {}.",
    "What do most people not know about {}?",
)
TOPICS = (
    "bread", "cheese", "tea", "rain", "snow", "the moon", "the sea", "rivers", "bees", "horses", "cats", "owls",
    "bicycles", "trains", "bridges", "clocks", "maps", "letters", "music", "paint", "wool", "glass", "salt",
    "honey", "apples", "potatoes", "gardens", "forests", "mountains", "islands", "schools", "markets",
)  # fmt: skip


def problems() -> list[dict[str, str]]:
    """Word problems of one step, half sums and half differences of numbers up to 15.

    `begun` starts the answer, up to its first digit.
    """
    rng = random.Random(SEED)
    found: dict[str, dict[str, str]] = {}
    while len(found) < PROBLEMS:
        name, things, adds = rng.choice(NAMES), rng.choice(OBJECTS), len(found) % 2 == 0
        first = rng.randint(2, 9) if adds else rng.randint(5, 15)
        second = rng.randint(2, 9) if adds else rng.randint(2, first - 1)
        event = rng.choice(MORE if adds else LESS).format(name, second, things)
        prompt = f"{name} has {first} {things}. {event} How many {things} does {name} have now?"
        target = first + second if adds else first - second
        begun = f"{first} {'+' if adds else '-'} {second} = "
        found[prompt] = {"prompt": prompt, "begun": begun, "target": str(target)}
    return list(found.values())


def prompts() -> list[dict[str, str]]:
    """Questions and requests about everyday topics, no two of them the same."""
    every = [question.format(topic) for question in QUESTIONS for topic in TOPICS]
    return [{"prompt": prompt} for prompt in random.Random(SEED).sample(every, PROMPTS)]


def text(lines: Sequence[dict[str, str]]) -> str:
    """One line of JSON per document."""
    return "".join(json.dumps(line) + "\n" for line in lines)


def main() -> None:
    """Write both files."""
    (DIRECTORY / "english_arithmetic.jsonl").write_text(text(problems()), encoding="utf-8")
    (DIRECTORY / "english_prompts.jsonl").write_text(text(prompts()), encoding="utf-8")


if __name__ == "__main__":
    main()
