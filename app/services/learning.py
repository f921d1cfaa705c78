"""How learning goes, put together from what the learner and the engine have written to the store.

Invariant: everything here is read in one transaction, so the numbers of one answer belong to one moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from store import policies, queue, steps, workers
from store.types import JsonObject, PolicyRecord, StepRecord, WorkerRecord

STOPPED = "stopped"
"""State of a worker that is not there, or whose lease has run out without a sign of life."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as seen from outside: `state` is its own word for what it does, `stopped` if it is gone."""

    state: str
    heartbeat_age_seconds: float | None
    details: Mapping[str, Any]


def view_worker(record: WorkerRecord | None, now: datetime) -> WorkerView:
    """A worker at `now`."""
    if record is None:
        return WorkerView(STOPPED, None, {})
    age = (now - record.heartbeat_at).total_seconds()
    alive = record.lease_expires_at > now
    return WorkerView(str(record.state.get("state", "running")) if alive else STOPPED, age, record.state)


def describe_step(step: StepRecord) -> JsonObject:
    """One learner update as JSON."""
    return {
        "step": step.step,
        "version": step.version,
        "parent_version": step.parent_version,
        "kind": step.kind,
        "event": step.event,
        "started_at": step.started_at,
        "finished_at": step.finished_at,
        "metrics": step.metrics,
    }


def describe_policy(policy: PolicyRecord) -> JsonObject:
    """One policy version as JSON."""
    return {
        "version": policy.version,
        "parent_version": policy.parent_version,
        "status": policy.status.value,
        "event": policy.event,
        "created_at": policy.created_at,
        "activated_at": policy.activated_at,
        "metrics": policy.metrics,
    }


def learning_snapshot(session: Session, now: datetime) -> JsonObject:
    """The answer of GET /v1/learning.

    `version` is the policy being served. `num_updates` counts the steps that made a policy; critic warm-up and
    skipped steps are in `num_steps` only. Times are seconds.
    """
    learner = view_worker(workers.get(session, "learner"), now)
    engine = view_worker(workers.get(session, "engine"), now)
    active = policies.active(session)
    newest = policies.newest(session)
    stats = queue.stats(session, now)
    last = steps.latest(session)
    oldest_age = None if stats.oldest_ready_at is None else (now - stats.oldest_ready_at).total_seconds()
    metrics: JsonObject = {} if last is None else last.metrics
    return {
        "state": learner.state,
        "version": None if active is None else active.version,
        "newest_version": None if newest is None else newest.version,
        "num_updates": 0 if newest is None else newest.version,
        "num_steps": steps.count(session),
        "queue": {
            "num_ready": stats.num_ready,
            "num_leased": stats.num_leased,
            "oldest_age_seconds": oldest_age,
        },
        "last_update": None if last is None else describe_step(last),
        "explained_variance": metrics.get("explained_variance"),
        "kept_fraction": metrics.get("kept_fraction"),
        "drift": {"event": None if last is None else last.event},
        "feedback_to_serving_seconds": _feedback_to_serving_seconds(active, learner),
        "learner": {"heartbeat_age_seconds": learner.heartbeat_age_seconds, **_json_state(learner)},
        "engine": {"heartbeat_age_seconds": engine.heartbeat_age_seconds, **_json_state(engine)},
    }


def _json_state(worker: WorkerView) -> JsonObject:
    return {**worker.details, "state": worker.state}


def _feedback_to_serving_seconds(active: PolicyRecord | None, learner: WorkerView) -> float | None:
    """Seconds from the oldest judgement of the served version's batch to its first answer, as the learner wrote it."""
    for source in (active.metrics if active is not None else {}, learner.details):
        value = source.get("feedback_to_serving_seconds")
        if value is not None:
            return float(value)
    return None
