"""What makes an update SAO rather than something else: the advantage of each generated token, and the policy loss.

Everything else of an update (batching, critic, scaling, anchor, optimizer) is shared. The baselines in
`learner/baselines/` derive from `Sao` and replace one or both; `learner.algorithm` chooses.
Shape legend: G generated tokens of one trajectory, or of all trajectories of a micro-batch concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from learner.advantages import adaptive_lambda, generalized_advantages, turn_advantages
from learner.collate import Sample
from learner.losses import PolicyLoss, TrustRegion, policy_loss
from store.settings import LearnerSettings

UNBOUNDED = TrustRegion(1.0, float("inf"))
"""Keeps every importance ratio."""


class Sao:
    """Skip-observation GAE on the critic's values, and direct double-sided importance sampling (arXiv 2607.07508)."""

    uses_critic = True
    needs_groups = False
    """True for what compares several answers to one prompt; live traffic has none to compare."""
    recomputes_old_logprobs = False
    """True for what measures ratios against the policy before this update instead of the sampler."""
    num_policy_steps = 1

    def __init__(self, settings: LearnerSettings) -> None:
        self.settings = settings

    def gae_lambda(self, num_generated: int) -> float:
        """lambda of the policy's GAE over a trajectory of that many generated tokens."""
        return adaptive_lambda(num_generated, self.settings.gae_alpha)

    def valued(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples as the critic is asked about them: their `generated_G` says at which tokens V is needed."""
        if self.settings.ablation.skip_observations:
            return list(samples)
        return [through_observations(sample) for sample in samples]

    def advantages(self, samples: Sequence[Sample], values: Sequence[Tensor]) -> list[Tensor]:
        """The advantage of each generated token; one fp32 [G] per sample.

        `values` are the critic's at the tokens of `valued(samples)`; algorithms without a critic are given none.
        """
        return [
            self._advantages_of(sample, valued, values_G)
            for sample, valued, values_G in zip(samples, self.valued(samples), values, strict=True)
        ]

    def policy_loss(
        self, policy_logprobs_G: Tensor, old_logprobs_G: Tensor, advantages_G: Tensor, denominator: int
    ) -> PolicyLoss:
        """The loss of one micro-batch; `old_logprobs_G` are the sampler's unless `recomputes_old_logprobs`."""
        settings = self.settings
        if settings.ablation.trust_region == "none":
            return policy_loss(policy_logprobs_G, policy_logprobs_G.detach(), advantages_G, denominator, UNBOUNDED)
        bounded = settings.ablation.trust_region == "double_sided"
        region = TrustRegion(settings.eps_low, settings.eps_high) if bounded else UNBOUNDED
        return policy_loss(policy_logprobs_G, old_logprobs_G, advantages_G, denominator, region)

    def memory(self) -> list[list[float]]:
        """What the algorithm itself remembers between updates, for a checkpoint."""
        return []

    def remember(self, memory: list[list[float]]) -> None:
        """Take up the memory of a checkpoint."""

    def _advantages_of(self, sample: Sample, valued: Sample, values_G: Tensor) -> Tensor:
        settings = self.settings
        lambda_ = self.gae_lambda(sample.num_generated)
        level = settings.ablation.advantage_level
        if level != "token":
            return turn_advantages(values_G, sample.rewards_G, sample.turns, settings.gamma, lambda_, level)
        advantages_G = generalized_advantages(values_G, valued.rewards_G, settings.gamma, lambda_)
        # The generated tokens among those that were valued; all of them unless GAE runs through the observations.
        return advantages_G[torch.isin(valued.generated_G, sample.generated_G)]


def through_observations(sample: Sample) -> Sample:
    """Every token from the first generated to the last as if it had been generated (an ablation, SAO.md section 3)."""
    generated_G = torch.arange(int(sample.generated_G[0]), int(sample.generated_G[-1]) + 1)
    rewards_G = torch.zeros(len(generated_G))
    rewards_G[sample.generated_G - generated_G[0]] = sample.rewards_G
    return replace(
        sample, generated_G=generated_G, behaviour_logprobs_G=torch.zeros(len(generated_G)), rewards_G=rewards_G
    )
