"""GRPO (Shao et al., arXiv 2402.03300): A = (R - group mean) / group standard deviation over answers to one prompt.

A group is what one batch holds of one prompt. Live traffic asks each question once, so only a simulator can use this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from learner.algorithm import Sao
from learner.baselines.ppo import Ppo
from learner.collate import Sample
from store.types import TidelineError

MIN_STD = 1e-6
"""A group whose rewards are all the same teaches nothing: its advantages are 0, not noise."""


class GroupTooSmallError(TidelineError, ValueError):
    """A prompt has a single answer in the batch, and GRPO compares answers to one prompt."""


def group_advantages(samples: Sequence[Sample]) -> list[Tensor]:
    """(R - mean) / std within the answers to one prompt, the same for every token; one [G] per sample.

    Raises GroupTooSmallError.
    """
    groups: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.prompt_ids].append(sample.total_reward)
    advantages = []
    for sample in samples:
        rewards = torch.tensor(groups[sample.prompt_ids], dtype=torch.float64)
        if len(rewards) < 2:
            raise GroupTooSmallError("a prompt has one answer in this batch; GRPO needs at least two to compare")
        std = float(rewards.std(correction=0))
        advantage = (sample.total_reward - float(rewards.mean())) / std if std > MIN_STD else 0.0
        advantages.append(torch.full((sample.num_generated,), advantage))
    return advantages


class Grpo(Ppo):
    """Group advantages, PPO's clip against the policy before the update."""

    uses_critic = False
    needs_groups = True

    def advantages(self, samples: Sequence[Sample], values: Sequence[Tensor]) -> list[Tensor]:
        return group_advantages(samples)


class GrpoDis(Sao):
    """Group advantages with DIS: the paper's GRPO + DIS."""

    uses_critic = False
    needs_groups = True

    def advantages(self, samples: Sequence[Sample], values: Sequence[Tensor]) -> list[Tensor]:
        return group_advantages(samples)
