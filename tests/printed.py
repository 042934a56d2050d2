"""What code printed, against what is stored of it: words are equal, numbers close."""

import re

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")

DIGEST = re.compile(r"\b[0-9a-f]{12,64}\b")
"""Digests of weights and results follow their last bits."""

CLOSE = (0.05, 0.03)
"""Relative and absolute tolerance of a number: another CPU rounds differently."""


def differences(fresh: str, stored: str, tolerance: tuple[float, float] = CLOSE) -> list[str]:
    """Where two texts differ: words must be equal, numbers up to a relative and an absolute tolerance.

    Digests are not compared.
    """
    relative, absolute = tolerance
    fresh, stored = (DIGEST.sub("digest", text) for text in (fresh, stored))
    words = [NUMBER.sub("#", text).split() for text in (fresh, stored)]
    if words[0] != words[1]:
        return [f"{fresh!r} is stored as {stored!r}"]
    pairs = zip(NUMBER.findall(fresh), NUMBER.findall(stored), strict=True)
    return [
        f"{a} is stored as {b}"
        for a, b in pairs
        if abs(float(a) - float(b)) > max(absolute, relative * abs(float(a)))
    ]
