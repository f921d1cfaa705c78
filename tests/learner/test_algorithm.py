"""SAO's own advantage and loss, and its ablations, against plain loops over trajectories of several turns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.advantages import turn_advantages
from learner.algorithm import Sao, through_observations
from learner.collate import Sample, to_sample
from store.settings import AblationSettings, LearnerSettings
from tests.learner.rollouts import make_trajectory


def make_sao(**ablation: object) -> Sao:
    return Sao(LearnerSettings(gamma=0.97, ablation=AblationSettings.model_validate(ablation)))


def make_sample(seed: int, num_turns: int = 3) -> Sample:
    return to_sample(make_trajectory(np.random.default_rng(seed), num_turns=num_turns), 0.7 + seed)


def gae(values: list[float], rewards: list[float], gamma: float, lambda_: float) -> list[float]:
    """By the definition: A_t = sum over k of (gamma lambda)^k delta_{t+k}."""
    count = len(values)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < count else 0.0) - values[t] for t in range(count)]
    return [sum((gamma * lambda_) ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)]


def turns_by_hand(sample: Sample) -> list[list[int]]:
    """Indices into the generated tokens of each turn."""
    turns: list[list[int]] = []
    positions = sample.generated_G.tolist()
    for index, position in enumerate(positions):
        if index and positions[index - 1] == position - 1:
            turns[-1].append(index)
        else:
            turns.append([index])
    return turns


@pytest.mark.parametrize("seed", range(5))
def test_turns_are_runs_of_generated_tokens(seed: int) -> None:
    sample = make_sample(seed, num_turns=1 + seed)
    assert [list(range(turn.start, turn.stop)) for turn in sample.turns] == turns_by_hand(sample)
    assert len(sample.turns) == 1 + seed


@pytest.mark.parametrize("seed", range(5))
def test_advantages_skip_observations(seed: int) -> None:
    sample = make_sample(seed)
    values = torch.randn(sample.num_generated, generator=torch.Generator().manual_seed(seed))
    lambda_ = 1 - 1 / (1.5 * sample.num_generated)
    (advantages_G,) = make_sao().advantages([sample], [values])
    expected = gae(values.tolist(), sample.rewards_G.tolist(), 0.97, lambda_)
    assert advantages_G.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_gae_through_observations_decays_over_them(seed: int) -> None:
    sample = make_sample(seed)
    algorithm = make_sao(skip_observations=False)
    (valued,) = algorithm.valued([sample])
    first, last = int(sample.generated_G[0]), int(sample.generated_G[-1])
    assert valued.generated_G.tolist() == list(range(first, last + 1))
    values = torch.randn(last + 1 - first, generator=torch.Generator().manual_seed(seed))
    rewards = [0.0] * (last - first) + [0.7 + seed]
    lambda_ = 1 - 1 / (1.5 * sample.num_generated)
    expected = gae(values.tolist(), rewards, 0.97, lambda_)
    (advantages_G,) = algorithm.advantages([sample], [values])
    assert advantages_G.tolist() == pytest.approx([expected[p - first] for p in sample.generated_G.tolist()], abs=1e-5)
    assert through_observations(sample).total_reward == pytest.approx(sample.total_reward)


def test_without_observations_both_ways_agree() -> None:
    sample = make_sample(1, num_turns=1)
    values = torch.randn(sample.num_generated)
    (skipping,) = make_sao().advantages([sample], [values])
    (running,) = make_sao(skip_observations=False).advantages([sample], [values])
    assert torch.equal(skipping, running)


@pytest.mark.parametrize("level", ["turn_last", "turn_mean"])
@pytest.mark.parametrize("seed", range(5))
def test_turn_advantages_are_gae_over_turns(level: str, seed: int) -> None:
    sample = make_sample(seed, num_turns=4)
    values = torch.randn(sample.num_generated, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    turns = turns_by_hand(sample)
    turn_values = [
        float(values[turn[-1]]) if level == "turn_last" else sum(float(values[i]) for i in turn) / len(turn)
        for turn in turns
    ]
    turn_rewards = [sum(float(sample.rewards_G[i]) for i in turn) for turn in turns]
    per_turn = gae(turn_values, turn_rewards, 0.97, 0.8)
    expected = [advantage for advantage, turn in zip(per_turn, turns, strict=True) for _ in turn]
    found = turn_advantages(values, sample.rewards_G.double(), sample.turns, 0.97, 0.8, level)  # type: ignore[arg-type]
    assert found.tolist() == pytest.approx(expected, abs=1e-9)
    (through_settings,) = make_sao(advantage_level=level).advantages([sample], [values.float()])
    assert len({tuple(through_settings[turn].tolist()) for turn in sample.turns}) == 4
    assert all(len(set(through_settings[turn].tolist())) == 1 for turn in sample.turns)


def test_trust_region_ablations_reach_the_loss() -> None:
    policy = torch.tensor([-1.0, -1.0, -3.0], requires_grad=True)
    behaviour = torch.tensor([-1.0, -4.0, -1.0])  # ratios 1, e^3 (too high), e^-2 (too low)
    advantages = torch.ones(3)

    def weights(trust_region: str) -> list[float]:
        policy.grad = None
        loss = make_sao(trust_region=trust_region).policy_loss(policy, behaviour, advantages, 1)
        loss.loss.backward()
        assert policy.grad is not None
        return (-policy.grad).tolist()

    assert weights("double_sided") == pytest.approx([1, 0, 0])
    assert weights("unbounded") == pytest.approx([1, math.exp(3), math.exp(-2)])
    assert weights("none") == pytest.approx([1, 1, 1])
