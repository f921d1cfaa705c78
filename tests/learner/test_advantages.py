"""GAE over generated tokens against the paper's equations written as a loop over the whole trajectory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.advantages import (
    RunningRms,
    adaptive_lambda,
    discounted_sums,
    generalized_advantages,
    terminal_rewards,
    whiten,
)

masks = st.lists(st.integers(0, 1), min_size=2, max_size=40).filter(lambda mask: any(mask[1:]))


def loop_advantages(
    mask: list[int], values: list[float], rewards: list[float], gamma: float, lambda_: float
) -> list[float]:
    """Equations 4 and 5 on the full trajectory: the token after the last of an action is the next action's first."""
    generated = [t for t, flag in enumerate(mask) if flag]
    advantages = dict.fromkeys(generated, 0.0)
    for place in range(len(generated) - 1, -1, -1):
        t = generated[place]
        following = generated[place + 1] if place + 1 < len(generated) else None
        next_value = values[following] if following is not None else 0.0
        next_advantage = advantages[following] if following is not None else 0.0
        advantages[t] = rewards[t] + gamma * next_value - values[t] + gamma * lambda_ * next_advantage
    return [advantages[t] for t in generated]


@given(mask=masks, seed=st.integers(0, 99), gamma=st.sampled_from([1.0, 0.9]), lambda_=st.floats(0, 1))
def test_advantages_equal_the_papers_equations_on_many_turns(
    mask: list[int], seed: int, gamma: float, lambda_: float
) -> None:
    rng = np.random.default_rng(seed)
    values, rewards = rng.normal(size=len(mask)), rng.normal(size=len(mask))
    expected = loop_advantages(mask, values.tolist(), rewards.tolist(), gamma, lambda_)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        flags = torch.tensor(mask, dtype=torch.bool)
        values_G = torch.tensor(values, dtype=dtype)[flags]
        rewards_G = torch.tensor(rewards, dtype=dtype)[flags]
        result = generalized_advantages(values_G, rewards_G, gamma, lambda_)
        assert result.tolist() == pytest.approx(expected, abs=tolerance)


@given(mask=masks, seed=st.integers(0, 99))
def test_values_at_observations_do_not_matter(mask: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    flags = np.array(mask, dtype=bool)
    values = rng.normal(size=len(mask))
    changed = np.where(flags, values, rng.normal(size=len(mask)) * 100)
    rewards = np.zeros(len(mask))
    rewards[np.flatnonzero(flags)[-1]] = 1.0
    before = loop_advantages(mask, values.tolist(), rewards.tolist(), 1.0, 0.8)
    rewards_G = terminal_rewards(int(flags.sum()), 1.0, torch.float64)
    after = generalized_advantages(torch.from_numpy(changed[flags]), rewards_G, 1.0, 0.8)
    assert after.tolist() == pytest.approx(before, abs=1e-9)


def test_step_by_step_gae_over_observations_is_another_result() -> None:
    """The mistake: bootstrapping on an observation's value; the equality above would see it."""
    mask, values = [0, 1, 1, 0, 0, 1], [0.0, 0.3, 0.5, 9.0, 9.0, 0.7]
    correct = loop_advantages(mask, values, [0, 0, 0, 0, 0, 1.0], 1.0, 0.5)
    wrong = loop_advantages([1] * 6, values, [0, 0, 0, 0, 0, 1.0], 1.0, 0.5)
    assert abs(correct[1] - wrong[2]) > 1


@given(num_generated=st.integers(1, 50), reward=st.floats(-1, 1))
def test_reward_lands_on_the_last_generated_token_and_reaches_the_first(num_generated: int, reward: float) -> None:
    rewards_G = terminal_rewards(num_generated, reward, torch.float64)
    assert rewards_G[:-1].abs().sum() == 0
    assert float(rewards_G[-1]) == reward
    assert discounted_sums(rewards_G, 1.0).tolist() == [reward] * num_generated
    zeros = torch.zeros(num_generated, dtype=torch.float64)
    assert float(generalized_advantages(zeros, rewards_G, 1.0, 1.0)[0]) == pytest.approx(reward)


def test_adaptive_lambda_follows_the_length() -> None:
    assert adaptive_lambda(10, 1.5) == pytest.approx(1 - 1 / 15)
    assert adaptive_lambda(1, 0.5) == 0.0
    assert adaptive_lambda(1000, 1.5) > adaptive_lambda(10, 1.5)


def test_running_rms_is_slow_and_has_a_floor() -> None:
    rms = RunningRms(decay=0.9, floor=0.1).updated(torch.full((8,), 2.0))
    assert rms.divisor == pytest.approx(2.0)
    expected = 4.0
    for scale in (1.0, 0.0, 0.0):
        rms = rms.updated(torch.full((5,), scale))
        expected = 0.9 * expected + 0.1 * scale**2
        assert rms.divisor == pytest.approx(math.sqrt(expected))
    for _ in range(200):
        rms = rms.updated(torch.zeros(5))
    assert rms.divisor == 0.1


def test_whitening_centres_and_scales_and_equal_advantages_stay_finite() -> None:
    whitened = whiten(torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64))
    assert float(whitened.mean()) == pytest.approx(0, abs=1e-12)
    assert float(whitened.std(correction=0)) == pytest.approx(1, abs=1e-6)
    assert whiten(torch.full((3,), 0.7)).abs().max() < 1e-3
