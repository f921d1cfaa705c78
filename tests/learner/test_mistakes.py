"""The mistakes that others made (SAO.md section 8): each is made on purpose somewhere, and seen.

 1  reward on a padding or observation token        here
 2  value loss averaged per micro-batch             here
 3  warm-up inverted                                test_sao.py: test_warm_up_trains_the_critic_alone
 4  configuration that never reaches the loss       test_sao.py: test_settings_reach_the_loss
 5  "old" log-probabilities of the trainer's own    test_baselines.py: test_recomputed_old_policy_hides_staleness...
 6  raw log-probabilities at another temperature    tests/app/inference/test_replay.py
 7  re-tokenised text                               here
 8  stale KV cache after a swap                     tests/app/inference/test_engine_contract.py (clear_cache)
 9  new version labels on old tokens                tests/app/inference/test_engine_contract.py (version spans)
10  zeros for missing log-probabilities             here, and tests/store/test_trajectories.py
11  resume that restores the weights alone          test_sao.py: test_resuming_without_a_part_is_seen
12  bf16 log-softmax                                test_models.py: test_log_softmax_is_fp32_even_of_bf16_logits
13  dropout left on                                 here
14  short trajectories favoured                     here: what was trained is reported by length
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner import sao
from learner.advantages import generalized_advantages
from learner.algorithm import through_observations
from learner.collate import Sample, collate, to_sample
from learner.losses import value_loss
from learner.metrics import effective_sample_size_fraction
from learner.models import load_policy, target_logprobs
from store.settings import CriticSettings, LearnerSettings
from store.types import TrajectoryInvariantError, VersionSpan
from tests.learner.rollouts import make_samples, make_trajectory, resampled


def test_1_reward_behind_the_generated_tokens_is_lost() -> None:
    """An observation follows the last turn; the mistake puts the reward at the end of the sequence."""
    trajectory = make_trajectory(np.random.default_rng(0), num_turns=2)
    padded = replace(
        trajectory,
        token_ids=np.append(trajectory.token_ids, [7, 7, 7]).astype(np.int32),
        loss_mask=np.append(trajectory.loss_mask, [0, 0, 0]).astype(np.uint8),
    )
    sample = to_sample(padded, 0.75)
    assert sample.total_reward == 0.75
    assert float(sample.rewards_G[-1]) == 0.75
    mistaken_T = torch.zeros(len(sample.token_ids_T))
    mistaken_T[-1] = 0.75
    values_G = torch.zeros(sample.num_generated)
    assert float(generalized_advantages(values_G, sample.rewards_G, 1.0, 0.9)[-1]) == 0.75
    assert generalized_advantages(values_G, mistaken_T[sample.generated_G], 1.0, 0.9).abs().max() == 0


def test_2_mean_per_micro_batch_is_another_gradient() -> None:
    values = torch.randn(10, requires_grad=True)
    returns = torch.randn(10)

    def gradient(denominators: list[int]) -> torch.Tensor:
        values.grad = None
        for part, denominator in zip((slice(0, 2), slice(2, 10)), denominators, strict=True):
            value_loss(values[part], returns[part], denominator).backward()
        assert values.grad is not None
        return values.grad.clone()

    whole = gradient([10, 10])
    value_loss(values, returns, 10).backward()
    assert values.grad is not None
    assert torch.allclose(whole + whole, values.grad)  # both were accumulated: once in parts, once whole
    assert not torch.allclose(whole, gradient([2, 8]))


def test_7_tokens_of_the_text_are_not_the_tokens_that_were_sampled(micro_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(micro_model_dir)
    prompt = tokenizer("Why is the sea blue?", add_special_tokens=False).input_ids
    # The policy may sample letter by letter what the tokenizer would write in one token.
    sampled = [token for letter in " the sea" for token in tokenizer(letter, add_special_tokens=False).input_ids]
    again = tokenizer(tokenizer.decode(sampled), add_special_tokens=False).input_ids
    assert tokenizer.decode(sampled) == tokenizer.decode(again)
    assert len(again) < len(sampled)
    sound = make_trajectory(np.random.default_rng(0))
    fields = {name: getattr(sound, name) for name in type(sound).__slots__} | {
        "token_ids": np.array(prompt + sampled, dtype=np.int32),
        "loss_mask": np.array([0] * len(prompt) + [1] * len(sampled), dtype=np.uint8),
        "behaviour_logprobs": np.full(len(sampled), -1.0, dtype=np.float32),
        "version_spans": (VersionSpan(0, 0, len(sampled)),),
    }
    to_sample(type(sound)(**fields), 1.0)
    mistaken = fields | {
        "token_ids": np.array(prompt + again, dtype=np.int32),
        "loss_mask": np.array([0] * len(prompt) + [1] * len(again), dtype=np.uint8),
    }
    with pytest.raises(TrajectoryInvariantError):
        to_sample(type(sound)(**mistaken), 1.0)


def test_10_zeros_for_missing_log_probabilities_show_in_the_effective_sample_size(tiny_model_dir: Path) -> None:
    policy = load_policy(tiny_model_dir)
    samples = [resampled(sample, policy) for sample in make_samples(0, 8)]
    (batch,) = collate(samples, 100_000)
    policy_G = target_logprobs(policy, batch)
    order = batch.rows
    behaviour_G = torch.cat([samples[index].behaviour_logprobs_G for index in order])
    assert effective_sample_size_fraction(policy_G - behaviour_G) > 0.98
    missing_G = torch.where(torch.arange(len(behaviour_G)) % 4 == 0, 0.0, behaviour_G)
    assert effective_sample_size_fraction(policy_G - missing_G) < 0.9
    trajectory = make_trajectory(np.random.default_rng(1))
    gap = trajectory.behaviour_logprobs.copy()
    gap[0] = math.nan
    with pytest.raises(TrajectoryInvariantError):
        to_sample(replace(trajectory, behaviour_logprobs=gap), 1.0)


def test_13_dropout_is_off_while_training_and_would_show(tmp_path: Path, tiny_model_dir: Path) -> None:
    policy = load_policy(tiny_model_dir)
    policy.config.attention_dropout = 0.5
    policy.save_pretrained(tmp_path)
    settings = LearnerSettings(critic=CriticSettings(warmup_updates=0), autocast_bfloat16=False)
    state = sao.SaoState(tmp_path, settings)
    samples = [resampled(sample, state.policy) for sample in make_samples(0, 6)]
    assert sao.update(state, samples).metrics["effective_sample_size_fraction"] == pytest.approx(1.0, abs=1e-5)
    mistaken = sao.SaoState(tmp_path, settings)
    mistaken.policy.train()
    assert sao.update(mistaken, samples).metrics["effective_sample_size_fraction"] < 1 - 1e-5


def test_14_lengths_that_were_trained_are_reported(tiny_model_dir: Path) -> None:
    settings = LearnerSettings(critic=CriticSettings(warmup_updates=0), autocast_bfloat16=False)
    state = sao.SaoState(tiny_model_dir, settings)
    samples = [resampled(sample, state.policy) for sample in make_samples(0, 6)]
    short = sorted(samples, key=lambda sample: sample.num_generated)[:3]
    means = [sum(sample.num_generated for sample in batch) / len(batch) for batch in (samples, short)]
    assert means[1] < means[0]
    assert sao.update(state, samples).metrics["generated_length_mean"] == pytest.approx(means[0])
    assert sao.update(state, short).metrics["generated_length_mean"] == pytest.approx(means[1])


def test_observation_tokens_count_for_nothing_but_what_the_model_reads() -> None:
    """Same lengths, other observations: every tensor of the sample but the ids is the same."""
    rng = np.random.default_rng(2)
    trajectory = make_trajectory(rng, num_turns=3)
    ids = np.where(trajectory.loss_mask == 1, trajectory.token_ids, rng.integers(3, 300, len(trajectory.token_ids)))
    other = replace(trajectory, token_ids=ids.astype(np.int32))

    def parts(sample: Sample) -> list[Any]:
        return [sample.generated_G.tolist(), sample.behaviour_logprobs_G.tolist(), sample.rewards_G.tolist()]

    assert parts(to_sample(trajectory, 1.0)) == parts(to_sample(other, 1.0))
    assert through_observations(to_sample(trajectory, 1.0)).num_generated > to_sample(trajectory, 1.0).num_generated
