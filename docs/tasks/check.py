"""Check an answer to a task of this folder: `python docs/tasks/check.py 3 answer.json`, from a clone."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def main(arguments: list[str]) -> int:
    """Print what is wrong with the answer; 0 if it is right, 1 if it is not, 2 if it cannot be read."""
    from tests.tasks.checks import TASKS, check

    if len(arguments) != 2 or arguments[0] not in map(str, TASKS):
        sys.stderr.write(f"usage: python docs/tasks/check.py TASK answer.json, TASK from 1 to {TASKS[-1]}\n")
        return 2
    try:
        answer = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{arguments[1]} cannot be read as JSON: {error}\n")
        return 2
    wrong = check(int(arguments[0]), answer)
    sys.stdout.write("".join(f"- {line}\n" for line in wrong) or f"task {arguments[0]}: right\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
