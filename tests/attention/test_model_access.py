"""One thread at a time on a model, and hooks on compiled models."""

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.attention import attach_hooks, attention_blocks, in_use
from dlm_lens.attention.model_access import lock_of
from dlm_lens.hooks import ablate, mask_top_sinks
from dlm_lens.testing import tiny

IDS = [5, 9, 14]
RUN = {"steps": 2, "gen_length": 8, "block_length": 8}


def as_whole(model: Any) -> None:
    model.compile(backend="eager")


def as_decoder(model: Any) -> None:
    model.model.compile(backend="eager")


def as_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="eager")


def as_parts(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.compile(backend="eager")
        layer.mlp.compile(backend="eager")


def as_replaced_layers(model: Any) -> None:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="eager")


def as_replaced_parts(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn = torch.compile(layer.self_attn, backend="eager")
        layer.mlp = torch.compile(layer.mlp, backend="eager")


def as_forwards(model: Any) -> None:
    model.model.forward = torch.compile(model.model.forward, backend="eager")
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")


WAYS = [as_whole, as_decoder, as_layers, as_parts, as_replaced_layers, as_replaced_parts, as_forwards]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llada")


@pytest.fixture(scope="module", autouse=True)
def fresh_compiler() -> Any:
    yield
    COMPILED.clear()
    torch._dynamo.reset()


COMPILED: dict[Any, Any] = {}


def compiled(way: Callable[[Any], None]) -> Any:
    """A copy that has run compiled, without any listener, on the canvases of `RUN`; one for all tests."""
    if way not in COMPILED:
        model = tiny("llada")
        way(model)
        dl.denoise(model, IDS, logits="all", **RUN)
        COMPILED[way] = model
    return COMPILED[way]


def slow_but(*quick: Any) -> list[Any]:
    """All ways to compile; tracing takes seconds for each."""
    return [way if way in quick else pytest.param(way, marks=pytest.mark.long) for way in WAYS]


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.parametrize("way", slow_but(as_decoder))
def test_hooks_and_readers_act_on_a_compiled_model(model: Any, way: Any) -> None:
    held = compiled(way)
    plain = dl.denoise(model, IDS, **RUN)
    for site in ("z", "attn_out", "mlp_out", "resid"):
        hooks = [ablate(site, value="zero", positions=[1])]
        expected = dl.denoise(model, IDS, hooks=hooks, **RUN)
        found = dl.denoise(held, IDS, hooks=hooks, logits="all", **RUN)
        torch.testing.assert_close(found.confidence, expected.confidence, rtol=0, atol=0)
        assert not torch.equal(found.confidence, plain.confidence)
    reducers = [dl.ReceivedAttention(), dl.recording.UpdateNorm(), dl.recording.ResidualNorm()]
    hooks = [mask_top_sinks(1, stage="after"), mask_top_sinks(1, source="clean")]
    expected, found = (dl.record(each, [IDS], reducers, hooks=hooks, logits="all", **RUN) for each in (model, held))
    assert expected.run.settings["columns_hidden"] == found.run.settings["columns_hidden"]
    same(found, expected)
    same(dl.received_over_steps(held, plain), dl.received_over_steps(model, plain))
    for quantity in ("max activation", "key norm"):
        same(*(dl.sinks.key_statistic_over_steps(each, plain, quantity) for each in (held, model)))
    with torch.no_grad(), dl.record_forward(held, reducers) as one:
        held(plain.canvases[0])
    with torch.no_grad(), dl.record_forward(model, reducers) as other:
        model(plain.canvases[0])
    same(one.recording, other.recording)
    # Afterwards it runs compiled again, and without any hook.
    assert torch.equal(dl.denoise(held, IDS, logits="all", **RUN).confidence, plain.confidence)


@pytest.mark.long
@pytest.mark.parametrize("way", slow_but(as_decoder))
def test_the_hosts_see_a_compiled_model(model: Any, way: Any) -> None:
    held, ids = compiled(way), dl.denoise(model, IDS, **RUN).canvases[0]
    if way in (as_replaced_layers, as_replaced_parts, as_forwards):
        name = {as_replaced_layers: "model.layers.0", as_replaced_parts: "model.layers.0.self_attn"}
        for host in (dl.bridge, dl.DiffusionLM):
            with pytest.raises(
                ValueError, match=f"{name.get(way, 'model.forward')} is what torch.compile returned"
            ):
                host(held)
        return
    lm = dl.DiffusionLM(held, check=False)
    with torch.no_grad(), lm.trace(ids):
        lm.layers[1].attn.v[:, 1] = 0
        pattern = lm.layers[1].attn.pattern.save()
        logits = lm.lm_head.output.save()
    with attach_hooks(model, ablate("v", value="zero", positions=[1]), layers=[1]), torch.no_grad():
        expected = model(ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pattern.sum(-1), torch.ones(1, 4, 11))
    bridge = dl.bridge(held)
    hooks = [ablate("z", value="zero", positions=[1])]
    assert bridge.denoise(IDS, hooks=hooks, **RUN).tokens.equal(dl.denoise(model, IDS, hooks=hooks, **RUN).tokens)


@pytest.mark.long
def test_hooks_act_on_a_compiled_bridge(model: Any) -> None:
    bridge, ids = dl.bridge(model), dl.denoise(model, IDS, **RUN).canvases[0]
    bridge.original_model.model.compile(backend="eager")
    plain = bridge.denoise(IDS, **RUN)
    hooks = [ablate("z", value="zero", positions=[1])]
    found = bridge.denoise(IDS, hooks=hooks, **RUN)
    assert not torch.equal(found.confidence, plain.confidence)
    torch.testing.assert_close(found.confidence, dl.denoise(model, IDS, hooks=hooks, **RUN).confidence)
    _, cache = bridge.run_with_cache(ids)
    torch.testing.assert_close(cache["blocks.1.attn.hook_pattern"].sum(-1), torch.ones(1, 4, 11))


def test_what_torch_compile_returns_is_a_model(model: Any) -> None:
    held = torch.compile(tiny("llada"), backend="eager")
    hooks = [ablate("resid", value="zero", positions=[1])]
    for logits in ("needed", "all"):
        found = dl.denoise(held, IDS, hooks=hooks, logits=logits, **RUN)
        expected = dl.denoise(model, IDS, hooks=hooks, logits=logits, **RUN)
        torch.testing.assert_close(found.confidence, expected.confidence, rtol=0, atol=0)
    assert dl.bridge(held).denoise(IDS, **RUN).tokens.equal(dl.denoise(model, IDS, **RUN).tokens)
    assert dl.DiffusionLM(held)._module is held._orig_mod


@pytest.mark.long
def test_a_hook_put_on_by_hand_acts_on_a_compiled_model(model: Any) -> None:
    held, ids = compiled(as_decoder), dl.denoise(model, IDS, **RUN).canvases[0]

    def logits(model: Any, *hooks: Any) -> torch.Tensor:
        point = model.model.layers[1].self_attn.hook_z
        handles = [point.register_forward_hook(hook) for hook in hooks]
        with torch.no_grad():
            found: torch.Tensor = model(ids).logits
        for handle in handles:
            handle.remove()
        return found

    def zero(module: Any, args: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 0

    def double(module: Any, args: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    for hooks in ((), (zero,), (double,), ()):
        torch.testing.assert_close(logits(held, *hooks), logits(model, *hooks), rtol=0, atol=0)
    assert not torch.equal(logits(held), logits(held, double))


def test_the_stance_of_the_compiler_is_given_back(model: Any) -> None:
    from torch._dynamo import eval_frame

    assert eval_frame._stance.stance == "default"
    with attach_hooks(model), attach_hooks(model):
        assert eval_frame._stance.stance == "force_eager"
    assert eval_frame._stance.stance == "default"
    with pytest.raises(ZeroDivisionError), attach_hooks(model):
        _ = 1 / 0
    assert eval_frame._stance.stance == "default"


# Threads


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that begin at the same time, each in a thread; errors are results."""
    begin, found = threading.Barrier(len(calls)), [None] * len(calls)

    def call(index: int) -> None:
        begin.wait()
        try:
            found[index] = calls[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return found


def numbers(value: Any) -> list[torch.Tensor]:
    """All tensors of a result, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dl.Recording):
        return [*value.arrays.values(), value.run.canvases]
    if isinstance(value, dict):
        return [each for one in value.values() for each in numbers(one)]
    if isinstance(value, tuple | list):
        return [each for one in value for each in numbers(one)]
    return numbers(vars(value)) if hasattr(value, "__dict__") else []


def same(found: Any, expected: Any) -> None:
    if isinstance(found, Exception):
        raise found
    ours, theirs = numbers(found), numbers(expected)
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


HOOKS = [ablate("attn_out", value="zero"), mask_top_sinks(2)]
RUNS: dict[str, Callable[[Any], Any]] = {
    "denoise": lambda m: dl.denoise(m, IDS, **RUN),
    "denoise with hooks": lambda m: dl.denoise(m, IDS, hooks=HOOKS, **RUN),
    "record": lambda m: dl.record(m, [IDS], [dl.ReceivedAttention(), dl.recording.UpdateNorm()], **RUN),
    "compare": lambda m: dl.compare(m, [IDS], HOOKS, **RUN),
    "log_likelihood": lambda m: dl.log_likelihood(m, IDS, [7, 8, 9], samples=8),
    "replay": lambda m: dl.replay(m, dl.denoise(m, IDS, **RUN), hooks=HOOKS),
    "received_over_steps": lambda m: dl.received_over_steps(m, dl.denoise(m, IDS, **RUN)),
    "key_statistic_over_steps": lambda m: dl.sinks.key_statistic_over_steps(
        m, dl.denoise(m, IDS, **RUN), "key norm"
    ),
    "logit_lens": lambda m: dl.logit_lens(m, dl.denoise(m, IDS, **RUN)),
}


@pytest.mark.parametrize("name", RUNS)
def test_two_threads_on_one_model(model: Any, name: str) -> None:
    names = [name, "denoise with hooks", "denoise"]
    expected = [RUNS[each](model) for each in names]
    for _ in range(2):
        for found, wanted in zip(in_threads(*(lambda n=n: RUNS[n](model) for n in names)), expected, strict=True):
            same(found, wanted)


def test_two_threads_with_hosts(model: Any) -> None:
    bridge = dl.bridge(model)
    lm = dl.DiffusionLM(model)

    def traced() -> Any:
        with lm.generate(IDS, **RUN) as tracer:
            kept = [].save()
            for _ in tracer.steps:
                lm.layers[0].attn.z[:, 1] = 0
                kept.append(lm.layers[1].output.clone())
        return kept

    calls: list[Callable[[], Any]] = [
        lambda: RUNS["denoise"](model),
        lambda: RUNS["denoise with hooks"](model),
        lambda: bridge.denoise(IDS, hooks=HOOKS, **RUN),
        lambda: bridge.denoise(IDS, **RUN),
        lambda: bridge.run_with_cache(torch.tensor([IDS]), return_cache_object=False),
        traced,
    ]
    expected = [call() for call in calls]
    for _ in range(3):
        for found, wanted in zip(in_threads(*calls), expected, strict=True):
            same(found, wanted)


def test_a_forward_pass_beside_another_thread_s_hooks_is_refused(model: Any) -> None:
    ids = torch.tensor([IDS])
    with attach_hooks(model, *HOOKS[:1]):
        (error,) = in_threads(lambda: model(ids))
        assert isinstance(error, RuntimeError)
        assert "beside hooks" in str(error)
        model(ids)
    (fine,) = in_threads(lambda: model(ids))
    assert torch.equal(fine.logits, model(ids).logits)


def test_the_lock_is_the_model_s_own(model: Any) -> None:
    copied, bridge = copy.deepcopy(model), dl.bridge(model)
    locks = [lock_of(each) for each in (model, copied, bridge.original_model)]
    assert len({id(lock) for lock in locks}) == 3
    assert all(block.self_attn.lock is locks[1] for block in attention_blocks(copied))
    assert lock_of(torch.nn.Linear(2, 2)) is None
    with in_use(model):
        # Another model's run does not wait for this one's lock.
        (found,) = in_threads(lambda: dl.denoise(copied, IDS, **RUN))
    same(found, dl.denoise(model, IDS, **RUN))


def test_the_lock_may_be_taken_again_and_is_given_back(model: Any) -> None:
    with in_use(model), attach_hooks(model), in_use(model):
        dl.denoise(model, IDS, hooks=HOOKS, **RUN)
    lock = lock_of(model)
    assert (lock.owner, lock.depth, lock.listeners) == (None, 0, 0)
    with pytest.raises(ZeroDivisionError), in_use(model):
        _ = 1 / 0
    assert (lock.owner, lock.depth, lock.listeners) == (None, 0, 0)


def test_two_threads_that_wait_for_each_other_are_told() -> None:
    one, two = tiny("llada"), tiny("llada", seed=1)
    both = threading.Barrier(2)

    def nested(first: Any, second: Any) -> Callable[[], Any]:
        def call() -> str:
            with in_use(first):
                both.wait()
                with in_use(second):
                    return "ran"

        return call

    found = in_threads(nested(one, two), nested(two, one))
    errors = [each for each in found if isinstance(each, RuntimeError)]
    assert len(errors) == 1
    assert "each wait for a model" in str(errors[0])
    assert "ran" in found


def test_a_thread_that_ended_with_hooks_on_the_model_is_named() -> None:
    model = tiny("llada")
    opened = attach_hooks(model, *HOOKS)
    thread = threading.Thread(target=opened.__enter__, name="forgetful")
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="forgetful has ended while its hooks are still on the model"):
        dl.denoise(model, IDS, **RUN)
    opened.__exit__(None, None, None)
    dl.denoise(model, IDS, **RUN)


def test_a_long_wait_is_told(model: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr("dlm_lens.attention.model_access.SECONDS_UNTIL_WARNING", 0.05)
    with in_use(model):
        thread = threading.Thread(target=lambda: dl.denoise(model, IDS, **RUN), name="second")
        thread.start()
        for _ in range(100):
            time.sleep(0.05)
            if caplog.records:
                break
    thread.join()
    assert [record.getMessage() for record in caplog.records] == [
        "second waits for MainThread, which uses the same model"
    ]


# Errors


class Failing:
    """A hook that raises after so many calls."""

    site = "mlp_out"

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
        self.calls -= 1
        if self.calls < 0:
            raise ZeroDivisionError
        return tensor


def failing_trace(model: Any) -> None:
    lm = dl.DiffusionLM(model, check=False)
    with lm.generate(IDS, **RUN) as tracer:
        for _ in tracer.steps:
            lm.layers[1].attn.pattern.sum().item() / 0


def failing_forward(model: Any) -> None:
    with dl.record_forward(model, [dl.ReceivedAttention()]), attach_hooks(model, Failing(1)):
        model(torch.tensor([IDS]))


def failing_bridge(model: Any) -> None:
    bridge = dl.bridge(model)
    try:
        bridge.denoise(IDS, hooks=[mask_top_sinks(1, source="clean"), Failing(2)], **RUN)
    finally:
        is_clean(bridge.original_model, points=bridge.hook_points())


ERRORS: dict[str, Callable[[Any], Any]] = {
    "denoise": lambda m: dl.denoise(m, IDS, hooks=[mask_top_sinks(1, source="clean"), Failing(3)], **RUN),
    "record": lambda m: dl.record(m, [IDS], [dl.recording.UpdateNorm()], hooks=[Failing(3)], **RUN),
    "compare": lambda m: dl.compare(m, [IDS], [Failing(3)], **RUN),
    "replay": lambda m: dl.replay(m, dl.denoise(m, IDS, **RUN), hooks=[Failing(1)]),
    "a forward": failing_forward,
    "a trace": failing_trace,
    "a bridge": failing_bridge,
}


def is_clean(model: Any, points: Any = ()) -> None:
    """No hook, no reader, no lock and no stance of the compiler is left."""
    from torch._dynamo import eval_frame

    lock = lock_of(model)
    assert (lock.owner, lock.depth, lock.listeners) == (None, 0, 0)
    assert eval_frame._stance.stance == "default"
    assert not any(getattr(module, "readers", ()) for module in model.modules())
    assert not any(point.fwd_hooks or point.bwd_hooks for point in points)
    if not points:
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_leaves_nothing_on_a_model(name: str) -> None:
    model = tiny("llada")
    before = dl.denoise(model, IDS, **RUN)
    with pytest.raises(ZeroDivisionError):
        ERRORS[name](model)
    is_clean(model)
    assert torch.equal(dl.denoise(model, IDS, **RUN).confidence, before.confidence)
    # Another thread does not wait either.
    same(in_threads(lambda: dl.denoise(model, IDS, **RUN))[0], before)
