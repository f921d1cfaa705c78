"""Feedback: stored once, decided on in the same transaction.

Invariant guarded here: an idempotency key names one feedback, whatever arrives at the same moment, and every feedback
has a status from the moment it exists.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from store.columns import dump_json
from store.errors import IdempotencyConflictError, UnknownTrajectoryError
from store.ids import new_id
from store.judging import rejudge
from store.models import FeedbackRow, FeedbackStatusRow, LearningStepRow, TrainingQueueRow
from store.rewards import Aggregation
from store.statuses import append_feedback_status, trajectory_status
from store.trajectories import newest_of_episode
from store.types import (
    FeedbackEvent,
    FeedbackLife,
    FeedbackReceipt,
    FeedbackStatus,
    FeedbackSubmission,
    TrajectoryStatus,
)


def submit(
    session: Session, submission: FeedbackSubmission, aggregation: Aggregation, *, now: datetime | None = None
) -> FeedbackReceipt:
    """Store a feedback and decide what becomes of it.

    With a reward it is `queued` if its trajectory can still be trained (`accepted` while the learner holds the
    trajectory), `late` if it was trained, `dropped` with the reason if it never will be. It supersedes the earlier
    judgement of the same source on the same turn. Without a reward (comment, correction) it stays `accepted`.

    Repeating an idempotency key with the same content returns the first receipt, `created` False. Raises
    UnknownTrajectoryError, and IdempotencyConflictError when the key came with other content.
    """
    at = now or datetime.now(UTC)
    if (earlier := _repeated(session, submission)) is not None:
        return earlier
    trajectory_id = _judged_trajectory(session, submission)
    # The lock comes before the insert: the order of arrival is the order in which the lock was held.
    place = _lock_place(session, trajectory_id)
    status, reason = _first_status(session, submission, trajectory_id, place)
    feedback_id = _insert(session, submission, trajectory_id, at)
    if feedback_id is None:
        earlier = _repeated(session, submission)
        if earlier is None:
            raise RuntimeError(f"idempotency key {submission.idempotency_key!r} is taken, but by no feedback")
        return earlier
    append_feedback_status(session, [feedback_id], status, reason, at)
    if place is not None and submission.reward is not None:
        place.aggregation = aggregation
        if place.lease_owner is None:
            rejudge(session, place, at)
            if place.reward is not None:
                # The newest judgement of a source always stands.
                status = FeedbackStatus.QUEUED
        session.flush()
    return FeedbackReceipt(feedback_id, trajectory_id, status, reason)


def get(session: Session, feedback_id: str) -> FeedbackLife | None:
    """A feedback with all that has become of it, or None if there is none."""
    row = session.scalar(select(FeedbackRow).where(FeedbackRow.id == feedback_id))
    if row is None:
        return None
    events = session.execute(
        select(FeedbackStatusRow.status, FeedbackStatusRow.reason, FeedbackStatusRow.at, LearningStepRow.version)
        .outerjoin(LearningStepRow, LearningStepRow.step == FeedbackStatusRow.step)
        .where(FeedbackStatusRow.feedback_id == feedback_id)
        .order_by(FeedbackStatusRow.id)
    ).all()
    history = tuple(FeedbackEvent(FeedbackStatus(event.status), event.reason, event.at) for event in events)
    return FeedbackLife(
        id=row.id,
        trajectory_id=row.trajectory_id,
        episode_id=row.episode_id,
        kind=row.kind,
        reward=row.reward,
        content=row.content,
        source=row.source,
        source_kind=row.source_kind,
        weight=row.weight,
        turn=row.turn,
        idempotency_key=row.idempotency_key,
        api_key_id=row.api_key_id,
        created_at=row.created_at,
        status=history[-1].status,
        reason=history[-1].reason,
        trained_in_version=events[-1].version,
        history=history,
    )


def _judged_trajectory(session: Session, submission: FeedbackSubmission) -> str:
    if submission.trajectory_id is not None:
        return submission.trajectory_id
    if submission.episode_id is None:
        raise ValueError("a feedback names a trajectory_id or an episode_id")
    newest = newest_of_episode(session, submission.episode_id)
    if newest is None:
        raise UnknownTrajectoryError(f"there is no trajectory of episode {submission.episode_id}")
    return newest


def _lock_place(session: Session, trajectory_id: str) -> TrainingQueueRow | None:
    return session.scalar(
        select(TrainingQueueRow)
        .where(TrainingQueueRow.trajectory_id == trajectory_id)
        .with_for_update()
        .execution_options(populate_existing=True)
    )


def _first_status(
    session: Session, submission: FeedbackSubmission, trajectory_id: str, place: TrainingQueueRow | None
) -> tuple[FeedbackStatus, str | None]:
    """How the life of this feedback begins. Raises UnknownTrajectoryError."""
    if place is None:
        current = trajectory_status(session, trajectory_id)
        if current is None:
            raise UnknownTrajectoryError(f"there is no trajectory {trajectory_id}")
        status, reason = current
        if submission.reward is None:
            return FeedbackStatus.ACCEPTED, None
        if status is TrajectoryStatus.TRAINED:
            return FeedbackStatus.LATE, "the trajectory was trained already"
        return FeedbackStatus.DROPPED, f"the trajectory is {status.value}" + (f": {reason}" if reason else "")
    if submission.reward is not None and place.lease_owner is not None:
        return FeedbackStatus.ACCEPTED, "the trajectory is in the batch being trained"
    return FeedbackStatus.ACCEPTED, None


def _insert(session: Session, submission: FeedbackSubmission, trajectory_id: str, at: datetime) -> str | None:
    """The new id, or None if the idempotency key was taken (by a transaction that has committed by now)."""
    values: dict[str, Any] = {
        "id": new_id(),
        "trajectory_id": trajectory_id,
        "episode_id": submission.episode_id,
        "kind": submission.kind,
        "reward": submission.reward,
        "content": submission.content,
        "source": submission.source,
        "source_kind": submission.source_kind,
        "weight": submission.weight,
        "turn": submission.turn,
        "idempotency_key": submission.idempotency_key,
        "idempotency_scope": _scope(submission),
        "content_digest": _digest(submission),
        "api_key_id": submission.api_key_id,
        "created_at": at,
    }
    # The databases spell this statement alike; SQLAlchemy has it once per dialect.
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    statement = insert(FeedbackRow).values(values)
    return session.scalar(
        statement.on_conflict_do_nothing(index_elements=["idempotency_scope", "idempotency_key"]).returning(
            FeedbackRow.id
        )
    )


def _repeated(session: Session, submission: FeedbackSubmission) -> FeedbackReceipt | None:
    """The receipt of the feedback that has this idempotency key, or None. Raises IdempotencyConflictError."""
    if submission.idempotency_key is None:
        return None
    row = session.execute(
        select(FeedbackRow.id, FeedbackRow.trajectory_id, FeedbackRow.content_digest).where(
            FeedbackRow.idempotency_scope == _scope(submission),
            FeedbackRow.idempotency_key == submission.idempotency_key,
        )
    ).one_or_none()
    if row is None:
        return None
    if row.content_digest != _digest(submission):
        raise IdempotencyConflictError(
            f"idempotency key {submission.idempotency_key!r} was used before with other content"
        )
    status, reason = _current(session, row.id)
    return FeedbackReceipt(row.id, row.trajectory_id, status, reason, created=False)


def _current(session: Session, feedback_id: str) -> tuple[FeedbackStatus, str | None]:
    row = session.execute(
        select(FeedbackStatusRow.status, FeedbackStatusRow.reason)
        .where(FeedbackStatusRow.feedback_id == feedback_id)
        .order_by(FeedbackStatusRow.id.desc())
        .limit(1)
    ).one()
    return FeedbackStatus(row.status), row.reason


def _scope(submission: FeedbackSubmission) -> str:
    """Keys of two clients must not collide; not NULL, because NULLs are all different to a unique constraint."""
    return submission.api_key_id or ""


def _digest(submission: FeedbackSubmission) -> str:
    content = {
        "trajectory_id": submission.trajectory_id,
        "episode_id": submission.episode_id,
        "kind": submission.kind,
        "reward": submission.reward,
        "content": json.loads(dump_json(submission.content)),
        "source": submission.source,
        "source_kind": submission.source_kind,
        "weight": submission.weight,
        "turn": submission.turn,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
