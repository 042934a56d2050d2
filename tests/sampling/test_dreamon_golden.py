"""Runs of DreamOn's `diffusion_generate`, token for token: what each step sees, its confidences, and the text."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens as dl

GOLDEN = Path(__file__).parent.parent / "golden"
STORED = json.loads((GOLDEN / "dreamon" / "sampling.json").read_text())
CONFIDENCE = load_file(GOLDEN / "dreamon" / "confidence.safetensors")
MASK = 250
NAMES = {"alg": "remasking", "number_transfer_tokens": "tokens_per_step", "pad_delete_to_right": "delete_to_right"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Dream's golden network, whose head proposes the two tokens that change the length more often."""
    path = tmp_path_factory.mktemp("dreamon")
    config = json.loads((GOLDEN / "dream" / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"expand_token_id": STORED["expand_token_id"]}))
    shutil.copy(GOLDEN / "dream" / "model.safetensors", path)
    loaded: Any = dl.load(path)
    with torch.no_grad():
        loaded.lm_head.weight[STORED["scaled"]] *= STORED["head_scale"]
    return loaded


@pytest.mark.parametrize("case", STORED["cases"], ids=lambda case: case["name"])
def test_reference_quirks_reproduce_the_authors_runs(model: Any, case: dict[str, Any]) -> None:
    given = {NAMES.get(name, name): value for name, value in case["args"].items()}
    drawn = given["temperature"] > 0 or given["alg_temp"]
    if drawn and not torch.__version__.startswith("2.13"):
        pytest.skip("torch.multinomial's stream belongs to a torch build; the golden's is 2.13")
    masks = case["prompt"].count(MASK)
    given |= {"gen_length": given.pop("max_new_tokens") - masks, "top_p": given["top_p"] or 1.0}
    run = dl.denoise(model, [case["prompt"]], seed=case["seed"], reference_quirks=True, **given)
    assert run.steps == len(case["steps"])
    confidences = CONFIDENCE[case["name"]].split([len(step["x0"]) for step in case["steps"]])
    for step, (stored, confidence) in enumerate(zip(case["steps"], confidences, strict=True)):
        seen = run.seen_content[step, 0]
        assert run.canvases[step, 0, seen].tolist() == stored["window"]
        eligible = run.confidence[step, 0].isfinite()
        assert eligible.equal(seen & run.masked[step, 0])
        # float32 sums of a few hundred terms in another order
        torch.testing.assert_close(run.confidence[step, 0, eligible], confidence, atol=1e-5, rtol=1e-5)
    last = run.tokens[0][~run.masked[-1, 0]].tolist()
    assert last == [token for token in case["final"] if token != MASK]


def test_the_stored_runs_grow_and_shrink() -> None:
    sizes = [[len(step["window"]) for step in case["steps"]] for case in STORED["cases"]]
    changes = {after - before for each in sizes for before, after in pairwise(each)}
    assert {-2, -1, 0, 1} <= changes
