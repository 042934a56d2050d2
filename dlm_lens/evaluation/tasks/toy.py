"""Documents and scorer of the shipped tasks, for the YAML files beside this one.

The sentences are those of the embedded models' language: word problems with a chain of thought, lists, look-ups.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

LISTS: dict[str, Callable[[list[str]], list[str]]] = {
    "copy": list,
    "sort": sorted,
    "reverse": lambda one: one[::-1],
}
GAINS = ("buys", "finds", "gets", "picks", "wins")


def arithmetic(**_metadata: Any) -> dict[str, Any]:
    """Word problems of one to four steps."""
    return _split(documents("A"))


def lists(**_metadata: Any) -> dict[str, Any]:
    """Lists to sort, reverse or copy."""
    return _split(documents("L"))


def facts(**_metadata: Any) -> dict[str, Any]:
    """Look-ups of a colour or a place."""
    return _split(documents("F"))


def problems(**_metadata: Any) -> dict[str, Any]:
    """All of them."""
    return _split(documents())


def choices(**_metadata: Any) -> dict[str, Any]:
    """Look-ups with four answers to choose from."""
    return _split(choice_documents())


def documents(task: str | None = None) -> list[dict[str, Any]]:
    """The problems of a task of the language, "A", "L" or "F", or of all three."""
    return [
        {name: line[name] for name in ("task", "prompt", "answer")} | {"target": final_answer(line["answer"])}
        for line in _lines()
        if task in (None, line["task"])
    ]


def choice_documents() -> list[dict[str, Any]]:
    """The look-ups with their answers, each with every one of its `choices` in place of the target."""
    found = []
    for line in _lines():
        if words := line["choices"]:
            answer, target = line["answer"], final_answer(line["answer"])
            written = [answer.replace(target, word) for word in words]
            found.append({"prompt": line["prompt"], "choices": written, "gold": words.index(target)})
    return found


def exact_match(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether what stands between the last "answer" and the next "." is the target."""
    return {"exact_match": float(final_answer(results[0]) == doc["target"])}


def final_answer(text: str) -> str | None:
    """The words between the last "answer" and the next ".", or None where a text has no complete answer."""
    _, word, tail = f" {text} ".rpartition(" answer ")
    answer, stop, _rest = f" {tail}".partition(" . ")
    return answer.strip() if word and stop else None


def before_target(doc: dict[str, Any]) -> str:
    """The prompt and the chain of thought, up to the last "answer"."""
    return f"{doc['prompt']} {doc['answer'].rpartition(' ' + doc['target'] + ' .')[0]}"


def last_words(doc: dict[str, Any]) -> str:
    """The target, as it ends the text."""
    return f" {doc['target']} ."


def whole(doc: dict[str, Any]) -> str:
    """The text as it stood in training."""
    return f"{doc['prompt']} {doc['answer']}"


def _lines() -> list[dict[str, Any]]:
    """The problems of problems.txt: a line is a prompt and, of a look-up, the answers to choose from, by tabs."""
    text = (Path(__file__).parent / "problems.txt").read_text(encoding="utf-8")
    found = []
    for prompt, *choices in (line.split("\t") for line in text.splitlines()):
        task, answer = _solved(prompt)
        found.append({"prompt": prompt, "choices": choices, "task": task, "answer": answer})
    return found


def _solved(prompt: str) -> tuple[str, str]:
    """The task of a problem, and its answer as it stood in training."""
    *facts, question = prompt.split(" . ")
    operation, *digits, _colon = question.split()
    if operation in LISTS:
        return "L", f"answer {' '.join(LISTS[operation](digits))} ."
    if operation != "how":
        animal = question.split()[-3]
        (fact,) = (each for each in facts if each.split()[1] == animal)
        return "F", f"{fact} . answer {fact.split()[-1]} ."
    total, thoughts = int(facts[0].split()[2]), ""
    for sentence in facts[1:]:
        _who, verb, amount, *_ = sentence.split()
        sign, after = ("+", total + int(amount)) if verb in GAINS else ("-", total - int(amount))
        thoughts, total = f"{thoughts}{total} {sign} {amount} = {after} . ", after
    return "A", f"{thoughts}answer {total} ."


def _split(found: list[dict[str, Any]]) -> dict[str, Any]:
    import datasets

    return {"test": datasets.Dataset.from_list(found)}
