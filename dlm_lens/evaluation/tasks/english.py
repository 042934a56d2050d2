"""Documents and scorer of the shipped English word problems, for the YAML file beside this one; English prompts."""

import random
import re
from typing import Any

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


def arithmetic(**_metadata: Any) -> dict[str, Any]:
    """Word problems of one step, with the beginning of the answer."""
    import datasets

    return {"test": datasets.Dataset.from_list(word_problems())}


def word_problems() -> list[dict[str, str]]:
    """240 problems, half sums and half differences of numbers up to 15.

    `begun` starts the answer, up to its first digit.
    """
    rng = random.Random(7)
    found: dict[str, dict[str, str]] = {}
    while len(found) < 240:
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
    """192 questions and requests about everyday topics, no two of them the same."""
    every = [question.format(topic) for question in QUESTIONS for topic in TOPICS]
    return [{"prompt": prompt} for prompt in random.Random(7).sample(every, 192)]


def exact_match(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the first whole number of the answer is the target."""
    return {"exact_match": float(first_number(results[0]) == doc["target"])}


def first_number(text: str) -> str | None:
    """The first whole number of a text, or None."""
    found = re.search(r"\d+", text)
    return found.group() if found else None
