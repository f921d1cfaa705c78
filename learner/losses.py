"""The losses of SAO as pure functions over the generated tokens of a batch.

Shape legend: G generated tokens of the (micro-)batch, all trajectories concatenated; V vocabulary.
Every loss is a sum divided by `denominator`, the number of generated tokens of the *global* batch, rejected ones
included, so that micro-batches add up to the whole and a smaller micro-batch does not weigh more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TrustRegion:
    """Ratios r with 1 - eps_low < r < 1 + eps_high are kept (SAO.md section 2); eps are offsets, not bounds."""

    eps_low: float
    eps_high: float

    @property
    def log_low(self) -> float:
        return math.log1p(-self.eps_low) if self.eps_low < 1 else -math.inf

    @property
    def log_high(self) -> float:
        return math.log1p(self.eps_high)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`loss` is a scalar with gradient; the masks are bool [G] and say which tokens the trust region rejected."""

    loss: Tensor
    too_low_G: Tensor
    too_high_G: Tensor

    @property
    def accepted_G(self) -> Tensor:
        return ~(self.too_low_G | self.too_high_G)


def policy_loss(
    policy_logprobs_G: Tensor,
    behaviour_logprobs_G: Tensor,
    advantages_G: Tensor,
    denominator: int,
    region: TrustRegion,
) -> PolicyLoss:
    """Direct double-sided importance sampling (arXiv 2607.07508, section 3.1).

        log_ratio = log pi_theta - behaviour_logprob;  f(r) = r inside the region, else 0
        loss = - sum stopgrad(f(r)) * A * log pi_theta / denominator

    The region does not depend on the sign of the advantage. `f` is detached: its derivative would add a spurious
    term. The comparison is made in log space and only accepted ratios are exponentiated, so no `inf` is ever formed.
    """
    log_ratios_G = policy_logprobs_G.detach() - behaviour_logprobs_G
    too_low_G = log_ratios_G <= region.log_low
    # Written so that a NaN ratio is rejected rather than kept.
    too_high_G = ~(too_low_G | (log_ratios_G < region.log_high))
    accepted_G = ~(too_low_G | too_high_G)
    weights_G = torch.where(accepted_G, torch.exp(torch.where(accepted_G, log_ratios_G, 0.0)), 0.0)
    terms_G = torch.where(accepted_G, weights_G * advantages_G * policy_logprobs_G, 0.0)
    return PolicyLoss(-terms_G.sum() / denominator, too_low_G, too_high_G)


def value_loss(values_G: Tensor, returns_G: Tensor, denominator: int) -> Tensor:
    """0.5 * sum (V - R)^2 / denominator, without clipping (section 3.2); a scalar."""
    return 0.5 * (values_G - returns_G).square().sum() / denominator


def kl_to_reference(policy_log_softmax_GV: Tensor, reference_log_softmax_GV: Tensor) -> Tensor:
    """Exact KL(policy || reference) over the vocabulary at each generated token, in nats; [G], with gradient."""
    return (policy_log_softmax_GV.exp() * (policy_log_softmax_GV - reference_log_softmax_GV)).sum(-1)


def entropy(policy_log_softmax_GV: Tensor) -> Tensor:
    """Entropy of the policy at each generated token, in nats; [G]."""
    return -(policy_log_softmax_GV.exp() * policy_log_softmax_GV).sum(-1)
