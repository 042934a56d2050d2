"""Which scene is made with which family in which place: all of what differs, and the rest in turn."""

from functools import cache
from itertools import chain

from tests.pretend_gpu.comparison import FAMILIES, NO_FLOAT64, Refused, on_the_cpu, scenes_of
from tests.pretend_gpu.placing import EVERYWHERE, PLACEMENTS, Placement
from tests.pretend_gpu.probe_scenes import PROBES
from tests.pretend_gpu.scenes import MASKED_ONLY, REDUCERS, SCENES

ORDER = (*SCENES, *(f"record: {name}" for name in REDUCERS), *MASKED_ONLY, *PROBES)

OF_A_FAMILY = (
    "denoise", "denoise at a temperature", "record a forward pass", "nnsight", "TransformerLens", "likelihood",
    "greedy completion", "Monte Carlo likelihood", "guidance", "reference quirks", "reference quirks of a cache",
)  # fmt: skip
"""Calls whose code is the family's own: its network, its sampler, its likelihood, its names of modules. They are
made with every family that has them."""

NOISE = ("duo", "gidd", "gidd_dit", "mdlm", "sedd", "sumi", "udlm", "uniform_qwen")
BLOCKS = (
    "bd3lm", "efficient_dlm", "fast_dllm_v2", "i_dlm", "llada2", "nemotron_labs_diffusion", "sdar", "sdlm",
    "stable_diffcoder", "wedlm",
)  # fmt: skip
APART = (("causal",), ("sink_llama", "sink_qwen"), ("diffusion_gemma", "modernbert"), NOISE, BLOCKS)
KINDS = (*APART, tuple(family for family in FAMILIES if family not in chain(*APART)))
"""AR; learned sinks beside the canvas; encoders; uniform noise, and networks that take its level; blocks with a
cache; and the others, whose samplers fill masks."""
PROBED = (("llada", "dream"), ("sink_llama", "causal", "diffusion_gemma"))
"""The families of probes: masks with and without a shift of the logits; sinks, prefixes, and an encoder."""
PLACED: list[tuple[str, Placement]] = [
    (family, where)
    for place, family in enumerate(FAMILIES)
    for where in PLACEMENTS
    # Weights are offloaded to the CPU and to the disk by the same code: one of both for each family.
    if family in EVERYWHERE or where != ("cpu", "disk")[place % 2]
]
if NO_FLOAT64:
    # Samplers in float32 and in float64, and an encoder; an AR model, and layers on two devices.
    KINDS = PROBED = (("llada", "duo", "diffusion_gemma"), ("causal", "sink_llama"))
    PLACED = [(family, "split" if family == "sink_llama" else "one") for family in chain(*KINDS)]


def is_made(name: str, family: str, where: Placement) -> bool:
    """Whether a call is made with this family in this place.

    What is a family's own is made with every family on one device, and `denoise` in every place. The rest is the
    same code for all families, and gets queries, keys and values of any: each call is made with one family of each
    kind. Placement is a matter of weights, not of families: with one of EVERYWHERE each call is made over two
    devices, and with weights offloaded either to the CPU or to the disk.
    """
    if name == "denoise" or (name in OF_A_FAMILY and (where == "one" or NO_FLOAT64)):
        return True
    if where == "one" or NO_FLOAT64:
        kinds = PROBED if name in PROBES else KINDS
    else:
        kinds = (EVERYWHERE,)
        if where != "split" and where != ("cpu", "disk")[ORDER.index(name) // 2 % 2]:
            return False
    return any(family == whose_turn(name, kind) for kind in kinds if family in kind)


@cache
def whose_turn(name: str, families: tuple[str, ...]) -> str | None:
    """The family with which a call is made, of those that have it and do not refuse it; None if there is none."""
    able = [family for family in families if name in scenes_of(family)]
    first = ORDER.index(name) % max(1, len(able))
    turns = (*able[first:], *able[:first])
    return next((family for family in turns if not isinstance(on_the_cpu(family, name), Refused)), None)
