"""What Figures 1 and 3 ask; what came out is in test_one_token_claims.py."""

import pytest

from dlm_lens.experiments import find_experiment


@pytest.mark.parametrize("figure", ["figure1", "figure3"])
def test_figures_ask_every_prompt_once(figure: str) -> None:
    experiment = find_experiment(f"one-token-{figure}")
    given = {**experiment.small, "models": ["toy", "toy-sink"], "prompts": 5, "batch": 2}
    items = list(experiment.items(given))
    assert [(item["model"], item["start"]) for item in items] == [
        (model, start) for model in ("toy", "toy-sink") for start in (0, 2, 4)
    ]
    costs = [experiment.cost(item, given)[0] for item in items]
    assert [one.rows for one in costs] == [2, 2, 1] * 2
    # 32 steps of at most 32 of the prompt and 32 of the answer.
    assert {(one.passes, one.positions) for one in costs} == {(32, 64)}
    with pytest.raises(ValueError, match="prompts is 0"):
        list(experiment.items({**given, "prompts": 0}))
