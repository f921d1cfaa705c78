"""REINFORCE (Williams, 1992): A = R, no baseline, and no correction for who sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.algorithm import UNBOUNDED, Sao
from learner.collate import Sample
from learner.losses import PolicyLoss, policy_loss


class Reinforce(Sao):
    """- R log pi: the plainest policy gradient there is."""

    uses_critic = False

    def advantages(self, samples: Sequence[Sample], values: Sequence[Tensor]) -> list[Tensor]:
        return [torch.full((sample.num_generated,), sample.total_reward) for sample in samples]

    def policy_loss(
        self, policy_logprobs_G: Tensor, old_logprobs_G: Tensor, advantages_G: Tensor, denominator: int
    ) -> PolicyLoss:
        return policy_loss(policy_logprobs_G, policy_logprobs_G.detach(), advantages_G, denominator, UNBOUNDED)
