"""Sentences of our own, as a text for the tests: paragraphs that are all different."""

from pathlib import Path

PEOPLE = ("the miller", "a sailor", "our neighbour", "the old teacher", "my sister", "the clock maker")
PLACES = ("by the river", "behind the school", "at the harbour", "under the bridge", "in the market")
DEEDS = (
    "counted the boats until the rain came",
    "asked the children for the shortest way home",
    "sold two lamps and a broken chair",
    "wrote a letter and never sent it",
    "waited for the ferry, which was late again",
    "found a key that fitted no door",
    "painted the fence, and then painted it once more",
)


def paragraph(number: int) -> str:
    """Three sentences; the number decides which, and stands in the last."""
    who, where, what = (number % len(PEOPLE), number // 3 % len(PLACES), number // 2 % len(DEEDS))
    first = f"{PEOPLE[who].capitalize()} {DEEDS[what]} {PLACES[where]}."
    second = f"Nobody saw it but {PEOPLE[(who + 2) % len(PEOPLE)]}, who {DEEDS[(what + 3) % len(DEEDS)]}."
    return f"{first}\n{second}\nThat was on day {number}, or so they say {PLACES[(where + 1) % len(PLACES)]}."


def write_story(path: Path, paragraphs: int = 80) -> Path:
    """A .txt file, an empty line behind every paragraph."""
    path.write_text("\n\n".join(map(paragraph, range(paragraphs))) + "\n", encoding="utf-8")
    return path
