"""One update on the tiny model: what changes, what does not, and that resuming equals never having stopped."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from learner import checkpoint, sao
from learner.advantages import terminal_rewards
from learner.collate import Sample
from learner.models import load_policy
from learner.sao import SaoState
from store.settings import CriticSettings, LearnerSettings, PlasticitySettings
from tests.learner.rollouts import make_samples, resampled

CRITIC = {"warmup_updates": 0, "num_layers": 2, "learning_rate": 5e-3}


def make_settings(**changes: Any) -> LearnerSettings:
    critic = CriticSettings(**(CRITIC | changes.pop("critic", {})))
    plasticity = PlasticitySettings(**changes.pop("plasticity", {}))
    fields = {"policy_learning_rate": 1e-3, "autocast_bfloat16": False} | changes
    return LearnerSettings(critic=critic, plasticity=plasticity, **fields)


@pytest.fixture(scope="module")
def start_policy(tiny_model_dir: Path) -> Any:
    return load_policy(tiny_model_dir)


@pytest.fixture
def make_state(tiny_model_dir: Path) -> Callable[..., SaoState]:
    return lambda **changes: SaoState(tiny_model_dir, make_settings(**changes))


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def changed(module: Any, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in module.named_parameters() if not torch.equal(value, before[name])}


def run(state: SaoState, policy: Any, seeds: range, count: int = 5) -> list[sao.UpdateReport]:
    return [sao.update(state, make_samples(seed, count, policy)) for seed in seeds]


def test_update_trains_policy_and_critic_but_never_attention_embeddings_or_reference(
    make_state: Any, start_policy: Any
) -> None:
    state = make_state()
    policy, critic, reference = weights(state.policy), weights(state.critic), weights(state.reference)
    reports = run(state, start_policy, range(3))
    assert [report.kind for report in reports] == ["policy"] * 3
    assert changed(state.policy, policy) == set(policy)
    moved = changed(state.critic, critic)
    assert moved == {name for name in critic if "self_attn" not in name and "embed_tokens" not in name}
    assert not changed(state.reference, reference)
    assert not state.policy.training
    assert not state.critic.training


def test_first_update_on_fresh_samples_keeps_every_token(make_state: Any, start_policy: Any) -> None:
    metrics = run(make_state(), start_policy, range(1))[0].metrics
    assert metrics["kept_fraction"] == 1
    assert metrics["log_ratio_mean"] == pytest.approx(0, abs=1e-5)
    assert metrics["effective_sample_size_fraction"] == pytest.approx(1, abs=1e-5)
    assert metrics["kl_to_start"] == pytest.approx(0, abs=1e-6)
    assert metrics["value_mean"] == 0


def test_warm_up_trains_the_critic_alone(make_state: Any, start_policy: Any) -> None:
    state = make_state(critic={"warmup_updates": 2})
    policy, critic = weights(state.policy), weights(state.critic)
    assert [report.kind for report in run(state, start_policy, range(2))] == ["critic_warmup"] * 2
    assert not changed(state.policy, policy)
    assert changed(state.critic, critic)
    assert run(state, start_policy, range(2, 3))[0].kind == "policy"
    assert changed(state.policy, policy)


@pytest.mark.parametrize("scaling", ["running_rms", "whiten", "none"])
def test_micro_batches_chunks_and_order_do_not_change_the_step(
    make_state: Any, start_policy: Any, scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = make_samples(7, 6, start_policy)
    together = make_state(advantage_scaling=scaling)
    sao.update(together, samples)
    apart = make_state(advantage_scaling=scaling, micro_batch_tokens=1)
    monkeypatch.setattr("learner.models.HEAD_CHUNK_TOKENS", 3)
    sao.update(apart, samples[::-1])
    for name, gradient_sum in moments(together.policy, together.policy_optimizer).items():
        other = moments(apart.policy, apart.policy_optimizer)[name]
        assert torch.allclose(gradient_sum, other, rtol=1e-3, atol=1e-6), name
    for name, gradient_sum in moments(together.critic, together.critic_optimizer).items():
        other = moments(apart.critic, apart.critic_optimizer)[name]
        assert torch.allclose(gradient_sum, other, rtol=1e-3, atol=1e-6), name


def moments(module: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """First moments by name: after one step the gradient, scaled; Adam's own step would hide the gradient's size."""
    return {name: optimizer.state[value]["exp_avg"] for name, value in module.named_parameters() if value.requires_grad}


def test_checkpointed_activations_give_the_same_step_and_keep_less(make_state: Any, start_policy: Any) -> None:
    samples = make_samples(3, 6, start_policy)

    def step(**changes: Any) -> tuple[SaoState, int]:
        state = make_state(**changes)
        kept = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            sao.update(state, samples)
        return state, kept

    plain, num_kept = step()
    checkpointed, num_kept_checkpointed = step(activation_checkpointing=True)
    assert not changed(checkpointed.policy, weights(plain.policy))
    assert not changed(checkpointed.critic, weights(plain.critic))
    assert num_kept_checkpointed < 0.7 * num_kept


def test_settings_reach_the_loss(make_state: Any, start_policy: Any) -> None:
    """A trust region so narrow that nothing is inside skips the step: the configuration is not decoration."""
    state = make_state(plasticity={"kl_coefficient": 1.0})
    far = [shifted(sample, -2.0) for sample in make_samples(0, 4, start_policy)]
    before = weights(state.policy)
    report = sao.update(state, far)
    assert report.kind == "skipped"
    assert not report.changed_policy
    assert report.metrics["rejected_high_fraction"] == 1
    assert not changed(state.policy, before)
    assert not state.policy_optimizer.state
    assert all(parameter.grad is None for parameter in state.policy.parameters())
    wide = make_state(eps_high=10.0)
    assert sao.update(wide, far).metrics["kept_fraction"] == 1


def shifted(sample: Sample, nats: float) -> Sample:
    """As if the sampler had found each token that much more likely."""
    return Sample(
        sample.token_ids_T,
        sample.generated_G,
        sample.behaviour_logprobs_G + nats,
        sample.rewards_G,
        sample.temperature,
    )


def test_kept_fraction_of_each_trajectory_is_its_own(make_state: Any, start_policy: Any) -> None:
    near, far = make_samples(0, 2, start_policy)
    assert sao.kept_fractions(make_state(), [near, shifted(far, -3.0)]) == [1.0, 0.0]


def test_kl_pulls_back_to_the_start(make_state: Any, start_policy: Any) -> None:
    def drift(kl_coefficient: float) -> float:
        state = make_state(plasticity={"kl_coefficient": kl_coefficient})
        rewards = [1.0, -1.0, 1.0, -1.0]
        for _ in range(6):
            fresh = [resampled(sample, state.policy) for sample in make_samples(1, 4, rewards=rewards)]
            report = sao.update(state, fresh)
        return report.metrics["kl_to_start"]

    assert drift(5.0) < 0.7 * drift(0.0)


def test_drop_in_reward_returns_to_the_start_with_fresh_moments(make_state: Any, start_policy: Any) -> None:
    state = make_state()
    start = weights(state.policy)
    kinds = []
    for seed, reward in enumerate((0.9, 0.9, 0.9, 0.1, 0.1)):
        samples = [resampled(each, state.policy) for each in make_samples(seed, 4, rewards=[reward] * 4)]
        kinds.append(sao.update(state, samples).kind)
        if seed == 3:
            assert not changed(state.policy, start)
            assert not state.policy_optimizer.state
    assert kinds == ["policy", "policy", "policy", "return_to_start", "policy"]
    assert changed(state.policy, start)


def test_gradient_that_is_not_finite_is_thrown_away_and_counted(make_state: Any, start_policy: Any) -> None:
    state = make_state(advantage_scaling="none", plasticity={"return_to_start": False})
    run(state, start_policy, range(1))
    before, critic = weights(state.policy), weights(state.critic)
    broken = make_samples(1, 3, start_policy, rewards=[1.0, 0.5, 1e38])
    report = sao.update(state, broken)
    assert report.kind == "skipped"
    assert report.metrics["num_nonfinite_metrics"] > 0
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert not changed(state.policy, before)
    assert not changed(state.critic, critic)
    assert run(state, start_policy, range(2, 3))[0].kind == "policy"


def test_resuming_equals_never_having_stopped_bit_for_bit(make_state: Any, start_policy: Any, tmp_path: Path) -> None:
    critic = {"warmup_updates": 1}
    straight, stopped = make_state(critic=critic), make_state(critic=critic)
    expected = [report.metrics for report in run(straight, start_policy, range(5))]
    run(stopped, start_policy, range(2))
    checkpoint.write(tmp_path, 2, sao.state_dict(stopped), "{}")
    resumed = make_state(critic=critic)
    sao.load_state_dict(resumed, checkpoint.read(tmp_path, 2))
    for report, metrics in zip(run(resumed, start_policy, range(2, 5)), expected[2:], strict=True):
        assert without_times(report.metrics) == without_times(metrics)
    assert not changed(resumed.policy, weights(straight.policy))
    assert not changed(resumed.critic, weights(straight.critic))


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "second" not in name}


@pytest.mark.parametrize("forgotten", ["policy_optimizer", "critic_optimizer", "critic", "advantage_mean_square"])
def test_resuming_without_a_part_is_seen(make_state: Any, start_policy: Any, tmp_path: Path, forgotten: str) -> None:
    """The mistake: a resume that restores the weights alone."""
    straight, resumed = make_state(), make_state()
    saved_fresh = sao.state_dict(make_state())
    run(straight, start_policy, range(2))
    checkpoint.write(tmp_path, 2, sao.state_dict(straight) | {forgotten: saved_fresh[forgotten]}, "{}")
    sao.load_state_dict(resumed, checkpoint.read(tmp_path, 2))
    run(straight, start_policy, range(2, 3))
    run(resumed, start_policy, range(2, 3))
    assert changed(resumed.policy, weights(straight.policy)) or changed(resumed.critic, weights(straight.critic))


def test_checkpoint_of_other_critic_settings_is_refused(make_state: Any) -> None:
    saved = sao.state_dict(make_state())
    with pytest.raises(sao.CheckpointMismatchError, match=r"learner\.critic"):
        sao.load_state_dict(make_state(critic={"num_layers": 1}), saved)


def test_learning_rate_after_a_resume_is_the_settings_own(make_state: Any, start_policy: Any) -> None:
    state = make_state()
    run(state, start_policy, range(1))
    resumed = make_state(policy_learning_rate=7e-5)
    sao.load_state_dict(resumed, sao.state_dict(state))
    assert resumed.policy_optimizer.param_groups[0]["lr"] == 7e-5


def test_update_without_trajectories_is_refused(make_state: Any) -> None:
    with pytest.raises(ValueError, match="at least one"):
        sao.update(make_state(), [])


PROMPT = (5, 6, 7)
NUM_ROLLOUTS, NUM_TOKENS = 24, 3
TEMPERATURE = 4.0


def learn_even_tokens(state: SaoState, num_updates: int, shuffled: bool) -> tuple[float, float]:
    """Sample from the policy itself, reward the share of even tokens, update; the mean reward at first and at last."""
    generator = torch.Generator().manual_seed(0)
    means = []
    for _ in range(num_updates):
        tokens_BG, logprobs_BG = sample_from(state.policy, generator)
        rewards_B = (tokens_BG % 2 == 0).float().mean(1)
        means.append(float(rewards_B.mean()))
        if shuffled:
            rewards_B = rewards_B[torch.randperm(NUM_ROLLOUTS, generator=generator)]
        samples = []
        for tokens_G, logprobs_G, reward in zip(tokens_BG, logprobs_BG, rewards_B, strict=True):
            rewards_G = terminal_rewards(NUM_TOKENS, float(reward))
            token_ids_T = torch.cat([torch.tensor(PROMPT), tokens_G])
            samples.append(Sample(token_ids_T, torch.arange(3, 3 + NUM_TOKENS), logprobs_G, rewards_G, TEMPERATURE))
        sao.update(state, samples)
    return sum(means[:4]) / 4, sum(means[-4:]) / 4


@torch.no_grad()
def sample_from(policy: Any, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probabilities, both [B, G]."""
    token_ids_BT = torch.tensor(PROMPT).repeat(NUM_ROLLOUTS, 1)
    logprobs = []
    for _ in range(NUM_TOKENS):
        logits_BV = policy(input_ids=token_ids_BT, use_cache=False).logits[:, -1] / TEMPERATURE
        log_softmax_BV = torch.log_softmax(logits_BV, -1)
        tokens_B1 = torch.multinomial(log_softmax_BV.exp(), 1, generator=generator)
        logprobs.append(log_softmax_BV.gather(-1, tokens_B1))
        token_ids_BT = torch.cat([token_ids_BT, tokens_B1], 1)
    return token_ids_BT[:, len(PROMPT) :], torch.cat(logprobs, 1)


def test_true_rewards_are_learned_and_shuffled_ones_are_not(make_state: Any) -> None:
    before, after = learn_even_tokens(make_state(policy_learning_rate=3e-3), 40, shuffled=False)
    assert before < 0.6
    assert after > 0.7
    _, after_control = learn_even_tokens(make_state(policy_learning_rate=3e-3), 40, shuffled=True)
    assert after_control < 0.6
