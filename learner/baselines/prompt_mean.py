"""The running-mean ablation of the paper: A = R - mean of the last 8 rewards of the same prompt; no critic."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from learner.algorithm import Sao
from learner.collate import Sample
from store.settings import LearnerSettings

WINDOW = 8
MAX_PROMPTS = 4096
"""Prompts remembered; the one not seen for longest goes first."""


class PromptMean(Sao):
    """A memory of rewards for each prompt, with DIS. A prompt seen for the first time has no baseline: A = 0."""

    uses_critic = False

    def __init__(self, settings: LearnerSettings) -> None:
        super().__init__(settings)
        self._rewards: dict[tuple[int, ...], deque[float]] = {}

    def advantages(self, samples: Sequence[Sample], values: Sequence[Tensor]) -> list[Tensor]:
        advantages = []
        for sample in samples:
            known = self._rewards.pop(sample.prompt_ids, deque(maxlen=WINDOW))
            reward = sample.total_reward
            advantage = reward - sum(known) / len(known) if known else 0.0
            known.append(reward)
            self._rewards[sample.prompt_ids] = known
            advantages.append(torch.full((sample.num_generated,), advantage))
        while len(self._rewards) > MAX_PROMPTS:
            self._rewards.pop(next(iter(self._rewards)))
        return advantages

    def memory(self) -> list[list[float]]:
        """Two rows for each prompt: its token ids, then its rewards."""
        return [row for prompt, rewards in self._rewards.items() for row in ([*map(float, prompt)], [*rewards])]

    def remember(self, memory: list[list[float]]) -> None:
        self._rewards = {
            tuple(int(token_id) for token_id in prompt): deque(rewards, maxlen=WINDOW)
            for prompt, rewards in zip(memory[::2], memory[1::2], strict=True)
        }
