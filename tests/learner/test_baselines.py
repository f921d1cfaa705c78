"""The baselines against plain loops, and each of them through a whole update on the tiny model."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from learner import checkpoint, sao
from learner.baselines import ALGORITHMS, make_algorithm
from learner.baselines.grpo import GroupTooSmallError
from learner.baselines.ppo import ppo_clip_loss
from learner.collate import Sample, to_sample
from learner.loop import Learner, UnsupportedAlgorithmError
from learner.models import load_policy
from learner.sao import SaoState
from store.database import Database
from store.settings import CriticSettings, LearnerSettings, Settings
from tests.learner.publishers import CheckingPublisher
from tests.learner.rollouts import make_trajectory, resampled


def make_settings(algorithm: str, **changes: Any) -> LearnerSettings:
    critic = CriticSettings(warmup_updates=0, num_layers=1, learning_rate=5e-3)
    fields = {"policy_learning_rate": 1e-3, "autocast_bfloat16": False} | changes
    return LearnerSettings(algorithm=algorithm, critic=critic, **fields)


def make_groups(seed: int, num_prompts: int = 3, group_size: int = 2) -> list[Sample]:
    """Answers of different lengths and rewards, `group_size` to each prompt."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(num_prompts):
        prompt = rng.integers(3, 300, 4).astype(np.int32)
        for _ in range(group_size):
            trajectory = make_trajectory(rng, num_turns=2)
            first = int(trajectory.loss_mask.nonzero()[0][0])
            mask = np.concatenate([np.zeros(4, np.uint8), trajectory.loss_mask[first:]])
            ids = np.concatenate([prompt, trajectory.token_ids[first:]])
            fields = {name: getattr(trajectory, name) for name in type(trajectory).__slots__}
            samples.append(
                to_sample(type(trajectory)(**(fields | {"token_ids": ids, "loss_mask": mask})), rng.random())
            )
    return samples


def constants(advantages: list[torch.Tensor]) -> list[float]:
    """The one value that all tokens of each trajectory have."""
    assert all(len(set(advantages_G.tolist())) == 1 for advantages_G in advantages)
    return [float(advantages_G[0]) for advantages_G in advantages]


def test_every_algorithm_of_the_settings_exists() -> None:
    assert set(get_args(LearnerSettings.model_fields["algorithm"].annotation)) == set(ALGORITHMS)


def test_running_mean_is_over_the_last_128_rewards_before_the_batch() -> None:
    algorithm = make_algorithm(make_settings("running_mean"))
    rewards: list[float] = []
    for seed in range(30):
        samples = make_groups(seed)
        known = rewards[-128:] or [sample.total_reward for sample in samples]
        expected = [sample.total_reward - statistics.fmean(known) for sample in samples]
        assert constants(algorithm.advantages(samples, [])) == pytest.approx(expected, abs=1e-6)
        rewards += [sample.total_reward for sample in samples]
    assert len(rewards) > 128


def test_prompt_mean_remembers_eight_rewards_of_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = make_algorithm(make_settings("prompt_mean"))
    rewards: dict[tuple[int, ...], list[float]] = {}
    for _ in range(12):
        samples = make_groups(0)  # the same three prompts again and again
        expected = []
        for sample in samples:
            known = rewards.setdefault(sample.prompt_ids, [])
            expected.append(sample.total_reward - statistics.fmean(known[-8:]) if known else 0.0)
            known.append(sample.total_reward)
        assert constants(algorithm.advantages(samples, [])) == pytest.approx(expected, abs=1e-6)
    assert len(rewards) == 3
    monkeypatch.setattr("learner.baselines.prompt_mean.MAX_PROMPTS", 2)
    algorithm.advantages(make_groups(1), [])
    assert len(algorithm.memory()) == 2 * 2


@pytest.mark.parametrize("name", ["grpo", "grpo_dis"])
def test_group_advantages_are_standard_scores_within_a_prompt(name: str) -> None:
    algorithm = make_algorithm(make_settings(name))
    samples = make_groups(3, num_prompts=2, group_size=4)
    groups = [[sample.total_reward for sample in samples[start : start + 4]] for start in (0, 4)]
    expected = [(reward - statistics.fmean(group)) / statistics.pstdev(group) for group in groups for reward in group]
    assert constants(algorithm.advantages(samples, [])) == pytest.approx(expected, abs=1e-5)


def test_group_of_equal_rewards_teaches_nothing_and_a_single_answer_is_refused() -> None:
    algorithm = make_algorithm(make_settings("grpo"))
    sample = make_groups(0)[0]
    assert constants(algorithm.advantages([sample, sample], [])) == [0.0, 0.0]
    with pytest.raises(GroupTooSmallError, match="at least two"):
        algorithm.advantages(make_groups(0, group_size=1), [])


def test_reinforce_takes_the_reward_and_no_ratio() -> None:
    algorithm = make_algorithm(make_settings("reinforce"))
    samples = make_groups(0)
    assert constants(algorithm.advantages(samples, [])) == pytest.approx([sample.total_reward for sample in samples])
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    algorithm.policy_loss(policy, torch.tensor([-9.0, -0.1]), torch.tensor([2.0, 3.0]), 4).loss.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-2 / 4, -3 / 4])


def test_ppo_clip_is_the_minimum_of_both_terms() -> None:
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(50, generator=generator, dtype=torch.float64, requires_grad=True)
    old = policy.detach() + 0.4 * torch.randn(50, generator=generator, dtype=torch.float64)
    advantages = torch.randn(50, generator=generator, dtype=torch.float64)
    result = ppo_clip_loss(policy, old, advantages, 7, 0.2, 0.28)
    expected, gradients = 0.0, []
    for logprob, old_logprob, advantage in zip(policy.tolist(), old.tolist(), advantages.tolist(), strict=True):
        ratio = float(np.exp(logprob - old_logprob))
        clipped = min(max(ratio, 0.8), 1.28)
        expected -= min(ratio * advantage, clipped * advantage) / 7
        acts = (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
        gradients.append(0.0 if acts else -ratio * advantage / 7)
    assert float(result.loss.detach()) == pytest.approx(expected, abs=1e-9)
    result.loss.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx(gradients, abs=1e-9)
    assert (~result.accepted_G).tolist() == [gradient == 0.0 for gradient in gradients]
    assert 0 < int((~result.accepted_G).sum()) < 50


@pytest.fixture
def start_policy(tiny_model_dir: Path) -> Any:
    return load_policy(tiny_model_dir)


@pytest.fixture
def make_state(tiny_model_dir: Path) -> Callable[..., SaoState]:
    return lambda name, **changes: SaoState(tiny_model_dir, make_settings(name, **changes))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_updates_the_policy_and_only_some_a_critic(
    make_state: Any, start_policy: Any, name: str
) -> None:
    state = make_state(name)
    before = {key: value.clone() for key, value in state.policy.state_dict().items()}
    report = sao.update(state, [resampled(sample, start_policy) for sample in make_groups(0)])
    assert report.kind == "policy"
    assert any(not torch.equal(value, before[key]) for key, value in state.policy.state_dict().items())
    assert ("value_loss" in report.metrics) is state.algorithm.uses_critic
    assert bool(state.critic_optimizer.state) is state.algorithm.uses_critic
    steps = {float(entry["step"]) for entry in state.policy_optimizer.state.values()}
    assert steps == {float(state.algorithm.num_policy_steps)}


def test_recomputed_old_policy_hides_staleness_that_dis_sees(make_state: Any, start_policy: Any) -> None:
    """Mistake 5 of SAO.md section 8, here on purpose: PPO measures ratios against itself."""
    stale = [
        Sample(s.token_ids_T, s.generated_G, s.behaviour_logprobs_G - 3.0, s.rewards_G, s.temperature)
        for s in (resampled(sample, start_policy) for sample in make_groups(0))
    ]
    ppo = make_state("ppo", policy_learning_rate=1e-6)
    assert sao.update(ppo, stale).metrics["kept_fraction"] == 1
    assert sao.update(make_state("sao", policy_learning_rate=1e-6), stale).metrics["kept_fraction"] == 0


@pytest.mark.parametrize("name", ["running_mean", "prompt_mean"])
def test_resuming_a_baseline_with_a_memory_equals_never_having_stopped(
    make_state: Any, start_policy: Any, tmp_path: Path, name: str
) -> None:
    batches = [[resampled(sample, start_policy) for sample in make_groups(seed % 2)] for seed in range(4)]
    straight, stopped, resumed = make_state(name), make_state(name), make_state(name)
    for batch in batches:
        sao.update(straight, batch)
    for batch in batches[:2]:
        sao.update(stopped, batch)
    checkpoint.write(tmp_path, 2, sao.state_dict(stopped), "{}")
    sao.load_state_dict(resumed, checkpoint.read(tmp_path, 2))
    for batch in batches[2:]:
        sao.update(resumed, batch)
    expected = straight.policy.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in resumed.policy.state_dict().items())
    other = make_state("sao")
    sao.load_state_dict(other, checkpoint.read(tmp_path, 2))  # another algorithm's memory is left alone
    assert other.algorithm.memory() == []


def test_live_learner_refuses_an_algorithm_that_needs_groups(settings: Settings, database: Database) -> None:
    grpo = settings.model_copy(update={"learner": settings.learner.model_copy(update={"algorithm": "grpo"})})
    with pytest.raises(UnsupportedAlgorithmError, match=r"learner\.algorithm: grpo compares"):
        Learner(grpo, database, CheckingPublisher(), "me", lambda: False)


def test_ppo_has_a_fixed_lambda_and_vapo_saos() -> None:
    lambdas = {name: make_algorithm(make_settings(name)).gae_lambda(20) for name in ("sao", "ppo", "vapo")}
    assert lambdas == {"sao": pytest.approx(1 - 1 / 30), "ppo": 0.95, "vapo": pytest.approx(1 - 1 / 30)}
