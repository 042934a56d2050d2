"""EAP and EAP-IG against single patched edges, planted edges and completeness."""

import pytest
import torch

import dlm_lens as dl
from dlm_lens.attention import find_sites
from dlm_lens.hooks import ablate, at_heads
from dlm_lens.probes import Circuit, LogitDifference, LogProbability, edge_attribution, faithfulness
from dlm_lens.probes.attribution.streams import graph_of
from dlm_lens.testing import tiny
from tests.adapters.small_architectures import small_model
from tests.probes.attribution.planted import AGAINST, CIRCUIT, OTHER, PROMPT, linear, planted, run_of

TARGET = LogitDifference(AGAINST)


def edges_but(scores: object, source: int, destination: int) -> Circuit:
    """The whole graph without one edge."""
    graph = scores.graph  # type: ignore[attr-defined]
    edges = graph.exists.clone()
    edges[source, destination] = False
    return Circuit(graph, edges, graph.exists.double(), int(graph.exists.sum()))


@pytest.mark.parametrize("integration", [0, 3])
def test_planted_edges_alone_have_scores(integration: int) -> None:
    model = planted(CIRCUIT)
    run = run_of(model)
    found = edge_attribution(model, run, OTHER, target=TARGET, integration=integration)
    whole = (found.source - found.base).double()
    assert bool((whole.abs() > 1).all())
    wanted = torch.zeros_like(found.scores, dtype=torch.float64)
    names = found.graph.sources, found.graph.destinations
    for source, destination in (("embed", "a0.h1<v>"), ("a0.h1", "a1.h2<v>"), ("a1.h2", "logits")):
        wanted[:, :, names[0].index(source), names[1].index(destination)] = whole
    torch.testing.assert_close(found.scores.double(), wanted, atol=1e-10, rtol=1e-8)
    table, rows = found.table(3), len(run.tokens)
    assert set(zip(table.source, table.destination, strict=True)) == {
        ("embed", "a0.h1<v>"), ("a0.h1", "a1.h2<v>"), ("a1.h2", "logits")
    }  # fmt: skip
    assert table.score.tolist() == pytest.approx([float(whole.sum()) / rows] * 3)
    circuit = found.circuit(3)
    assert circuit.nodes == ("embed", "a0.h1", "a1.h2")
    exact = faithfulness(model, run, OTHER, circuit, target=TARGET)
    assert exact.normalised.value == pytest.approx(1.0, abs=1e-9)
    without = edges_but(found, names[0].index("a0.h1"), names[1].index("a1.h2<v>"))
    assert faithfulness(model, run, OTHER, without, target=TARGET).normalised.value == pytest.approx(0.0, abs=1e-9)


def test_a_mixture_of_experts_does_not_add_up_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    prompt, other = [[5, 9, 11, 3]], [[5, 9, 12, 3]]
    settings = {"target": LogProbability(), "steps": [0], "integration": 50}
    errors = {}
    every = {"num_experts_per_tok": 8, "topk_group": 4}  # all of them: there is no choice, and scores add up
    for name, family, more in (("llada", "llada", {}), ("llada2", "llada2", {}), ("all experts", "llada2", every)):
        caplog.clear()
        model = tiny(family, **more).double()
        run = dl.denoise(model, prompt, steps=4, gen_length=4, block_length=4)
        found = edge_attribution(model, run, other, **settings)
        whole = float(found.source - found.base)
        errors[name] = abs(float(found.from_input) - whole) / abs(whole)
        assert ("routes tokens to some of its experts" in caplog.text) == (family == "llada2")
    assert errors["llada"] < 1e-3
    assert errors["all experts"] < 1e-3
    assert errors["llada2"] > 0.1


@pytest.mark.long
@pytest.mark.parametrize("network", ["linear", "close runs"])
def test_scores_are_the_exact_effects_of_single_edges(network: str) -> None:
    # In a linear network for any runs; in any network, here with guidance, for runs that are close to each other.
    model = linear() if network == "linear" else tiny("llada").double()
    settings = {} if network == "linear" else {"cfg_scale": 0.5}
    rows = model.get_input_embeddings().weight.data
    if network != "linear":
        noise = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        rows[OTHER[0][0]] = rows[PROMPT[0][0]] + 0.01 * noise
    run = run_of(model, steps=1, gen_length=3, **settings)
    scores = edge_attribution(model, run, OTHER, target=TARGET, integration=0)
    places = scores.graph.exists.nonzero().tolist()[::4]
    exact, found = [], []
    for source, destination in places:
        one = faithfulness(model, run, OTHER, edges_but(scores, source, destination), target=TARGET)
        exact.append(float(one.kept - one.base))
        found.append(float(scores.scores[0, 0, source, destination]))
    error = (torch.tensor(found) - torch.tensor(exact)).norm() / torch.tensor(exact).norm()
    assert float(torch.tensor(exact).abs().max()) > 1e-3
    assert float(error) < (1e-9 if network == "linear" else 0.02)


@pytest.mark.long
def test_integrated_gradients_from_the_input_add_up_to_the_whole_difference() -> None:
    model = tiny("dream").double()
    run = dl.denoise(model, [[5, 6, 9, 10], [11, 12]], steps=2, gen_length=4)
    errors = []
    for parts in (2, 32):
        found = edge_attribution(model, run, [[5, 7, 9, 10], [13, 12]], target=TARGET, steps=[1], integration=parts)
        whole = found.source - found.base
        errors.append(float((found.from_input - whole).abs().max() / whole.abs().max()))
    assert errors[1] < 1e-3 < errors[0]  # the midpoint rule's error falls with the square of the parts


def test_hooks_leave_no_path_to_integrate_along() -> None:
    model = tiny("llada").double()
    run = dl.denoise(model, [[1, 2, 3, 4, 5], [8, 9, 10]], steps=2, gen_length=4)
    hooks = [at_heads(ablate("z"), [1])]
    found, plain = (edge_attribution(model, run, hooks, target=TARGET, integration=m) for m in (5, 0))
    assert found.contract.method == plain.contract.method == "EAP"
    assert torch.equal(found.scores, plain.scores)
    assert float(found.from_input.abs().max()) == 0 < float((found.source - found.base).abs().max())
    assert "EAP-IG" in edge_attribution(model, run, [[1, 2, 30, 4, 5], [8, 9, 10]], steps=[0]).contract.method


def test_networks_without_such_edges_are_refused() -> None:
    model = tiny("llada")
    run = dl.denoise(model, [[5, 6, 9]], steps=2, gen_length=4)
    with pytest.raises(ValueError, match="give a prompt, a run or hooks"):
        edge_attribution(model, run, "zero")
    cached = dl.denoise(model, [[5, 6, 9]], steps=4, gen_length=8, block_length=4, cache="prefix")
    with pytest.raises(ValueError, match="without cache="):
        edge_attribution(model, cached, [[5, 6, 10]])
    scaled = tiny("llada")
    scaled.model.layers[0].register_forward_hook(lambda block, args, output: output * 1.5)
    with pytest.raises(ValueError, match="do not add up to its residual stream"):
        edge_attribution(scaled, run, [[5, 6, 10]])


def test_layers_with_other_numbers_of_key_heads_are_refused() -> None:
    """MiMo's layers with a window have other key heads; it ended in an error of torch."""
    model = dl.add_hook_points(small_model("mimo_v2_flash"))
    find_sites(model)
    with pytest.raises(ValueError, match="layer 0 has 4 heads and 2 of keys, layer 1 4 and 4; edges are between"):
        graph_of(model, "edge_attribution")


def test_gated_attention_is_refused() -> None:
    model = tiny("sink_qwen", gated_attention=True)
    run = dl.denoise(model, [[5, 6, 9]], steps=2, gen_length=4)
    why = "the gate of {} reads the residual stream too, and edges end at queries, keys and values alone"
    with pytest.raises(ValueError, match=why.format("GatedQwen2Attention")):
        edge_attribution(model, run, [[5, 6, 10]])
    graph = graph_of(tiny("sink_qwen"), "edge_attribution")
    circuit = Circuit(graph, graph.exists, graph.exists.double(), int(graph.exists.sum()))
    with pytest.raises(ValueError, match=why.format("GatedQwen2Attention")):
        faithfulness(model, run, [[5, 6, 10]], circuit)
    # A gate in the projection of the queries, and one by another name in layers that norm what they add up.
    others = {
        "qwen3_next": why.format("Qwen3NextAttention"),
        "hrm_text": "HrmTextDecoderLayer does not add the output",
    }
    for name, reason in others.items():
        model = dl.add_hook_points(small_model(name))
        find_sites(model)
        with pytest.raises(ValueError, match=reason):
            graph_of(model, "edge_attribution")


def test_a_table_has_the_largest_scores_summed_over_steps_and_averaged_over_rows() -> None:
    model = tiny("llada")
    run = dl.denoise(model, [[1, 2, 3, 4], [8, 9, 10, 4]], steps=3, gen_length=6)
    found = edge_attribution(model, run, [[1, 20, 3, 4], [8, 19, 10, 4]])
    assert found.scores.shape[:2] == (3, 2)
    by_hand = {}
    for i, source in enumerate(found.graph.sources):
        for j, destination in enumerate(found.graph.destinations):
            if found.graph.exists[i, j]:
                by_hand[source, destination] = sum(found.scores[:, :, i, j].flatten().tolist()) / 2
    table = found.table(None)
    assert len(table) == len(by_hand)
    assert table.score.abs().is_monotonic_decreasing
    keys = list(zip(table.source, table.destination, strict=True))
    assert dict(zip(keys, table.score, strict=True)) == pytest.approx(by_hand, rel=1e-4, abs=1e-9)
    assert found.table(2).equals(table.head(2))
