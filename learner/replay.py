"""The same-version replay check: does the learner score the engine's samples as the engine did? (SAO.md section 5)

Right after a swap, trajectories sampled by version v are scored again with the learner's version v. The two
log-probabilities then differ by rounding alone; a stale engine, an ignored temperature, a wrong mask and a shift by
one all show up as a shifted mean or a small effective sample size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_MEAN_LOG_RATIO = 0.02
"""Nats; a replay in bf16 stays below this in absolute value."""
MIN_EFFECTIVE_SAMPLE_SIZE_FRACTION = 0.98
"""A replay in bf16 stays above this."""


@dataclass(frozen=True, slots=True)
class ReplayStatistics:
    """Of log_ratio_t = policy_logprob_t - behaviour_logprob_t over generated tokens, in nats.

    `effective_sample_size_fraction` is (sum r)^2 / (n sum r^2) with r = exp(log_ratio), in (0, 1].
    """

    num_tokens: int
    mean_log_ratio: float
    mean_absolute_log_ratio: float
    effective_sample_size_fraction: float

    @property
    def passes(self) -> bool:
        """True when engine and learner agree as bf16 allows."""
        return (
            abs(self.mean_log_ratio) < MAX_MEAN_LOG_RATIO
            and self.effective_sample_size_fraction > MIN_EFFECTIVE_SAMPLE_SIZE_FRACTION
        )


def replay_statistics(
    policy_logprobs: npt.NDArray[np.floating], behaviour_logprobs: npt.NDArray[np.floating]
) -> ReplayStatistics:
    """Compare the learner's and the sampler's log-probabilities of the same generated tokens.

    Both [G], any floating type, at the temperature the tokens were sampled with; of many trajectories, concatenated.
    Raises ValueError when the two differ in length, are empty, or hold a value that is not finite.
    """
    if policy_logprobs.shape != behaviour_logprobs.shape or policy_logprobs.ndim != 1 or policy_logprobs.size == 0:
        raise ValueError(
            f"policy_logprobs {policy_logprobs.shape} and behaviour_logprobs {behaviour_logprobs.shape} do not match"
        )
    log_ratios_G = policy_logprobs.astype(np.float64) - behaviour_logprobs.astype(np.float64)
    if not np.isfinite(log_ratios_G).all():
        raise ValueError("a log-probability is not finite")
    # The fraction does not change when every ratio is scaled, and scaled to at most 1 none overflows.
    ratios_G = np.exp(log_ratios_G - log_ratios_G.max())
    return ReplayStatistics(
        num_tokens=int(log_ratios_G.size),
        mean_log_ratio=float(log_ratios_G.mean()),
        mean_absolute_log_ratio=float(np.abs(log_ratios_G).mean()),
        effective_sample_size_fraction=float(ratios_G.sum() ** 2 / (ratios_G.size * np.square(ratios_G).sum())),
    )
