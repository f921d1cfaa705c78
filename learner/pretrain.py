"""Value pretraining: the critic learns the returns of the starting policy before the first update (SAO.md section 4).

    split by trajectory -> epochs of critic steps -> held-out value loss -> stop early, best weights back

The best epoch is the one with the least held-out value loss. The explained variance is reported beside it but decides
nothing: it does not see a constant error, so a critic that has learned the mean reward is worth no more to it than one
that says 0.

Invariant: it trains the critic alone and consumes nothing: the trajectories wait for their update as before.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from learner import sao
from learner.advantages import discounted_sums
from learner.collate import Sample, collate
from learner.files import UnreadableFileError, durable_directory, read_tensors
from learner.losses import value_loss
from learner.metrics import ExplainedVariance
from learner.models import trainable
from store.types import TidelineError

HELD_OUT_SHARE = 0.2
PATIENCE_EPOCHS = 2
"""Epochs without a lower held-out value loss after which it stops."""
MIN_TRAJECTORIES = 20
"""Fewer leave too few to hold out."""
FILE = "critic.pt"


class TooFewTrajectoriesError(TidelineError, ValueError):
    """There are not enough scored trajectories to train on some and hold out others."""


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """How well the critic predicts trajectories it is not trained on.

    value_loss          mean of 0.5 (V - R)^2 over their generated tokens
    explained_variance  1 - Var(R - V) / Var(R) over the same, None where returns hardly vary
    """

    value_loss: float
    explained_variance: float | None


@dataclass(frozen=True, slots=True)
class PretrainReport:
    """What pretraining came to: `before` is the critic as it was, `after` the one that was kept."""

    num_trained: int
    num_held_out: int
    num_epochs: int
    before: HeldOutScore
    after: HeldOutScore
    seconds: float


def pretrain_critic(
    state: sao.SaoState,
    samples: Sequence[Sample],
    on_epoch: Callable[[int, HeldOutScore], None] = lambda epoch, score: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> PretrainReport:
    """Train the critic of `state` on the returns of `samples`; its weights and optimizer change, nothing else.

    `on_epoch` is told each finished epoch, from 1, and its score; `should_stop` ends it between two steps. If no epoch
    improves on the critic as it was, that critic is kept and `state.critic_pretrained` stays False. Raises
    TooFewTrajectoriesError.
    """
    if len(samples) < MIN_TRAJECTORIES:
        raise TooFewTrajectoriesError(
            f"there are {len(samples)} scored trajectories; pretraining the critic needs at least {MIN_TRAJECTORIES}"
        )
    settings = state.settings
    began = time.monotonic()
    rng = random.Random(settings.seed)
    order = rng.sample(range(len(samples)), len(samples))
    num_held_out = max(2, round(HELD_OUT_SHARE * len(samples)))
    held_out = [samples[index] for index in order[:num_held_out]]
    training = [samples[index] for index in order[num_held_out:]]

    before = best = held_out_score(state, held_out)
    kept = _critic_state(state)
    best_epoch = epoch = 0
    while epoch < settings.critic.pretrain_max_epochs and epoch - best_epoch < PATIENCE_EPOCHS:
        rng.shuffle(training)
        if not _epoch(state, training, should_stop):
            break
        epoch += 1
        score = held_out_score(state, held_out)
        on_epoch(epoch, score)
        if score.value_loss < best.value_loss:
            best, best_epoch, kept = score, epoch, _critic_state(state)
    load_critic_state(state, kept)
    state.critic_pretrained = best_epoch > 0
    return PretrainReport(len(training), len(held_out), epoch, before, best, time.monotonic() - began)


def held_out_score(state: sao.SaoState, samples: Sequence[Sample]) -> HeldOutScore:
    """How well the critic predicts the returns of `samples` now."""
    pooled = ExplainedVariance(len(samples))
    batches = collate(samples, state.settings.micro_batch_tokens)
    num_generated = sum(sample.num_generated for sample in samples)
    loss = 0.0
    for sample, values_G in zip(samples, sao.values_of(state.critic, batches, samples, state.settings), strict=True):
        returns_G = discounted_sums(sample.rewards_G, state.settings.gamma)
        pooled.add(returns_G, values_G)
        loss += float(value_loss(values_G, returns_G, num_generated))
    return HeldOutScore(loss, pooled.value())


def write(directory: Path, state: sao.SaoState, identity: str) -> Path:
    """Write the pretrained critic durably to `directory`. Raises CheckpointWriteError."""
    with durable_directory(directory) as partial:
        torch.save(_critic_state(state) | {"identity": identity, "gamma": state.settings.gamma}, partial / FILE)
    return directory / FILE


def load(directory: Path, state: sao.SaoState, identity: str) -> str | None:
    """Give `state` the critic that was pretrained for this starting policy; returns why not, or None if it has it now.

    A critic of another starting policy, of another discount or of other critic settings is left alone.
    """
    path = directory / FILE
    try:
        saved = read_tensors(path)
    except UnreadableFileError as error:
        return str(error)
    if saved["identity"] != identity:
        return f"{path} was pretrained for another starting policy"
    if saved["gamma"] != state.settings.gamma:
        return f"{path} was pretrained at learner.gamma {saved['gamma']}, not {state.settings.gamma}"
    shapes = {name: tuple(value.shape) for name, value in _critic_state(state)["critic"].items()}
    if {name: tuple(value.shape) for name, value in saved["critic"].items()} != shapes:
        return f"{path} was pretrained with other learner.critic settings"
    load_critic_state(state, saved)
    state.critic_pretrained = True
    return None


def _epoch(state: sao.SaoState, training: Sequence[Sample], should_stop: Callable[[], bool]) -> bool:
    """One pass over `training` in batches; False if told to stop before its end."""
    for start in range(0, len(training), state.settings.batch_size):
        if should_stop():
            return False
        _step(state, training[start : start + state.settings.batch_size])
    return True


def _step(state: sao.SaoState, samples: Sequence[Sample]) -> None:
    batches = collate(samples, state.settings.micro_batch_tokens)
    returns = [discounted_sums(sample.rewards_G, state.settings.gamma) for sample in samples]
    sao.critic_step(state, batches, returns, sum(sample.num_generated for sample in samples))


def _critic_state(state: sao.SaoState) -> dict[str, Any]:
    """Copies of what trains in the critic, and its optimizer's moments."""
    named = {name: value.detach().clone() for name, value in state.critic.named_parameters() if value.requires_grad}
    moments = state.critic_optimizer.state_dict()
    copied = {
        index: {name: value.clone() for name, value in entry.items()} for index, entry in moments["state"].items()
    }
    return {"critic": named, "optimizer": moments | {"state": copied}}


def load_critic_state(state: sao.SaoState, saved: dict[str, Any]) -> None:
    """Put the weights and moments of `_critic_state` back, at the learning rate of the settings."""
    state.critic.load_state_dict(saved["critic"], strict=False)
    if saved["optimizer"]["state"]:
        state.critic_optimizer.load_state_dict(saved["optimizer"])
    else:
        state.critic_optimizer = state.make_critic_optimizer()
    for group in state.critic_optimizer.param_groups:
        group["lr"] = state.settings.critic.learning_rate
    for parameter in trainable(state.critic):
        parameter.grad = None
