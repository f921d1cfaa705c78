"""The asynchronous SAO loop, as the algorithm reads: claim, train, checkpoint, record, publish, activate.

    claimed -> trained (critic, advantages, policy: sao.update) -> checkpointed -> recorded -> published -> active

Invariant: a crash between any two of these leaves either the version before or the new one. A step is recorded only
once its checkpoint is durable, in one transaction with the trajectories it consumed, so none is trained twice; and it
is published only once it is recorded, so nothing is served that the store does not know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
import torch

from app.inference.protocol import EngineUnavailableError, SwapError, SwapReport, WeightPublisher
from learner import checkpoint, pretrain, publish, sao
from learner.collate import Sample, to_sample
from learner.faults import reach
from learner.scored import NothingToServeError, policy_identity, pretrained_directory, read_store, starting_policy
from store import policies, queue, steps, workers
from store.database import Database
from store.settings import Settings, policy_directory_name
from store.types import (
    JudgedTrajectory,
    PolicyRecord,
    PolicyStatus,
    StepRecord,
    TidelineError,
    TrajectoryInvariantError,
)

POLL_SECONDS = 0.2
PUBLISH_RETRY_SECONDS = 1.0
STALE_ENOUGH_TO_CHECK_VERSIONS = 2
"""Trajectories at least this stale are scored once more before training, to drop what the trust region rejects."""

log = structlog.get_logger("tideline.learner")


class UnsupportedAlgorithmError(TidelineError, ValueError):
    """The algorithm needs what live traffic does not give."""


@dataclass(frozen=True, slots=True)
class ClaimedBatch:
    """Trajectories this learner holds the lease of, with their tensors, and those that it refuses and why."""

    judged: tuple[JudgedTrajectory, ...]
    samples: tuple[Sample, ...]
    dropped: tuple[tuple[str, str], ...]


class Learner:
    """One learner: its state, its database, and the engine it publishes to.

    `should_stop` ends the loop between steps; `on_state` is told what it does, as a flat dictionary of plain values.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        publisher: WeightPublisher,
        owner: str,
        should_stop: Callable[[], bool],
        on_state: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self.settings = settings
        self.database = database
        self.publisher = publisher
        self.owner = owner
        self.should_stop = should_stop
        self.on_state = on_state
        self.checkpoints_dir = settings.data_dir.resolve() / "checkpoints"
        self.start_directory = starting_policy(database)
        self.probe_tokens = publish.probe_tokens(self.start_directory, min(64, settings.engine.max_model_len - 1))
        self.probe_dtype = torch.bfloat16 if settings.engine.dtype == "bfloat16" else torch.float32
        self.state = sao.SaoState(self.start_directory, settings.learner)
        if self.state.algorithm.needs_groups:
            raise UnsupportedAlgorithmError(
                f"learner.algorithm: {settings.learner.algorithm} compares several answers to one prompt, and live "
                "traffic asks once; use it in `tideline bench sao`"
            )
        self.version = 0
        self.restore()

    def run(self) -> None:
        """Learn until `should_stop`. Raises the store's errors and CheckpointWriteError; the leases are given back."""
        try:
            self.publish_if_staged()
            while not self.should_stop():
                batch = self.claim_batch()
                if batch is None:
                    self.on_state({"state": "waiting" if self.settings.learner.enabled else "paused"})
                    time.sleep(POLL_SECONDS)
                    continue
                self.step(batch)
        finally:
            self.database.write(lambda session: queue.release(session, self.owner))

    def pretrain_critic(self) -> None:
        """Before the first update: pretrain the critic if enough judged trajectories of the starting policy wait.

        They are only read, and none is claimed yet, so a crash in the middle loses nothing but the time, and what is
        judged meanwhile counts. With too few that can be trained on, learning begins with the critic's warm-up.
        """
        wanted = self.settings.learner.critic.pretrain_min_trajectories
        if not self.state.algorithm.uses_critic or self.state.critic_pretrained or wanted == 0:
            return
        if self.database.read(lambda session: queue.count_judged_by_version(session, 0)) < wanted:
            return
        self.on_state({"state": "pretraining the critic"})
        try:
            report = pretrain.pretrain_critic(
                self.state,
                read_store(self.database),
                lambda epoch, _: self.on_state({"state": f"pretraining the critic, epoch {epoch}"}),
                self.should_stop,
            )
        except pretrain.TooFewTrajectoriesError as error:
            log.warning("critic not pretrained", reason=str(error))
            return
        log.info(
            "critic pretrained" if self.state.critic_pretrained else "critic left as it was",
            trajectories=report.num_trained,
            epochs=report.num_epochs,
            held_out_value_loss=report.after.value_loss,
            held_out_explained_variance=report.after.explained_variance,
        )

    def step(self, batch: ClaimedBatch) -> None:
        """One update over a claimed batch, made durable, recorded and served."""
        started_at, began = datetime.now(UTC), time.monotonic()
        parent = self.version
        reach("claimed")
        report = sao.update(self.state, batch.samples, lambda part: self.on_state({"state": f"training {part}"}))
        reach("trained")
        number = self.database.read(_next_step)
        policy = self._next_policy(started_at) if report.changed_policy else None
        if policy is not None and report.kind == sao.RETURN_TO_START:
            self.state.floor_version = policy.version
            policy = replace(policy, event=sao.RETURN_TO_START)
        self.on_state({"state": "writing checkpoint"})
        checkpoint_began = time.monotonic()
        if policy is not None:
            publish.write_policy(self.state.policy, self.start_directory, Path(policy.path))
        checkpoint.write(
            self.checkpoints_dir, number, sao.state_dict(self.state), self.settings.model_dump_json(indent=2)
        )
        reach("checkpointed")
        metrics = report.metrics | batch_metrics(batch, parent, started_at)
        metrics["checkpoint_seconds"] = time.monotonic() - checkpoint_began
        metrics["step_seconds"] = time.monotonic() - began
        record = StepRecord(
            step=number,
            version=None if policy is None else policy.version,
            parent_version=parent,
            kind=report.kind,
            started_at=started_at,
            finished_at=datetime.now(UTC),
            metrics=metrics,
            event=None if policy is None else policy.event,
        )
        self.database.write(
            lambda session: steps.record(
                session, record, policy, self.owner, batch.judged, batch.dropped, datetime.now(UTC)
            )
        )
        reach("recorded")
        self.version = parent if policy is None else policy.version
        log.info("step", step=number, kind=report.kind, version=record.version, reward=metrics["reward_mean"])
        if policy is not None:
            self.publish_if_staged(oldest_ready_at=min(each.ready_at for each in batch.judged))
        self.prune()

    def claim_batch(self) -> ClaimedBatch | None:
        """Claim one batch, or None while there are too few judged trajectories that have not waited long enough.

        Before the first batch is claimed the critic may be pretrained.
        """
        settings = self.settings.learner
        if not settings.enabled:
            return None
        now = datetime.now(UTC)
        stats = self.database.read(lambda session: queue.stats(session, now))
        waited = stats.oldest_ready_at is not None and (
            (now - stats.oldest_ready_at).total_seconds() >= settings.max_wait_seconds
        )
        wanted = settings.min_batch_size if waited else settings.batch_size
        if stats.num_ready < wanted:
            return None
        if self.state.num_updates == 0:
            self.pretrain_critic()
            if self.should_stop():
                return None
        claimed_at = datetime.now(UTC)  # pretraining may have taken longer than a lease lasts
        claimed = self.database.write(
            lambda session: queue.claim(session, self.owner, settings.batch_size, settings.lease_seconds, claimed_at)
        )
        batch = self._without_stale(claimed)
        if len(batch.samples) >= wanted:
            return batch
        # Too few are left to train on: what is stale goes now, the rest waits for more.
        for trajectory_id, reason in batch.dropped:
            self._drop(trajectory_id, reason)
        self.database.write(lambda session: queue.release(session, self.owner))
        return None

    def publish_if_staged(self, oldest_ready_at: datetime | None = None) -> None:
        """Swap the newest recorded policy into serving if it is not served yet, waiting for an engine if need be.

        A swap that fails is final for its version: it is rejected, the engine is asked to restart on the active one,
        and learning goes on from there.
        """
        newest = self.database.read(policies.newest)
        if newest is None or newest.status is not PolicyStatus.STAGED:
            return
        probe = publish.make_probe(self.state.policy, *self.probe_tokens, self.probe_dtype)
        while not self.should_stop():
            self.on_state({"state": "publishing", "publishing_version": newest.version})
            engine = self.database.read(lambda session: workers.get(session, "engine"))
            if engine is not None and engine.restart_requested:
                time.sleep(PUBLISH_RETRY_SECONDS)  # what answers until then holds weights that were refused
                continue
            try:
                swap = self.publisher.publish(Path(newest.path), newest.version, probe)
            except EngineUnavailableError as error:
                log.warning("no engine to publish to", version=newest.version, error=str(error))
                time.sleep(PUBLISH_RETRY_SECONDS)
            except SwapError as error:
                self._reject(newest.version, str(error))
                return
            else:
                reach("published")
                self.database.write(lambda session: policies.activate(session, newest.version, datetime.now(UTC)))
                self._tell_swap(swap, oldest_ready_at)
                return

    def restore(self) -> None:
        """Take up the state of the newest policy that was not rejected.

        Raises NothingToServeError, CheckpointMissingError and CheckpointMismatchError.
        """
        newest = self.database.read(policies.newest)
        if newest is None:
            raise NothingToServeError("every policy has been rejected, the first one too")
        number = self.database.read(lambda session: steps.newest_of(session, newest.version))
        if number is not None:
            sao.load_state_dict(self.state, checkpoint.read(self.checkpoints_dir, number))
        else:
            if self.state.num_updates > 0:
                self.state = sao.SaoState(self.start_directory, self.settings.learner)
            self._take_pretrained_critic()
        self.version = newest.version

    def prune(self) -> None:
        """Delete checkpoints and policies that retention does not keep: never the active one, its parent, the start."""
        settings = self.settings.learner
        records = self.database.read(policies.list_all)
        active = next((each for each in records if each.status is PolicyStatus.ACTIVE), None)
        kept = {each.version for each in records if each.status is not PolicyStatus.REJECTED}
        versions = {0, *sorted(kept)[-settings.keep_policies :]}
        if active is not None:
            versions |= {active.version, *([] if active.parent_version is None else [active.parent_version])}
        names = {policy_directory_name(version) for version in versions}
        checkpoint.prune(self.settings.policies_dir, names)
        newest = self.database.read(steps.latest)
        if newest is None:
            return
        numbers = set(range(max(1, newest.step - settings.keep_checkpoints + 1), newest.step + 1))
        if active is not None:
            numbers |= {self.database.read(lambda session: steps.newest_of(session, active.version)) or newest.step}
        kept_names = {checkpoint.checkpoint_path(self.checkpoints_dir, number).name for number in numbers}
        checkpoint.prune(self.checkpoints_dir, kept_names)

    def _without_stale(self, claimed: Sequence[JudgedTrajectory]) -> ClaimedBatch:
        """Sort out what must not be trained: stale, from before a return to the start, or outside the trust region."""
        settings = self.settings.learner
        kept: list[tuple[JudgedTrajectory, Sample]] = []
        dropped: list[tuple[str, str]] = []
        for judged in claimed:
            oldest = judged.trajectory.oldest_version
            if not judged.feedback_ids:
                dropped.append((judged.trajectory.id, "nobody judged it"))
                continue
            try:
                sample = to_sample(judged.trajectory, judged.reward)
            except TrajectoryInvariantError as error:
                dropped.append((judged.trajectory.id, f"cannot be trained: {error}"))
                continue
            if oldest < self.state.floor_version:
                reason = f"sampled by version {oldest}, before the return to the start in {self.state.floor_version}"
                dropped.append((judged.trajectory.id, reason))
            elif self.version - oldest > settings.max_staleness_versions:
                dropped.append((judged.trajectory.id, f"stale: sampled by version {oldest}, trained is {self.version}"))
            else:
                kept.append((judged, sample))
        doubtful = [
            index
            for index, (judged, _) in enumerate(kept)
            if self.version - judged.trajectory.oldest_version >= STALE_ENOUGH_TO_CHECK_VERSIONS
        ]
        fractions = sao.kept_fractions(self.state, [kept[index][1] for index in doubtful]) if doubtful else []
        refused = {
            index: fraction
            for index, fraction in zip(doubtful, fractions, strict=True)
            if fraction < settings.min_kept_fraction
        }
        for index, fraction in refused.items():
            dropped.append((kept[index][0].trajectory.id, f"the trust region keeps only {fraction:.0%} of its tokens"))
        left = [pair for index, pair in enumerate(kept) if index not in refused]
        return ClaimedBatch(tuple(judged for judged, _ in left), tuple(sample for _, sample in left), tuple(dropped))

    def _drop(self, trajectory_id: str, reason: str) -> None:
        self.database.write(lambda session: queue.drop(session, self.owner, [trajectory_id], reason))

    def _next_policy(self, now: datetime) -> PolicyRecord:
        version = self.database.read(policies.next_version)
        return PolicyRecord(
            version=version,
            parent_version=self.version,
            status=PolicyStatus.STAGED,
            path=str(self.settings.policies_dir / policy_directory_name(version)),
            created_at=now,
        )

    def _reject(self, version: int, reason: str) -> None:
        log.error("policy rejected", version=version, reason=reason)
        now = datetime.now(UTC)
        self.database.write(lambda session: policies.reject(session, version, reason, now))
        self.database.write(lambda session: workers.request_restart(session, "engine", reason, now))
        self.restore()

    def _take_pretrained_critic(self) -> None:
        """Start with the critic that `tideline pretrain-critic` left, if it left one for this start."""
        directory = pretrained_directory(self.settings)
        if directory.is_dir():
            refused = pretrain.load(directory, self.state, policy_identity(self.start_directory))
            if refused is None:
                log.info("pretrained critic taken", directory=str(directory))
            else:
                log.warning("pretrained critic left alone", reason=refused)

    def _tell_swap(self, swap: SwapReport, oldest_ready_at: datetime | None) -> None:
        told: dict[str, Any] = {
            "state": "published",
            "served_version": swap.version,
            "swap_pause_seconds": swap.pause_seconds,
            "swap_seconds": swap.total_seconds,
            "probe_mean_absolute_difference": swap.probe_mean_absolute_difference,
        }
        if oldest_ready_at is not None:
            told["feedback_to_serving_seconds"] = (datetime.now(UTC) - oldest_ready_at).total_seconds()
        self.on_state(told)
        log.info("published", **{name: value for name, value in told.items() if name != "state"})


def batch_metrics(batch: ClaimedBatch, version: int, now: datetime) -> dict[str, float]:
    """Staleness in versions and queue age in seconds of what was trained, and how much was refused."""
    staleness = [version - each.trajectory.oldest_version for each in batch.judged]
    ages = [(now - each.ready_at).total_seconds() for each in batch.judged]
    return {
        "staleness_mean_versions": sum(staleness) / len(staleness),
        "staleness_max_versions": float(max(staleness)),
        "queue_age_mean_seconds": sum(ages) / len(ages),
        "queue_age_max_seconds": max(ages),
        "num_dropped": float(len(batch.dropped)),
    }


def _next_step(session: Any) -> int:
    latest = steps.latest(session)
    return 1 if latest is None else latest.step + 1
