"""What is padded, what is refused, and that neither padding nor grouping changes a log-probability."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.collate import collate, join_rows, split_rows, to_sample
from learner.models import load_policy, target_logprobs
from store.types import TrajectoryInvariantError, VersionSpan
from tests.learner.rollouts import fixed_order, make_samples, make_trajectory


@pytest.fixture(scope="module")
def policy(tiny_model_dir: Path) -> Any:
    return load_policy(tiny_model_dir)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"behaviour_logprobs": np.zeros(0, np.float32)}, "behaviour_logprobs"),
        ({"behaviour_logprobs": np.array([-1.0, math.nan, -1.0], np.float32)}, "not finite"),
        ({"token_ids": np.arange(4, dtype=np.int32)}, "token_ids"),
        ({"version_spans": (VersionSpan(0, 0, 2),)}, "version spans cover 2 of 3"),
        ({"temperature": 0.0}, "temperature"),
        ({"trainable": False, "untrainable_reason": "top_p is 0.9"}, "top_p"),
        (
            {
                "loss_mask": np.zeros(5, np.uint8),
                "behaviour_logprobs": np.zeros(0, np.float32),
                "version_spans": (),
            },
            "no token was generated",
        ),
        ({"loss_mask": np.array([1, 0, 0, 1, 1], np.uint8)}, "first token"),
    ],
)
def test_trajectory_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "token_ids": np.arange(5, 10, dtype=np.int32),
        "loss_mask": np.array([0, 0, 1, 1, 1], np.uint8),
        "behaviour_logprobs": np.array([-1.0, -1.0, -1.0], np.float32),
        "version_spans": (VersionSpan(0, 0, 3),),
    }
    trajectory = make_trajectory(np.random.default_rng(0), **(fields | changes))
    with pytest.raises(TrajectoryInvariantError, match=message):
        to_sample(trajectory, 1.0)


def test_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(TrajectoryInvariantError, match="reward"):
        to_sample(make_trajectory(np.random.default_rng(0)), math.nan)


def test_reward_lands_on_the_last_generated_token_before_a_trailing_observation() -> None:
    mask = np.array([0, 1, 1, 0, 1, 0, 0], np.uint8)
    trajectory = make_trajectory(
        np.random.default_rng(0),
        token_ids=np.arange(10, 17, dtype=np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.full(3, -1.0, np.float32),
        version_spans=(VersionSpan(0, 0, 3),),
    )
    sample = to_sample(trajectory, 0.5)
    assert sample.generated_G.tolist() == [1, 2, 4]
    assert sample.rewards_G.tolist() == [0, 0, 0.5]
    (batch,) = collate([sample], 100)
    assert batch.targets_G.tolist() == [11, 12, 14]
    assert batch.token_ids_BT.flatten()[batch.predictors_G].tolist() == [10, 11, 13]


@given(seed=st.integers(0, 50), count=st.integers(1, 9), max_tokens=st.integers(1, 200))
def test_micro_batches_hold_every_sample_once_within_the_token_budget(seed: int, count: int, max_tokens: int) -> None:
    samples = make_samples(seed, count)
    batches = collate(samples, max_tokens)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(count))
    assert all(batch.token_ids_BT.numel() <= max_tokens or len(batch.rows) == 1 for batch in batches)
    for batch in batches:
        behaviour_G = join_rows([sample.behaviour_logprobs_G for sample in samples], batch)
        for row, values in split_rows(behaviour_G, batch, samples).items():
            assert torch.equal(values, samples[row].behaviour_logprobs_G)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 50), max_tokens=st.sampled_from([1, 40, 1000]), pad_id=st.integers(0, 299))
def test_padding_grouping_and_order_do_not_change_log_probabilities(
    policy: Any, seed: int, max_tokens: int, pad_id: int
) -> None:
    samples = make_samples(seed, 6)
    order = np.random.default_rng(seed).permutation(6).tolist()
    alone = [target_logprobs(policy, collate([sample], 1)[0]) for sample in samples]
    shuffled: dict[int, torch.Tensor] = {}
    for batch in collate([samples[index] for index in order], max_tokens, pad_id):
        shuffled |= split_rows(target_logprobs(policy, batch), batch, [samples[index] for index in order])
    for index, logprobs in zip(order, fixed_order(shuffled), strict=True):
        assert torch.allclose(logprobs, alone[index], atol=1e-4)
