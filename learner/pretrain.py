"""Value pretraining: the critic learns the returns of the starting policy before the first update (SAO.md section 4).

    split by trajectory -> epochs of critic steps -> held-out explained variance -> stop early, best weights back

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
from learner.metrics import ExplainedVariance
from learner.models import trainable
from store.types import TidelineError

HELD_OUT_SHARE = 0.2
PATIENCE_EPOCHS = 2
"""Epochs without a better held-out explained variance after which it stops."""
MIN_TRAJECTORIES = 20
"""Fewer leave too few to hold out."""
FILE = "critic.pt"


class TooFewTrajectoriesError(TidelineError, ValueError):
    """There are not enough scored trajectories to train on some and hold out others."""


@dataclass(frozen=True, slots=True)
class PretrainReport:
    """What pretraining came to. Explained variances are over held-out trajectories, None where returns hardly vary."""

    num_trained: int
    num_held_out: int
    num_epochs: int
    explained_variance_before: float | None
    explained_variance: float | None
    seconds: float


def pretrain_critic(
    state: sao.SaoState,
    samples: Sequence[Sample],
    on_epoch: Callable[[int, float | None], None] = lambda epoch, explained: None,
) -> PretrainReport:
    """Train the critic of `state` on the returns of `samples`; its weights and optimizer change, nothing else.

    `on_epoch` is told each finished epoch, from 1, and the held-out explained variance after it. If no epoch improves
    on the critic as it was, that critic is kept. Raises TooFewTrajectoriesError.
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

    before = best = held_out_explained_variance(state, held_out)
    kept = _critic_state(state)
    best_epoch = epoch = 0
    while epoch < settings.critic.pretrain_max_epochs and epoch - best_epoch < PATIENCE_EPOCHS:
        epoch += 1
        rng.shuffle(training)
        for start in range(0, len(training), settings.batch_size):
            _step(state, training[start : start + settings.batch_size])
        explained = held_out_explained_variance(state, held_out)
        on_epoch(epoch, explained)
        if explained is not None and (best is None or explained > best):
            best, best_epoch, kept = explained, epoch, _critic_state(state)
    load_critic_state(state, kept)
    state.critic_pretrained = best_epoch > 0
    return PretrainReport(len(training), len(held_out), epoch, before, best, time.monotonic() - began)


def held_out_explained_variance(state: sao.SaoState, samples: Sequence[Sample]) -> float | None:
    """1 - Var(R - V) / Var(R) over the tokens of `samples`, as the critic values them now."""
    pooled = ExplainedVariance(len(samples))
    batches = collate(samples, state.settings.micro_batch_tokens)
    for sample, values_G in zip(samples, sao.values_of(state.critic, batches, samples, state.settings), strict=True):
        pooled.add(discounted_sums(sample.rewards_G, state.settings.gamma), values_G)
    return pooled.value()


def write(directory: Path, state: sao.SaoState, identity: str) -> Path:
    """Write the pretrained critic durably to `directory`. Raises CheckpointWriteError."""
    with durable_directory(directory) as partial:
        torch.save(_critic_state(state) | {"identity": identity}, partial / FILE)
    return directory / FILE


def load(directory: Path, state: sao.SaoState, identity: str) -> str | None:
    """Give `state` the critic that was pretrained for this starting policy; returns why not, or None if it has it now.

    A critic of another starting policy or of other critic settings is left alone.
    """
    path = directory / FILE
    try:
        saved = read_tensors(path)
    except UnreadableFileError as error:
        return str(error)
    if saved["identity"] != identity:
        return f"{path} was pretrained for another starting policy"
    shapes = {name: tuple(value.shape) for name, value in _critic_state(state)["critic"].items()}
    if {name: tuple(value.shape) for name, value in saved["critic"].items()} != shapes:
        return f"{path} was pretrained with other learner.critic settings"
    load_critic_state(state, saved)
    state.critic_pretrained = True
    return None


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
