"""Small records and short ways to store them, for tests of the store."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from store import feedback, policies, queue, steps, trajectories
from store.database import Database
from store.ids import new_id
from store.rewards import Aggregation
from store.types import (
    FeedbackReceipt,
    FeedbackStatus,
    FeedbackSubmission,
    JudgedTrajectory,
    PolicyRecord,
    PolicyStatus,
    StepRecord,
    Trajectory,
    VersionSpan,
)

NOON = datetime(2026, 7, 1, 12, 0, tzinfo=UTC)


def at(seconds: float) -> datetime:
    """That many seconds after noon."""
    return NOON + timedelta(seconds=seconds)


def make_trajectory(**changes: Any) -> Trajectory:
    """Two prompt tokens and three generated ones, of which the last is from version 1."""
    fields: dict[str, Any] = {
        "id": new_id(),
        "created_at": NOON,
        "token_ids": np.array([5, 6, 7, 8, 9], dtype=np.int32),
        "loss_mask": np.array([0, 0, 1, 1, 1], dtype=np.uint8),
        "behaviour_logprobs": np.array([-0.5, -1.25, -2.0], dtype=np.float32),
        "version_spans": (VersionSpan(0, 0, 2), VersionSpan(1, 2, 3)),
        "temperature": 0.7,
        "finish_reason": "stop",
        "messages": [{"role": "user", "content": "hello"}],
        "text": "ahoy",
        "admitted_version": 0,
        "trainable": True,
    }
    return Trajectory(**(fields | changes))


def store_trajectory(database: Database, **changes: Any) -> str:
    """The id of a freshly stored trajectory."""
    trajectory = make_trajectory(**changes)
    database.write(lambda session: trajectories.insert(session, trajectory))
    return trajectory.id


def make_submission(trajectory_id: str | None, reward: float | None = 1.0, **changes: Any) -> FeedbackSubmission:
    """A reward for that trajectory (or a comment, with reward None)."""
    fields: dict[str, Any] = {
        "trajectory_id": trajectory_id,
        "episode_id": None,
        "kind": "comment" if reward is None else "reward",
        "reward": reward,
        "content": {"reward": reward},
    }
    return FeedbackSubmission(**(fields | changes))


def judge(
    database: Database,
    trajectory_id: str | None,
    reward: float | None = 1.0,
    *,
    aggregation: Aggregation = "priority",
    now: datetime = NOON,
    **changes: Any,
) -> FeedbackReceipt:
    """Submit a reward."""
    submission = make_submission(trajectory_id, reward, **changes)
    return database.write(lambda session: feedback.submit(session, submission, aggregation, now=now))


def feedback_status(database: Database, feedback_id: str) -> FeedbackStatus:
    """What has become of a feedback."""
    life = database.read(lambda session: feedback.get(session, feedback_id))
    assert life is not None
    return life.status


def claim(
    database: Database, owner: str, limit: int = 100, *, lease_seconds: float = 60, now: datetime = NOON
) -> list[JudgedTrajectory]:
    """Claim ready trajectories."""
    return database.write(lambda session: queue.claim(session, owner, limit, lease_seconds, now))


def store_starting_policy(database: Database) -> None:
    """Policy 0, active."""
    policy = make_policy(0, status=PolicyStatus.ACTIVE, parent_version=None)
    database.write(lambda session: policies.insert(session, policy))


def make_policy(version: int, **changes: Any) -> PolicyRecord:
    """A staged policy on top of the version before."""
    fields: dict[str, Any] = {
        "version": version,
        "parent_version": version - 1,
        "status": PolicyStatus.STAGED,
        "path": f"policies/v{version:06d}",
        "created_at": NOON,
    }
    return PolicyRecord(**(fields | changes))


def make_step(step: int, version: int | None = None, **changes: Any) -> StepRecord:
    """An update on top of policy 0."""
    fields: dict[str, Any] = {
        "step": step,
        "version": version,
        "parent_version": 0,
        "kind": "critic_warmup" if version is None else "policy",
        "started_at": NOON,
        "finished_at": at(9),
        "metrics": {"reward_mean": 0.5},
    }
    return StepRecord(**(fields | changes))


def record(
    database: Database,
    step: StepRecord,
    policy: PolicyRecord | None,
    owner: str,
    consumed: list[JudgedTrajectory],
    dropped: list[tuple[str, str]] | None = None,
) -> None:
    """Record a learner update."""
    database.write(lambda session: steps.record(session, step, policy, owner, consumed, dropped or [], at(10)))
