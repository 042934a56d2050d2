"""nnsight's own tests of interleaving, source, batching, backward and models, over `DiffusionLM`.

The files are those of the installed version's source distribution. A subprocess runs them, since they replace what
nnsight's names mean; `nnsight_hosts` says what the tests wrap, `nnsight_exclusions` what does not apply and why.
Tests that are excluded because they need GPT-2's weights or a pipeline are restated here.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.testing import tiny
from tests.suites.sdists import unpacked_sdist

FILES = [
    "test_interleaving.py",
    "test_source.py",
    "test_batching.py",
    "test_backward.py",
    *(
        f"test_language.py::{name}"
        for name in (
            "TestCombinedWith",
            "TestActivationModification",
            "TestGradients",
            "TestAdhocModules",
            "TestInputSetting",
            "TestSource",
            "TestEarlyStop",
            "TestIteration",
            "TestSession",
            "TestCache",
            "TestTokenization",
            "TestSkipRealModel",
            "TestMultipleBackward",
        )
    ),
]
"""Other classes of test_language build nnsight's own models: renamed, quantised, on the meta device, with PEFT."""

LEAST = {"gpt2": 230, "llama": 60, "llada": 60}
"""Tests that pass for a model: fewer means that the plugin selected too little. Only the first host runs those that
build none."""


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.parametrize("host", LEAST)
def test_nnsight_s_own_tests_hold_of_diffusion_lm(host: str, tmp_path: Path) -> None:
    tests = unpacked_sdist("nnsight") / "tests"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.suites.nnsight_hosts"]
    settings = tmp_path / "pytest.ini"
    settings.write_text("[pytest]\n")  # not nnsight's own settings; pytest 9.2 refuses os.devnull
    options = ["-c", str(settings), "--rootdir", ".", "--import-mode=importlib", "--noconftest", "--tb=short"]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*command, *options, *FILES],
        cwd=tests,
        # Other plugins (anyio's) do not import once nnsight has given every object a `save`.
        env={**os.environ, "HOST": host, "PYTHONPATH": root, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed >= LEAST[host]


IDS, OTHER = [5, 9, 14, 3], [7, 2, 33, 21]
MODELS = {"causal": {}, "llada": {"block_length": 4, "temperature": 0.0}}


def run_settings(family: str) -> dict[str, Any]:
    return {"steps": 4, "gen_length": 4, **MODELS[family]}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("receivers", [1, 2])
def test_embeddings_cross_a_barrier_into_other_invokes_of_a_run(family: str, receivers: int) -> None:
    """With the sender's embeddings in the first step, the next-token logits of the receivers are the sender's."""
    lm: Any = dl.DiffusionLM(tiny(family))
    with lm.generate(**run_settings(family)) as tracer:
        barrier = tracer.barrier(1 + receivers)
        logits = [].save()
        with tracer.invoke(IDS):
            embeddings = lm.embed.output
            barrier()
            logits.append(lm.lm_head.output)
        for _ in range(receivers):
            with tracer.invoke(OTHER):
                barrier()
                lm.embed.output = embeddings
                logits.append(lm.lm_head.output)
    alone = [lm.trace(prompt, trace=False).logits for prompt in (IDS, OTHER)]
    assert len(logits) == 1 + receivers
    for received in logits[1:]:
        assert torch.equal(received, logits[0])
    if family == "causal":
        torch.testing.assert_close(logits[0][:, -1], alone[0][:, -1])
        assert not torch.allclose(alone[0][:, -1], alone[1][:, -1])


@pytest.mark.parametrize("family", MODELS)
def test_a_run_of_invokes_is_the_runs_of_each_alone(family: str) -> None:
    lm: Any = dl.DiffusionLM(tiny(family))
    settings = run_settings(family)
    with lm.generate(**settings) as tracer:
        with tracer.invoke(IDS[:2]):
            short = tracer.result.save()
        with tracer.invoke([IDS, OTHER]):
            pair = tracer.result.save()
    for prompts, run in ((IDS[:2], short), ([IDS, OTHER], pair)):
        alone = dl.denoise(lm._module, prompts, **settings)
        assert run.tokens[:, -4:].equal(alone.tokens[:, -4:])


@pytest.mark.parametrize("family", MODELS)
def test_each_invoke_iterates_over_its_own_slice(family: str) -> None:
    """tracer.iter[1:3] and [:3] of the same run: what the first reads is the tail of what the second reads."""
    lm: Any = dl.DiffusionLM(tiny(family))
    with lm.generate(**run_settings(family)) as tracer:
        with tracer.invoke(IDS):
            first = [].save()
            for _ in tracer.iter[1:3]:
                first.append(lm.lm_head.output.clone())
        with tracer.invoke(IDS):
            second = [].save()
            for _ in tracer.iter[:3]:
                second.append(lm.lm_head.output.clone())
    assert len(first) == 2
    assert len(second) == 3
    for got, expected in zip(first, second[1:], strict=True):
        assert torch.equal(got, expected)
    assert not torch.allclose(second[0][:, -1], second[1][:, -1])


@pytest.mark.parametrize("family", MODELS)
def test_an_edit_of_the_last_layer_stays_in_its_invoke(family: str) -> None:
    lm: Any = dl.DiffusionLM(tiny(family))
    alone = lm.trace(IDS, trace=False).logits
    with lm.trace() as tracer:
        with tracer.invoke(IDS):
            lm.layers[-1].output[:] = 0
            edited = lm.lm_head.output.save()
        with tracer.invoke(IDS):
            hidden = lm.layers[-1].output.save()
            logits = lm.lm_head.output.save()
    assert bool((hidden != 0).all())
    torch.testing.assert_close(logits, alone)
    assert not torch.allclose(edited, alone)


@pytest.mark.parametrize("family", MODELS)
def test_the_source_of_attention_calls_our_function(family: str) -> None:
    """The nested source of the attention interface, in a forward and over the steps of a run."""
    lm: Any = dl.DiffusionLM(tiny(family))
    attn = lm.layers[0].attn
    with lm.trace(IDS):
        call = attn.source.attention_interface_1  # instruments the forward, so before it runs
        z = attn.z.save()
        mixed = call.output[0].save()
    assert torch.equal(mixed, z)
    with lm.generate(IDS, **run_settings(family)) as tracer:
        shapes = [].save()
        for _ in tracer.iter[:3]:
            shapes.append(tuple(attn.source.attention_interface_1.output[0].shape))
    lengths = [4, 1, 1] if family == "causal" else [8, 8, 8]  # a cache in AR decoding
    assert shapes == [(1, length, 4, 8) for length in lengths]


@pytest.mark.parametrize("family", MODELS)
def test_an_argument_that_no_forward_has_is_refused(family: str) -> None:
    """transformers' forwards take any name and ignore it: truncation=True would do nothing."""
    lm: Any = dl.DiffusionLM(tiny(family))
    with pytest.raises(ValueError, match=r"lm.trace has no argument 'truncation': .* \w+.forward; tokenize"):
        with lm.trace("w5 w9 w14", truncation=True, max_length=2):
            lm.lm_head.output.save()
    with pytest.raises(ValueError, match=r"lm\.trace has no argument 'steps'"):
        with lm.trace() as tracer:
            with tracer.invoke(IDS, steps=4):
                lm.lm_head.output.save()
    with lm.trace(IDS, output_hidden_states=True):
        states = lm.output.hidden_states.save()
    assert len(states) == 3
