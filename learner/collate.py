"""From judged trajectories to padded micro-batches; logits are computed at generated positions only.

Invariant: a trajectory whose arrays contradict each other is refused (TrajectoryInvariantError), never repaired.
Shape legend: B rows, T padded tokens, G generated tokens of the micro-batch (rows concatenated), N trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.advantages import terminal_rewards
from store.types import Trajectory, TrajectoryInvariantError


@dataclass(frozen=True, slots=True)
class Sample:
    """One judged trajectory as tensors.

    token_ids_T           int64
    generated_G           int64, positions of the generated tokens in token_ids_T, ascending, all > 0
    behaviour_logprobs_G  float32, the sampler's log-probability of each
    rewards_G             float32, reward that arrives with each generated token
    temperature           > 0, the one it was sampled at
    """

    token_ids_T: Tensor
    generated_G: Tensor
    behaviour_logprobs_G: Tensor
    rewards_G: Tensor
    temperature: float

    @property
    def num_generated(self) -> int:
        return len(self.generated_G)

    @property
    def total_reward(self) -> float:
        """Undiscounted sum of the rewards."""
        return float(self.rewards_G.sum())

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens before the first generated one; equal for answers to one prompt."""
        return tuple(self.token_ids_T[: int(self.generated_G[0])].tolist())

    @property
    def turns(self) -> list[slice]:
        """The turns as slices of the generated tokens: a turn ends where an observation follows."""
        ends = [*((self.generated_G.diff() > 1).nonzero()[:, 0] + 1).tolist(), self.num_generated]
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def to_sample(trajectory: Trajectory, reward: float) -> Sample:
    """Raises TrajectoryInvariantError for a trajectory that cannot be trained exactly as it was sampled."""
    trajectory.check()
    generated_G = torch.from_numpy(trajectory.loss_mask.nonzero()[0])
    if len(generated_G) == 0:
        raise TrajectoryInvariantError("no token was generated")
    if int(generated_G[0]) == 0:
        raise TrajectoryInvariantError("the first token is generated, so nothing predicts it")
    if not trajectory.trainable:
        raise TrajectoryInvariantError(trajectory.untrainable_reason or "it is not trainable")
    if not math.isfinite(reward):
        raise TrajectoryInvariantError(f"its reward is {reward}")
    if not trajectory.temperature > 0:
        raise TrajectoryInvariantError(f"temperature {trajectory.temperature} has no log-probabilities")
    return Sample(
        token_ids_T=torch.from_numpy(trajectory.token_ids.astype("int64")),
        generated_G=generated_G,
        behaviour_logprobs_G=torch.from_numpy(trajectory.behaviour_logprobs.astype("float32")),
        rewards_G=terminal_rewards(len(generated_G), reward),
        temperature=trajectory.temperature,
    )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded on the right to one length; a causal model never sees the padding from a real position.

    token_ids_BT    int64
    predictors_G    int64, index into the flattened [B * T] of the position that predicts each generated token
    targets_G       int64, the generated tokens
    temperatures_G  float32
    rows            which sample each row is, in order
    """

    token_ids_BT: Tensor
    predictors_G: Tensor
    targets_G: Tensor
    temperatures_G: Tensor
    rows: tuple[int, ...]

    @property
    def num_generated(self) -> int:
        return len(self.targets_G)


def collate(samples: Sequence[Sample], max_tokens: int, pad_id: int = 0) -> list[MicroBatch]:
    """Sort by length and fill micro-batches up to `max_tokens` padded tokens (a longer row goes alone)."""
    order = sorted(range(len(samples)), key=lambda index: (len(samples[index].token_ids_T), index))
    groups: list[list[int]] = []
    for index in order:
        length = len(samples[index].token_ids_T)
        if groups and length * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [_pad([samples[index] for index in group], group, pad_id) for group in groups]


def _pad(samples: list[Sample], rows: list[int], pad_id: int) -> MicroBatch:
    num_tokens = max(len(sample.token_ids_T) for sample in samples)
    token_ids_BT = torch.full((len(samples), num_tokens), pad_id, dtype=torch.int64)
    for row, sample in enumerate(samples):
        token_ids_BT[row, : len(sample.token_ids_T)] = sample.token_ids_T
    return MicroBatch(
        token_ids_BT=token_ids_BT,
        predictors_G=torch.cat([row * num_tokens + sample.generated_G - 1 for row, sample in enumerate(samples)]),
        targets_G=torch.cat([sample.token_ids_T[sample.generated_G] for sample in samples]),
        temperatures_G=torch.cat(
            [torch.full((sample.num_generated,), sample.temperature, dtype=torch.float32) for sample in samples]
        ),
        rows=tuple(rows),
    )


def split_rows(values_G: Tensor, batch: MicroBatch, samples: Sequence[Sample]) -> dict[int, Tensor]:
    """Cut a concatenated [G] tensor of a micro-batch into one tensor per sample, by sample index."""
    lengths = [samples[index].num_generated for index in batch.rows]
    return dict(zip(batch.rows, torch.split(values_G, lengths), strict=True))


def join_rows(values: Sequence[Tensor], batch: MicroBatch) -> Tensor:
    """The inverse of split_rows: pick this micro-batch's rows from per-sample tensors and concatenate them; [G]."""
    return torch.cat([values[index] for index in batch.rows])
