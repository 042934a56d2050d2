"""What is computed again of a run that had hooks says that it is computed without them."""

from collections.abc import Callable
from typing import Any

import pytest

from dlm_lens import denoise, logit_lens, received_over_steps
from dlm_lens.hooks import mask_positions
from dlm_lens.probes import commitment, token_smearing
from dlm_lens.testing import tiny
from dlm_lens.viz import attention_maps

HOOK = mask_positions(0)
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "received_over_steps": received_over_steps,
    "commitment": commitment,
    "token_smearing": token_smearing,
    "logit_lens": lambda model, run: logit_lens(model, run, [4]),
    "attention_maps": lambda model, run: attention_maps(model, run, steps=[0], layer=0, head=0),
}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("name", list(CALLS))
def test_it_warns_once_and_only_of_hooks(name: str, hooked: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llada")
    run = denoise(model, [[1, 2, 3]], steps=4, gen_length=4, hooks=[HOOK] if hooked else [])
    CALLS[name](model, run)
    expected = f"the run was made under the hooks [{HOOK}]; this computes the network on its canvases under [] "
    expected += "(its own: hooks=dlm_lens.hooks.hooks_of_run(run))"
    assert [record.getMessage() for record in caplog.records] == [expected] * hooked


def test_the_runs_own_hooks_are_no_others(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llada")
    run = denoise(model, [[1, 2, 3]], steps=4, gen_length=4, hooks=[HOOK])
    logit_lens(model, run, [4], hooks=[HOOK])
    assert not caplog.records
