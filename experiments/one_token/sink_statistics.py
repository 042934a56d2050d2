"""`sink_numbers`: where attention goes in a recorded run, and how long the values are there."""

from typing import Any

EPS = 3.0
"""Of Eq. 3 of 2510.15731: a sink receives this much more than the mean of the others, relative to uniform."""


def sink_numbers(recording: Any) -> dict[str, Any]:
    """Value norms and shares of sinks, learned and found, over all steps of a Recording.

    Returns:
        moved, share of (prompt, layer, head) whose key with most attention is another at the last step than at the
        first (canvas and learned sinks), and moved_prompts, the same per prompt; found, sinks by Eq. 3 per pattern;
        found_norm and found_other, mean value norm of those sinks and of others in the same state (masked or not);
        with learned sinks also norm, other and share, lists over layers.
    """
    import dlm_lens as dl
    from dlm_lens.probes import value_norms

    found = dl.find_sinks(recording, dl.AboveMean(EPS))
    each = moved(found.scores)
    result: dict[str, Any] = {"moved": sum(each) / len(each), "moved_prompts": [round(value, 4) for value in each]}
    result |= {"found": float(found.is_sink.sum(-1).float().mean())}
    result |= {"found_norm": None, "found_other": None, "found_percentile": None}
    if bool(found.is_sink.any()):
        norms = value_norms(recording, found, match="masked")
        if len(norms.sink):
            result["found_norm"], result["found_other"] = float(norms.sink.mean()), float(norms.other.mean())
            result["found_percentile"] = float(norms.percentile.mean())
    if recording.sinks:
        profile = value_norms(recording, "learned").profile
        for name, column in (("norm", "norm_sink"), ("other", "norm_other"), ("share", "share")):
            result[name] = [round(value, 5) for value in profile[column]]
    return result


def moved(scores: Any) -> list[float]:
    """Per prompt, the share of (layer, head) whose largest key differs between the first and the last step."""
    main = scores.nan_to_num(nan=-1.0).argmax(-1)
    shares: list[float] = (main[0] != main[-1]).double().flatten(1).mean(-1).tolist()
    return shares
