"""Random trajectories of many turns, and their behaviour log-probabilities from a real model."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from learner.collate import Sample, collate, split_rows, to_sample
from learner.models import target_logprobs
from store import feedback, trajectories
from store.database import Database
from store.ids import new_id
from store.types import FeedbackSubmission, Trajectory, VersionSpan

VOCABULARY = 300


def make_trajectory(rng: np.random.Generator, *, version: int = 0, num_turns: int = 1, **changes: Any) -> Trajectory:
    """A prompt, then turns of generated tokens with observations between them."""
    mask = [0] * int(rng.integers(1, 6))
    for turn in range(num_turns):
        mask += [0] * (int(rng.integers(1, 4)) if turn else 0) + [1] * int(rng.integers(1, 6))
    loss_mask = np.array(mask, dtype=np.uint8)
    num_generated = int(loss_mask.sum())
    fields: dict[str, Any] = {
        "id": new_id(),
        "created_at": datetime.now(UTC),
        "token_ids": rng.integers(3, VOCABULARY, len(mask)).astype(np.int32),
        "loss_mask": loss_mask,
        "behaviour_logprobs": -rng.random(num_generated).astype(np.float32) * 3,
        "version_spans": (VersionSpan(version, 0, num_generated),),
        "temperature": float(rng.choice([0.7, 1.0])),
        "finish_reason": "stop",
        "messages": [],
        "text": "",
        "admitted_version": version,
        "trainable": True,
    }
    return Trajectory(**(fields | changes))


def make_samples(seed: int, count: int, policy: Any = None, rewards: list[float] | None = None) -> list[Sample]:
    """Judged samples; with `policy`, their behaviour log-probabilities are that policy's own."""
    rng = np.random.default_rng(seed)
    samples = [
        to_sample(
            make_trajectory(rng, num_turns=int(rng.integers(1, 4))),
            float(rng.normal()) if rewards is None else rewards[index],
        )
        for index in range(count)
    ]
    return samples if policy is None else [resampled(sample, policy) for sample in samples]


def resampled(sample: Sample, policy: Any) -> Sample:
    """The same tokens with the policy's own log-probabilities."""
    (batch,) = collate([sample], 10_000)
    logprobs = split_rows(target_logprobs(policy, batch), batch, [sample])[0]
    return Sample(sample.token_ids_T, sample.generated_G, logprobs, sample.rewards_G, sample.temperature)


def store_judged(database: Database, policy: Any, seed: int, count: int, version: int = 0) -> list[str]:
    """Store trajectories that `policy` could have sampled as `version`, each with a reward; returns their ids."""
    rng = np.random.default_rng(seed)
    ids = []
    for _ in range(count):
        trajectory = with_behaviour(make_trajectory(rng, version=version), policy)
        judgement = FeedbackSubmission(
            trajectory_id=trajectory.id, episode_id=None, kind="reward", reward=float(rng.random()), content={}
        )
        database.write(lambda session, stored=trajectory: trajectories.insert(session, stored))
        database.write(lambda session, given=judgement: feedback.submit(session, given, "priority"))
        ids.append(trajectory.id)
    return ids


def with_behaviour(trajectory: Trajectory, policy: Any) -> Trajectory:
    """The trajectory with the policy's own log-probabilities as the sampler's."""
    sample = resampled(to_sample(trajectory, 0.0), policy)
    values = {name: getattr(trajectory, name) for name in Trajectory.__slots__}
    return Trajectory(**(values | {"behaviour_logprobs": np.minimum(sample.behaviour_logprobs_G.numpy(), 0.0)}))


def fixed_order(values: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """Per-sample tensors in sample order."""
    return [values[index] for index in range(len(values))]
