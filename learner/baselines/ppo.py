"""PPO (Schulman et al., arXiv 1707.06347): a clip that depends on the sign of the advantage, and an old policy.

The old policy is the learner's own before this update, as trainers that recompute log-probabilities have it. What the
sampler reported is not looked at, so nothing corrects for staleness: that is the difference to measure.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithm import Sao
from learner.losses import PolicyLoss

GAE_LAMBDA = 0.95


def ppo_clip_loss(
    policy_logprobs_G: Tensor,
    old_logprobs_G: Tensor,
    advantages_G: Tensor,
    denominator: int,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """- sum min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) / denominator, with gradient through r.

    A token is reported as too low or too high where the clip takes its gradient away.
    """
    ratios_G = torch.exp(policy_logprobs_G - old_logprobs_G)
    clipped_G = ratios_G.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratios_G * advantages_G, clipped_G * advantages_G).sum() / denominator
    too_low_G = (ratios_G < 1 - clip_low) & (advantages_G < 0)
    too_high_G = (ratios_G > 1 + clip_high) & (advantages_G > 0)
    return PolicyLoss(loss, too_low_G.detach(), too_high_G.detach())


class Ppo(Sao):
    """GAE with lambda 0.95 on the critic's values; two passes over each batch, without which the clip never acts."""

    recomputes_old_logprobs = True
    num_policy_steps = 2
    clip_low = 0.2
    clip_high = 0.2

    def gae_lambda(self, num_generated: int) -> float:
        return GAE_LAMBDA

    def policy_loss(
        self, policy_logprobs_G: Tensor, old_logprobs_G: Tensor, advantages_G: Tensor, denominator: int
    ) -> PolicyLoss:
        return ppo_clip_loss(
            policy_logprobs_G, old_logprobs_G, advantages_G, denominator, self.clip_low, self.clip_high
        )
