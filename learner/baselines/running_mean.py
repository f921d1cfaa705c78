"""The baseline of the paper's simulation (section 4.5): A = R - mean of the last 128 rewards; no critic."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from learner.algorithm import Sao
from learner.collate import Sample
from store.settings import LearnerSettings

WINDOW = 128


class RunningMean(Sao):
    """One number for every state: the mean of the last `WINDOW` rewards before this batch, with DIS."""

    uses_critic = False

    def __init__(self, settings: LearnerSettings) -> None:
        super().__init__(settings)
        self._rewards: deque[float] = deque(maxlen=WINDOW)

    def advantages(self, samples: Sequence[Sample], values: Sequence[Tensor]) -> list[Tensor]:
        rewards = [sample.total_reward for sample in samples]
        known = self._rewards or rewards  # the first batch has nothing before it but itself
        baseline = sum(known) / len(known)
        self._rewards.extend(rewards)
        return [
            torch.full((sample.num_generated,), reward - baseline)
            for sample, reward in zip(samples, rewards, strict=True)
        ]

    def memory(self) -> list[list[float]]:
        return [list(self._rewards)]

    def remember(self, memory: list[list[float]]) -> None:
        self._rewards = deque(memory[0], maxlen=WINDOW)
