"""Figure 9: Figure 3 for the other models."""

from dataclasses import replace

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.fig3_distribution import EXPERIMENT as FIGURE_3
from dlm_lens.experiments.experiment import run_script

EXPERIMENT = replace(
    FIGURE_3,
    name="fig9-distributions",
    shows="2510.15731, Figure 9",
    title="distribution of attention scores in further models",
    small={**recorded_runs.SMALL, "models": ["toy-sink", "toy-gated"]},
    full={**recorded_runs.FULL, "models": ["Dream-org/Dream-v0-Instruct-7B", "Gen-Verse/MMaDA-8B-MixCoT"]},
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
