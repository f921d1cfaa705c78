"""Detecting that what people want has changed: a sudden drop of the mean reward of a batch (SAO.md section 6)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from store.settings import PlasticitySettings

MIN_BATCHES = 2
"""Batches that the trailing mean needs before a drop against it means anything."""


class DropDetector:
    """Says when the mean reward of a batch falls below a share of its trailing mean.

    Invariant: the trailing mean holds only batches since the last change, so one change is found once.
    """

    def __init__(self, settings: PlasticitySettings, trailing: Iterable[float] = ()) -> None:
        self._settings = settings
        self._trailing: deque[float] = deque(trailing, maxlen=settings.trailing_batches)

    def observe(self, mean_reward: float) -> bool:
        """Take in one batch; True if it is a drop, after which the trailing mean starts anew."""
        enough = len(self._trailing) >= min(MIN_BATCHES, self._settings.trailing_batches)
        trailing_mean = sum(self._trailing) / len(self._trailing) if self._trailing else 0.0
        worth_losing = enough and trailing_mean >= self._settings.min_trailing_reward
        if worth_losing and mean_reward < self._settings.drop_threshold * trailing_mean:
            self._trailing.clear()
            return True
        self._trailing.append(mean_reward)
        return False

    def trailing(self) -> list[float]:
        """Mean rewards of the last batches, for a checkpoint."""
        return list(self._trailing)
