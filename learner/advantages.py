"""Skip-observation token-level GAE over one trajectory, and the scaling of advantages (SAO.md section 3).

Everything here is indexed by *generated* token: observations (tool results, later user turns) have been taken out, so
the token after the last one of a turn is the first of the next turn, whose value has read the observation.
Shape legend: G generated tokens of one trajectory, N its turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


def adaptive_lambda(num_generated: int, alpha: float) -> float:
    """lambda = 1 - 1 / (alpha * l), not below 0: longer trajectories carry the reward further (section 3.2)."""
    return max(0.0, 1.0 - 1.0 / (alpha * num_generated))


def generalized_advantages(values_G: Tensor, rewards_G: Tensor, gamma: float, lambda_: float) -> Tensor:
    """GAE over the generated tokens of one trajectory; [G].

        delta_t = r_t + gamma * V_{t+1} - V_t;   A_t = delta_t + gamma * lambda * A_{t+1};   V_G = A_G = 0

    V_t is the value of the state before generated token t. For the last token of a turn, V_{t+1} is the value before
    the first token of the next turn (paper, equations 4 and 5). The end bootstraps 0, truncated or not.
    """
    next_values_G = torch.cat([values_G[1:], values_G.new_zeros(1)])
    deltas_G = rewards_G + gamma * next_values_G - values_G
    return discounted_sums(deltas_G, gamma * lambda_)


def turn_advantages(
    values_G: Tensor,
    rewards_G: Tensor,
    turns: Sequence[slice],
    gamma: float,
    lambda_: float,
    level: Literal["turn_last", "turn_mean"],
) -> Tensor:
    """GAE over turns instead of tokens, an ablation of the paper: every token of a turn has the same advantage; [G].

    The value of a turn is the one before its last token, or the mean over its tokens.
    """
    values_N = torch.stack([values_G[turn][-1] if level == "turn_last" else values_G[turn].mean() for turn in turns])
    rewards_N = torch.stack([rewards_G[turn].sum() for turn in turns])
    advantages_N = generalized_advantages(values_N, rewards_N, gamma, lambda_)
    lengths = torch.tensor([len(values_G[turn]) for turn in turns])
    return advantages_N.repeat_interleave(lengths)


def discounted_sums(terms_G: Tensor, discount: float) -> Tensor:
    """S_t = x_t + discount * S_{t+1}, from the end; [G]. With discount gamma and rewards this is the return-to-go."""
    sums_G = torch.empty_like(terms_G)
    running = terms_G.new_zeros(())
    for t in range(len(terms_G) - 1, -1, -1):
        running = terms_G[t] + discount * running
        sums_G[t] = running
    return sums_G


def terminal_rewards(num_generated: int, reward: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """The reward of the whole trajectory on its last generated token, 0 elsewhere; [G]."""
    rewards_G = torch.zeros(num_generated, dtype=dtype)
    rewards_G[-1] = reward
    return rewards_G


@dataclass(frozen=True, slots=True)
class RunningRms:
    """A slow running root mean square of the advantages, with a floor; no centring.

    Dividing by it keeps the step size even without turning noise into full-size steps when all rewards are equal,
    which per-batch whitening does (SAO.md section 6). `mean_square` is None before the first batch.
    """

    decay: float
    floor: float
    mean_square: float | None = None

    def updated(self, advantages_G: Tensor) -> RunningRms:
        """The state after one more batch of advantages."""
        batch = float(advantages_G.double().square().mean())
        mean_square = batch if self.mean_square is None else self.decay * self.mean_square + (1 - self.decay) * batch
        return RunningRms(self.decay, self.floor, mean_square)

    @property
    def divisor(self) -> float:
        return max(self.floor, math.sqrt(self.mean_square or 0.0))


def whiten(advantages_G: Tensor) -> Tensor:
    """(A - mean) / (std + 1e-8) over all generated tokens of a batch; an ablation, not the default."""
    return (advantages_G - advantages_G.mean()) / (advantages_G.std(correction=0) + 1e-8)
