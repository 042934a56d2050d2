"""The numbers of docs/commitment.md: `python -m benchmarks.class_readability` (a minute of one core)."""

import dlm_lens as dl
from dlm_lens.experiments.attention_sinks.problems import problems
from dlm_lens.probes import class_readability


def main() -> None:
    """Print the table of toy on 64 prompts of task A."""
    model = dl.load("toy", dtype="float64")  # in float32 other processors decide nearly equal confidences otherwise
    prompts = [problem.prompt for problem in problems("toy_arithmetic")[:64]]
    run = dl.denoise(model, prompts, steps=32, gen_length=32)
    print(class_readability(model, run).table().round(3).T.to_string())


if __name__ == "__main__":
    main()
