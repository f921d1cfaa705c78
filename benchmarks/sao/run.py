"""One run of the bench: sample with a stale policy, judge, update, record; the loop of live learning in process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.sao.lookup import LookupTask
from benchmarks.sao.rollouts import History, Sampler
from benchmarks.sao.tasks import Progress, StyleTask, Task
from benchmarks.sao.variants import GROUP_SIZE, VARIANTS, settings_of
from learner import sao
from learner.pretrain import pretrain_critic

TASKS: dict[str, Callable[[Path, Progress], Task]] = {"style": StyleTask, "lookup": LookupTask}
RECORDED = (
    "explained_variance",
    "value_loss",
    "critic_grad_norm",
    "policy_grad_norm",
    "kept_fraction",
    "rejected_low_fraction",
    "rejected_high_fraction",
    "effective_sample_size_fraction",
    "entropy",
    "kl_to_start",
    "advantage_rms",
    "generated_length_mean",
)
"""Metrics of an update that a run's CSV keeps."""


def silent(what: str, done: int, total: int) -> None:
    """Tell nobody."""


def run(
    data_dir: Path,
    task_name: str,
    variant_name: str,
    staleness: int,
    seed: int,
    num_updates: int,
    on_update: Callable[[int], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Train one policy for `num_updates` updates; one row for each.

    At staleness s > 0 a rollout begins under the policy of s versions ago and goes on under that of s // 2 versions
    ago after a swap in its middle. `reward` and `success` are means over the batch that the update trains on.
    """
    torch.set_num_threads(1)
    disable_progress_bar()
    variant = VARIANTS[variant_name]
    settings = settings_of(variant, task_name, seed)
    task = TASKS[task_name](data_dir, silent)
    rng = random.Random(f"bench:{seed}")
    sampler = Sampler(task.directory, task.max_model_len, seed)
    state = sao.SaoState(task.directory, settings)
    history = History(staleness)
    history.add(state.policy.state_dict())
    group_size = GROUP_SIZE if state.algorithm.needs_groups else 1
    if variant.num_pretraining:
        pretrain(state, sampler, task, rng, history, variant.num_pretraining)
    rows: list[dict[str, Any]] = []
    for update in range(num_updates):
        episodes = task.episodes(rng, settings.batch_size // group_size, group_size)
        ages = [staleness] if staleness == 0 else [staleness, staleness // 2]
        samples = sampler.play(episodes, [history.at_staleness(age) for age in ages])
        report = sao.update(state, samples)
        history.add(state.policy.state_dict())
        rows.append(
            {
                "update": update,
                "reward": report.metrics["reward_mean"],
                "success": sum(episode.succeeded for episode in episodes) / len(episodes),
                "kind": report.kind,
                **{name: report.metrics.get(name) for name in RECORDED},
            }
        )
        on_update(update + 1)
    return rows


def pretrain(
    state: sao.SaoState, sampler: Sampler, task: Task, rng: random.Random, history: History, num_rollouts: int
) -> None:
    """Pretrain the critic on scored rollouts of the starting policy."""
    episodes = task.episodes(rng, num_rollouts, 1)
    pretrain_critic(state, sampler.play(episodes, [history.at_staleness(0)]))
