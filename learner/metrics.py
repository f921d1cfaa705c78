"""Numbers that explain an update: explained variance over a window of trajectories, effective sample size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

MIN_RETURN_VARIANCE = 1e-6
"""Below this variance of the returns the explained variance says nothing and is reported as undefined."""


def effective_sample_size_fraction(log_ratios_G: Tensor) -> float:
    """(sum r)^2 / (n sum r^2) with r = exp(log_ratio), in (0, 1]; 1 when every ratio is the same."""
    scaled_G = torch.exp(log_ratios_G.double() - log_ratios_G.double().max())
    return float(scaled_G.sum().square() / (len(scaled_G) * scaled_G.square().sum()))


class ExplainedVariance:
    """EV = 1 - Var(R - V) / Var(R), pooled over the tokens of the last `window` trajectories (SAO.md section 4).

    A single batch with equal rewards makes EV meaningless, hence the window, kept as five sums per trajectory:
    count, sum R, sum R^2, sum (R - V), sum (R - V)^2.
    """

    def __init__(self, window: int, rows: Iterable[tuple[float, ...]] = ()) -> None:
        self._rows: deque[tuple[float, ...]] = deque(rows, maxlen=window)

    def add(self, returns_G: Tensor, values_G: Tensor) -> None:
        """Add one trajectory's returns and the values predicted before they were trained on."""
        returns, errors = returns_G.double(), returns_G.double() - values_G.double()
        sums = (returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum())
        self._rows.append((float(len(returns)), *(float(value) for value in sums)))

    def value(self) -> float | None:
        """The explained variance, or None while the returns hardly vary."""
        if not self._rows:
            return None
        sums: list[float] = [float(sum(column)) for column in zip(*self._rows, strict=True)]
        count, returns, returns_squared, errors, errors_squared = sums
        return_variance = returns_squared / count - (returns / count) ** 2
        if return_variance < MIN_RETURN_VARIANCE:
            return None
        return 1.0 - (errors_squared / count - (errors / count) ** 2) / return_variance

    def rows(self) -> list[list[float]]:
        """The window's sums, for a checkpoint."""
        return [list(row) for row in self._rows]
