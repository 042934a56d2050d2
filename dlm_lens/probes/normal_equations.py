"""`NormalEquations`: ridge regression from sums that are added up batch by batch, in float64."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.placement import float64_device, in_float64


class NormalEquations:
    """Sums for a linear regression of targets y on states x; no state is kept.

    With n rows, means m_x and m_y and centred second moments C = sum x x^T / n - m_x m_x^T and c = sum x y^T / n -
    m_x m_y^T, `solve` gives

        w = (C + ridge diag(C))^-1 c,    b = m_y - w m_x,

    ridge regression on standardised features with an unpenalised intercept, so that channels of large variance
    (massive activations) are not favoured.

    Args:
        width: features of a state.
        targets: number of targets.
        device: of the sums, on the CPU if it has no float64.
    """

    def __init__(self, width: int, targets: int, device: torch.device | str = "cpu") -> None:
        self.count, device = 0, float64_device(torch.device(device))
        self.x = torch.zeros(width, dtype=torch.float64, device=device)
        self.xx = torch.zeros(width, width, dtype=torch.float64, device=device)
        self.y = torch.zeros(targets, dtype=torch.float64, device=device)
        self.xy = torch.zeros(width, targets, dtype=torch.float64, device=device)
        self.yy = torch.zeros(targets, dtype=torch.float64, device=device)

    def add(self, x: Float[Tensor, "row d_model"], y: Float[Tensor, "row target"]) -> None:
        """Add rows to the sums."""
        x, y = (in_float64(part.to(self.x.device)) for part in (x, y))
        self.count += len(x)
        self.x += x.sum(0)
        self.xx.addmm_(x.T, x)
        self.y += y.sum(0)
        self.xy.addmm_(x.T, y)
        self.yy += y.square().sum(0)

    def __add__(self, other: "NormalEquations") -> "NormalEquations":
        found = NormalEquations(len(self.x), len(self.y), self.x.device)
        found.count = self.count + other.count
        for name in ("x", "xx", "y", "xy", "yy"):
            setattr(found, name, getattr(self, name) + getattr(other, name).to(self.x.device))
        return found

    def error(
        self, weight: Float[Tensor, "target d_model"], bias: Float[Tensor, "target"]
    ) -> Float[Tensor, "target"]:
        """The squared error sum (w x + b - y)^2 over the rows, from the sums alone."""
        quadratic = (
            ((weight @ self.xx) * weight).sum(-1) + 2 * bias * (weight @ self.x) + self.count * bias.square()
        )
        return quadratic - 2 * ((weight * self.xy.T).sum(-1) + bias * self.y) + self.yy

    @property
    def covariance(self) -> Float[Tensor, "d_model d_model"]:
        """The matrix C."""
        mean = self.x / max(1, self.count)
        return self.xx / max(1, self.count) - torch.outer(mean, mean)

    @property
    def covariance_with(self) -> Float[Tensor, "d_model target"]:
        """The vector c of every target."""
        n = max(1, self.count)
        return self.xy / n - torch.outer(self.x / n, self.y / n)

    def solve(self, ridge: float) -> tuple[Float[Tensor, "target d_model"], Float[Tensor, "target"]]:
        """Weights w and intercepts b; features that are constant up to rounding have weight 0."""
        n = max(1, self.count)
        covariance = self.covariance
        variance = covariance.diagonal()
        # Constant states (the embedding of [MASK]) leave a variance of the size of float64's rounding.
        used = variance > 1e-10 * (self.xx.diagonal() / n)
        weight = torch.zeros_like(self.xy)
        if bool(used.any()):
            scale = variance[used].sqrt()
            correlation = covariance[used][:, used] / torch.outer(scale, scale)
            correlation = correlation + ridge * torch.eye(len(scale), dtype=scale.dtype, device=scale.device)
            solved = torch.linalg.lstsq(correlation.cpu(), (self.covariance_with[used] / scale[:, None]).cpu())
            weight[used] = solved.solution.to(scale.device) / scale[:, None]
        return weight.T, self.y / n - weight.T @ (self.x / n)

    def slope(self) -> Float[Tensor, "target d_model"]:
        """How the mean state moves with a target: cov(x, y) / var(y); 0 where the target is constant."""
        n = max(1, self.count)
        variance = self.yy / n - (self.y / n).square()
        return (self.covariance_with / variance.clamp(min=1e-30)).masked_fill(variance < 1e-15, 0.0).T

    def draws(self, count: int, generator: torch.Generator) -> Float[Tensor, "draw d_model"]:
        """Draws from a normal distribution with the states' covariance and mean 0."""
        values, vectors = torch.linalg.eigh(self.covariance.cpu())
        noise = torch.randn(count, len(values), dtype=torch.float64, generator=generator)
        return noise * values.clamp(min=0).sqrt() @ vectors.T


def best_ridges(
    halves: tuple[NormalEquations, NormalEquations], ridges: Sequence[float], size: int = 1
) -> list[float]:
    """The penalty with the smallest squared error, each half predicted by the other's solution, of each group.

    The largest where all are equal, as for constant states, and where a half has no row (a single training prompt),
    so that nothing is predicted.

    Args:
        halves: the sums of both halves.
        ridges: the penalties.
        size: targets of a group, whose squared errors are added up.
    """
    groups = len(halves[0].y) // size
    if not all(half.count for half in halves):
        return [max(ridges)] * groups
    one, other = halves
    errors = torch.stack([other.error(*one.solve(ridge)) + one.error(*other.solve(ridge)) for ridge in ridges])
    errors = errors.unflatten(-1, (groups, size)).sum(-1)
    least = errors <= errors.amin(0) * (1 + 1e-12)
    return [max(ridge for ridge, one in zip(ridges, column, strict=True) if one) for column in least.T.tolist()]
