"""What the simulated users prefer, and when they change their minds.

Invariant: a phase ends by what the server did (updates made, share reached), never by wall-clock time, so the same
schedule means the same thing on a slow and on a fast machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulation.samples import POOL_A, POOL_B


@dataclass(frozen=True, slots=True)
class Phase:
    """A time of constant preference.

    It ends after `max_updates` policy updates, or from `min_updates` on as soon as the preferred style's share on
    held-out prompts has reached `target_share` (None: never early). Raises ValueError for a phase that cannot be.
    """

    preferred: str
    pool: tuple[str, ...]
    max_updates: int
    min_updates: int = 0
    target_share: float | None = None

    def __post_init__(self) -> None:
        if self.preferred not in self.pool:
            raise ValueError(f"preferred style {self.preferred!r} is not in the pool {', '.join(self.pool)}")
        if self.max_updates < 1 or not 0 <= self.min_updates <= self.max_updates:
            raise ValueError(f"need 0 <= min_updates <= max_updates >= 1, not {self.min_updates}, {self.max_updates}")
        if self.target_share is not None and not 0 < self.target_share <= 1:
            raise ValueError(f"target_share is {self.target_share}, not in (0, 1]")

    def is_over(self, num_updates: int, share: float | None) -> bool:
        """True once the phase has lasted `num_updates` updates with `share` (None: not measured yet)."""
        if num_updates >= self.max_updates:
            return True
        reached = self.target_share is not None and share is not None and share >= self.target_share
        return reached and num_updates >= self.min_updates


@dataclass(frozen=True, slots=True)
class Schedule:
    """Phases in order; at least one."""

    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("a schedule needs at least one phase")


def paper_schedule(
    max_updates: Sequence[int] = (25, 30, 30), *, min_updates: int = 0, target_share: float | None = None
) -> Schedule:
    """cute -> chuunibyou -> classical, with the paper's pools (SAO.md section 6); `max_updates` one for each phase.

    Fewer lengths make a schedule of the first phases only.
    """
    steps = (("cute", POOL_A), ("chuunibyou", POOL_A), ("classical", POOL_B))
    if not 1 <= len(max_updates) <= len(steps):
        raise ValueError(f"give 1 to {len(steps)} phase lengths, not {len(max_updates)}")
    return Schedule(
        tuple(
            Phase(preferred, pool, length, min(min_updates, length), target_share)
            for (preferred, pool), length in zip(steps, max_updates, strict=False)
        )
    )
