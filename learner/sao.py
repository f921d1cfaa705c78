"""One SAO update over a batch of judged trajectories (arXiv 2607.07508), in the order the paper gives.

    snapshot V -> explained variance -> fixed targets -> K critic steps -> V again -> advantages -> policy step

What PPO has and this has not: no old policy (the sampler's own log-probabilities are the behaviour policy), no groups,
no clip that depends on the sign of the advantage, no entropy bonus. What is added to the paper for a server that never
stops learning: an exact KL to the starting policy, advantages divided by a running RMS, and a return to the starting
policy when the reward drops (SAO.md section 6). No database and no engine here: tensors in, metrics out.

The advantage and the policy loss are SAO's own in `learner/algorithm.py`; a baseline may stand in for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from learner.advantages import RunningRms, discounted_sums, whiten
from learner.baselines import make_algorithm
from learner.collate import MicroBatch, Sample, collate, join_rows, split_rows
from learner.drift import DropDetector
from learner.losses import TrustRegion, entropy, kl_to_reference, policy_loss, value_loss
from learner.metrics import ExplainedVariance, effective_sample_size_fraction
from learner.models import (
    Critic,
    autocast,
    check_logits,
    checkpoint_activations,
    chunks,
    gather_targets,
    hidden_at_generated,
    load_policy,
    log_softmax,
    target_logprobs,
    trainable,
)
from store.settings import LearnerSettings
from store.types import TidelineError

RETURN_TO_START = "return_to_start"


class CheckpointMismatchError(TidelineError, ValueError):
    """A saved training state belongs to another model or to other critic settings."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What one update did. `kind` is one of StepRecord's; every metric is a number (units in the names)."""

    kind: str
    metrics: dict[str, float]

    @property
    def changed_policy(self) -> bool:
        return self.kind in ("policy", RETURN_TO_START)


class SaoState:
    """Everything that learning changes: policy, critic, their optimizers, running statistics, drift state.

    `floor_version` is the first version since the last return to the start: what older ones sampled is stale.
    """

    def __init__(self, start_directory: Path, settings: LearnerSettings) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.start_directory = start_directory
        self.policy = load_policy(start_directory)
        check_logits(self.policy)
        # Loaded, not converted: a conversion would round the rotary frequencies with the weights.
        dtype = torch.bfloat16 if settings.autocast_bfloat16 else torch.float32
        self.reference = load_policy(start_directory, dtype).requires_grad_(False)
        self.critic = Critic(self.policy, settings.critic.num_layers, settings.critic.freeze_attention).eval()
        if settings.activation_checkpointing:
            checkpoint_activations(self.policy)
            checkpoint_activations(self.critic.backbone)
        self.policy_optimizer = self.make_policy_optimizer()
        self.critic_optimizer = self.make_critic_optimizer()
        self.critic_pretrained = False
        self.algorithm = make_algorithm(settings)
        self.advantage_rms = RunningRms(settings.advantage_rms_decay, settings.advantage_rms_floor)
        self.explained_variance = ExplainedVariance(settings.critic.explained_variance_window)
        self.drop_detector = DropDetector(settings.plasticity)
        self.num_updates = 0
        self.floor_version = 0

    def make_policy_optimizer(self) -> torch.optim.AdamW:
        """AdamW without weight decay, its moments at zero."""
        return torch.optim.AdamW(
            trainable(self.policy), lr=self.settings.policy_learning_rate, weight_decay=0.0, fused=True
        )

    def make_critic_optimizer(self) -> torch.optim.AdamW:
        """AdamW without weight decay, its moments at zero."""
        return torch.optim.AdamW(
            trainable(self.critic), lr=self.settings.critic.learning_rate, weight_decay=0.0, fused=True
        )

    @property
    def region(self) -> TrustRegion:
        return TrustRegion(self.settings.eps_low, self.settings.eps_high)


def update(
    state: SaoState, samples: Sequence[Sample], on_progress: Callable[[str], None] = lambda _: None
) -> UpdateReport:
    """Train on one batch; changes `state` in place.

    `on_progress` is told each part as it begins: `critic`, `policy`. Raises ValueError for an empty batch.
    """
    if not samples:
        raise ValueError("an update needs at least one trajectory")
    settings = state.settings
    batches = collate(samples, settings.micro_batch_tokens)
    num_generated = sum(sample.num_generated for sample in samples)
    total_rewards = torch.tensor([sample.total_reward for sample in samples])
    state.num_updates += 1
    began = time.monotonic()
    metrics: dict[str, float] = {
        "reward_mean": float(total_rewards.mean()),
        "reward_std": float(total_rewards.std(correction=0)),
        "reward_min": float(total_rewards.min()),
        "reward_max": float(total_rewards.max()),
        "num_trajectories": float(len(samples)),
        "num_tokens": float(num_generated),
        "generated_length_mean": num_generated / len(samples),
    }

    values: list[Tensor] = []
    if state.algorithm.uses_critic:
        on_progress("critic")
        values = critic_update(state, batches, samples, num_generated, metrics)
        metrics["critic_seconds"] = time.monotonic() - began

    dropped = state.drop_detector.observe(metrics["reward_mean"])
    warming_up = state.num_updates <= settings.critic.warmup_updates and not state.critic_pretrained
    if state.algorithm.uses_critic and warming_up:
        return _report("critic_warmup", metrics)
    if dropped and settings.plasticity.return_to_start:
        return_to_start(state)
        return _report(RETURN_TO_START, metrics)

    on_progress("policy")
    policy_began = time.monotonic()
    advantages = scaled(state, state.algorithm.advantages(samples, values), metrics)
    old_logprobs = [sample.behaviour_logprobs_G for sample in samples]
    if state.algorithm.recomputes_old_logprobs:
        old_logprobs = logprobs_of(state.policy, batches, samples, settings)
    for _ in range(state.algorithm.num_policy_steps):
        stepped = policy_step(state, batches, samples, advantages, old_logprobs, metrics)
    metrics["policy_seconds"] = time.monotonic() - policy_began
    metrics["tokens_per_second"] = num_generated / (time.monotonic() - began)
    return _report("policy" if stepped else "skipped", metrics)


def critic_update(
    state: SaoState,
    batches: Sequence[MicroBatch],
    samples: Sequence[Sample],
    num_generated: int,
    metrics: dict[str, float],
) -> list[Tensor]:
    """K critic steps towards the returns; fills `metrics`. Returns V after them where the algorithm needs it."""
    settings = state.settings
    returns = [discounted_sums(sample.rewards_G, settings.gamma) for sample in samples]
    # With lambda_critic = 1 the targets need no values, so the first step's forward pass is the snapshot of V too.
    critic_steps = [
        critic_step(state, batches, returns, num_generated) for _ in range(settings.critic.updates_per_step)
    ]
    values_before = critic_steps[0].values
    for returns_G, values_G in zip(returns, values_before, strict=True):
        state.explained_variance.add(returns_G, values_G)
    metrics |= {
        "value_mean": float(torch.cat(values_before).mean()),
        "value_loss": critic_steps[0].loss,
        "critic_grad_norm": critic_steps[0].grad_norm,
        "num_skipped_critic_steps": float(sum(not math.isfinite(each.grad_norm) for each in critic_steps)),
    }
    explained = state.explained_variance.value()
    if explained is not None:
        metrics["explained_variance"] = explained
    valued = state.algorithm.valued(samples)
    if settings.ablation.skip_observations:
        return values_of(state.critic, batches, samples, settings)
    return values_of(state.critic, collate(valued, settings.micro_batch_tokens), valued, settings)


def scaled(state: SaoState, advantages: Sequence[Tensor], metrics: dict[str, float]) -> list[Tensor]:
    """The advantages as the settings scale them; fills `metrics` and moves the running RMS on."""
    settings = state.settings
    joined_G = torch.cat(list(advantages))
    metrics["advantage_mean"] = float(joined_G.mean())
    if settings.advantage_scaling == "running_rms":
        state.advantage_rms = state.advantage_rms.updated(joined_G)
        metrics["advantage_rms"] = state.advantage_rms.divisor
        return [advantages_G / state.advantage_rms.divisor for advantages_G in advantages]
    if settings.advantage_scaling == "whiten":
        return list(torch.split(whiten(joined_G), [len(advantages_G) for advantages_G in advantages]))
    return list(advantages)


@torch.no_grad()
def values_of(
    critic: Critic, batches: Sequence[MicroBatch], samples: Sequence[Sample], settings: LearnerSettings
) -> list[Tensor]:
    """V before each generated token, one fp32 [G] per sample."""
    values: dict[int, Tensor] = {}
    with autocast(settings.autocast_bfloat16):
        for batch in batches:
            values |= split_rows(critic(batch), batch, samples)
    return [values[index] for index in range(len(samples))]


@dataclass(frozen=True, slots=True)
class CriticStep:
    """`values` are those before the step, one fp32 [G] per sample; `grad_norm` is the one before clipping."""

    values: list[Tensor]
    loss: float
    grad_norm: float


def _report(kind: str, metrics: dict[str, float]) -> UpdateReport:
    """Leave out what is not finite, and count it: a NaN is no number, in JSON neither."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return UpdateReport(kind, finite | {"num_nonfinite_metrics": float(len(metrics) - len(finite))})


def critic_step(
    state: SaoState, batches: Sequence[MicroBatch], returns: Sequence[Tensor], num_generated: int
) -> CriticStep:
    """One optimizer step of the critic towards fixed returns, over all micro-batches."""
    total = 0.0
    values: dict[int, Tensor] = {}
    for batch in batches:
        with autocast(state.settings.autocast_bfloat16):
            values_G = state.critic(batch)
        loss = value_loss(values_G, join_rows(returns, batch), num_generated)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
        lengths = [len(returns[index]) for index in batch.rows]
        values |= dict(zip(batch.rows, torch.split(values_G.detach(), lengths), strict=True))
    grad_norm = _optimizer_step(state.critic_optimizer, trainable(state.critic), state.settings.max_grad_norm)
    return CriticStep([values[index] for index in range(len(returns))], total, grad_norm)


def policy_step(
    state: SaoState,
    batches: Sequence[MicroBatch],
    samples: Sequence[Sample],
    advantages: Sequence[Tensor],
    old_logprobs: Sequence[Tensor],
    metrics: dict[str, float],
) -> bool:
    """One optimizer step of the policy; fills `metrics`.

    False, without a step, if no token was accepted or the gradient is not finite.
    """
    settings = state.settings
    num_generated = sum(sample.num_generated for sample in samples)
    sums = dict.fromkeys(
        ("policy_loss", "rejected_low_fraction", "rejected_high_fraction", "entropy", "kl_to_start"), 0.0
    )
    log_ratios: list[Tensor] = []
    num_accepted = 0
    for batch in batches:
        behaviour_G = join_rows([sample.behaviour_logprobs_G for sample in samples], batch)
        old_G = join_rows(old_logprobs, batch)
        advantages_G = join_rows(advantages, batch)
        with autocast(settings.autocast_bfloat16):
            with torch.no_grad():
                reference_GD = hidden_at_generated(state.reference.base_model, batch)
            policy_GD = hidden_at_generated(state.policy.base_model, batch)
            # The head is differentiated chunk by chunk and its gradient handed on once: [G, V] never exists whole.
            cut_GD = policy_GD.detach().requires_grad_()
            for part in chunks(batch.num_generated):
                temperatures_G = batch.temperatures_G[part]
                with torch.no_grad():
                    reference_GV = log_softmax(state.reference, reference_GD[part], temperatures_G)
                policy_GV = log_softmax(state.policy, cut_GD[part], temperatures_G)
                logprobs_G = gather_targets(policy_GV, batch.targets_G[part])
                kl_G = kl_to_reference(policy_GV, reference_GV)
                policy = state.algorithm.policy_loss(logprobs_G, old_G[part], advantages_G[part], num_generated)
                (policy.loss + settings.plasticity.kl_coefficient * kl_G.sum() / num_generated).backward()  # type: ignore[no-untyped-call]
                num_accepted += int(policy.accepted_G.sum())
                log_ratios.append(logprobs_G.detach() - behaviour_G[part])
                sums["policy_loss"] += float(policy.loss.detach())
                sums["rejected_low_fraction"] += float(policy.too_low_G.sum()) / num_generated
                sums["rejected_high_fraction"] += float(policy.too_high_G.sum()) / num_generated
                sums["entropy"] += float(entropy(policy_GV.detach()).sum()) / num_generated
                sums["kl_to_start"] += float(kl_G.detach().sum()) / num_generated
            policy_GD.backward(cut_GD.grad)  # type: ignore[no-untyped-call]
    log_ratios_G = torch.cat(log_ratios)
    metrics |= sums | {
        "kept_fraction": num_accepted / num_generated,
        "log_ratio_mean": float(log_ratios_G.mean()),
        "effective_sample_size_fraction": effective_sample_size_fraction(log_ratios_G),
    }
    if num_accepted == 0:
        state.policy_optimizer.zero_grad(set_to_none=True)
        return False
    grad_norm = _optimizer_step(state.policy_optimizer, trainable(state.policy), settings.max_grad_norm)
    metrics["policy_grad_norm"] = grad_norm
    return math.isfinite(grad_norm)


@torch.no_grad()
def logprobs_of(
    policy: Any, batches: Sequence[MicroBatch], samples: Sequence[Sample], settings: LearnerSettings
) -> list[Tensor]:
    """log pi of the generated tokens at their temperature, one fp32 [G] per sample."""
    logprobs: dict[int, Tensor] = {}
    with autocast(settings.autocast_bfloat16):
        for batch in batches:
            logprobs |= split_rows(target_logprobs(policy, batch), batch, samples)
    return [logprobs[index] for index in range(len(samples))]


def kept_fractions(state: SaoState, samples: Sequence[Sample]) -> list[float]:
    """Share of each trajectory's tokens that the trust region would keep now; one number per sample."""
    batches = collate(samples, state.settings.micro_batch_tokens)
    kept = []
    for sample, logprobs_G in zip(samples, logprobs_of(state.policy, batches, samples, state.settings), strict=True):
        behaviour_G = sample.behaviour_logprobs_G
        loss = policy_loss(logprobs_G, behaviour_G, torch.zeros_like(behaviour_G), 1, state.region)
        kept.append(float(loss.accepted_G.float().mean()))
    return kept


def return_to_start(state: SaoState) -> None:
    """The policy's weights back to the starting policy, its optimizer moments fresh; the critic goes on."""
    state.policy.load_state_dict(load_policy(state.start_directory).state_dict())
    state.policy_optimizer = state.make_policy_optimizer()


def _optimizer_step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], max_grad_norm: float) -> float:
    """Step on clipped gradients; returns their norm before. A gradient that is not finite is thrown away, no step."""
    grad_norm = float(nn.utils.clip_grad_norm_(parameters, max_grad_norm))
    if math.isfinite(grad_norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm


def state_dict(state: SaoState) -> dict[str, Any]:
    """Everything that resuming needs, as tensors and plain values; frozen tensors are left out."""
    critic = {name: value.detach() for name, value in state.critic.named_parameters() if value.requires_grad}
    return {
        "policy": state.policy.state_dict(),
        "critic": critic,
        "policy_optimizer": state.policy_optimizer.state_dict(),
        "critic_optimizer": state.critic_optimizer.state_dict(),
        "algorithm": {"name": state.settings.algorithm, "memory": state.algorithm.memory()},
        "advantage_mean_square": state.advantage_rms.mean_square,
        "explained_variance_rows": state.explained_variance.rows(),
        "drop_detector_trailing": state.drop_detector.trailing(),
        "critic_pretrained": state.critic_pretrained,
        "num_updates": state.num_updates,
        "floor_version": state.floor_version,
        "rng": torch.get_rng_state(),
    }


def load_state_dict(state: SaoState, saved: dict[str, Any]) -> None:
    """Continue from `saved` as if learning had never stopped.

    Raises CheckpointMismatchError. Learning rates are the settings', not the checkpoint's.
    """
    settings = state.settings
    trained = {name for name, parameter in state.critic.named_parameters() if parameter.requires_grad}
    if set(saved["critic"]) != trained:
        raise CheckpointMismatchError("the checkpoint's critic has other parameters than learner.critic asks for")
    try:
        state.policy.load_state_dict(saved["policy"])
        state.critic.load_state_dict(saved["critic"], strict=False)
        state.policy_optimizer = state.make_policy_optimizer()
        state.policy_optimizer.load_state_dict(saved["policy_optimizer"])
        state.critic_optimizer.load_state_dict(saved["critic_optimizer"])
    except (RuntimeError, ValueError) as error:
        raise CheckpointMismatchError(f"the checkpoint belongs to another model: {error}") from error
    for optimizer, rate in (
        (state.policy_optimizer, settings.policy_learning_rate),
        (state.critic_optimizer, settings.critic.learning_rate),
    ):
        for group in optimizer.param_groups:
            group["lr"] = rate
    state.advantage_rms = RunningRms(
        settings.advantage_rms_decay, settings.advantage_rms_floor, saved["advantage_mean_square"]
    )
    state.algorithm = make_algorithm(settings)
    if saved["algorithm"]["name"] == settings.algorithm:
        state.algorithm.remember(saved["algorithm"]["memory"])
    window = settings.critic.explained_variance_window
    state.explained_variance = ExplainedVariance(window, map(tuple, saved["explained_variance_rows"]))
    state.drop_detector = DropDetector(settings.plasticity, saved["drop_detector_trailing"])
    state.critic_pretrained = saved["critic_pretrained"]
    state.num_updates = saved["num_updates"]
    state.floor_version = saved["floor_version"]
    torch.set_rng_state(saved["rng"])
