"""One reward out of the judgements of several sources. Pure.

Invariant: the result lies between the smallest and the greatest reward that counts, and does not depend on the order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Aggregation = Literal["priority", "mean", "weighted_mean"]

SOURCE_KINDS_BY_PRIORITY = ("human", "verifier", "reward_model")
"""Strongest first. A kind that is not listed counts after all of these."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one source thinks of one trajectory: a reward in [-1, 1], and its weight, which is not negative."""

    reward: float
    source_kind: str
    weight: float = 1.0


def aggregate(judgements: Sequence[Judgement], mode: Aggregation) -> float | None:
    """The reward that these judgements amount to, or None if none of them counts.

    `priority`: the mean within the strongest kind present (human over verifier over reward model).
    `mean`: the mean of all. `weighted_mean`: sum(weight * reward) / sum(weight); None when all weights are 0.
    Raises ValueError for another mode.
    """
    counting = [judgements[index] for index in counted(judgements, mode)]
    if not counting:
        return None
    if mode == "weighted_mean":
        return _weighted_mean([(judgement.reward, judgement.weight) for judgement in counting])
    return _weighted_mean([(judgement.reward, 1.0) for judgement in counting])


def counted(judgements: Sequence[Judgement], mode: Aggregation) -> list[int]:
    """Indices of the judgements that `aggregate` looks at, in order. Raises ValueError for another mode."""
    if mode not in get_args(Aggregation):
        raise ValueError(f"aggregation is {mode!r}, not one of {', '.join(get_args(Aggregation))}")
    if mode == "mean":
        return list(range(len(judgements)))
    if mode == "weighted_mean":
        return [index for index, judgement in enumerate(judgements) if judgement.weight > 0]
    best = min((_rank(judgement) for judgement in judgements), default=0)
    return [index for index, judgement in enumerate(judgements) if _rank(judgement) == best]


def _rank(judgement: Judgement) -> int:
    kinds = SOURCE_KINDS_BY_PRIORITY
    return kinds.index(judgement.source_kind) if judgement.source_kind in kinds else len(kinds)


def _weighted_mean(pairs: Sequence[tuple[float, float]]) -> float:
    total = math.fsum(weight for _, weight in pairs)
    mean = math.fsum(reward * (weight / total) for reward, weight in pairs)
    # Rounding may step over the extremes by one unit in the last place.
    return min(max(mean, min(reward for reward, _ in pairs)), max(reward for reward, _ in pairs))
