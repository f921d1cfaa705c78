"""The three append-only status logs. The row with the greatest id of a subject is its current status."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from store.models import FeedbackStatusRow, PolicyStatusRow, TrajectoryStatusRow
from store.types import FeedbackStatus, PolicyStatus, TrajectoryStatus


def append_trajectory_status(
    session: Session, trajectory_id: str, status: TrajectoryStatus, reason: str | None, at: datetime
) -> None:
    """Say what became of a trajectory."""
    values = {"trajectory_id": trajectory_id, "status": status.value, "reason": reason, "at": at}
    session.execute(insert(TrajectoryStatusRow), values)


def trajectory_status(session: Session, trajectory_id: str) -> tuple[TrajectoryStatus, str | None] | None:
    """Current status and its reason, or None for an unknown trajectory."""
    row = session.execute(
        select(TrajectoryStatusRow.status, TrajectoryStatusRow.reason)
        .where(TrajectoryStatusRow.trajectory_id == trajectory_id)
        .order_by(TrajectoryStatusRow.id.desc())
        .limit(1)
    ).one_or_none()
    return None if row is None else (TrajectoryStatus(row.status), row.reason)


def append_feedback_status(
    session: Session,
    feedback_ids: Iterable[str],
    status: FeedbackStatus,
    reason: str | None,
    at: datetime,
    *,
    step: int | None = None,
) -> None:
    """Say what became of some feedback; `step` is the learner update that consumed it."""
    rows: list[dict[str, Any]] = [
        {"feedback_id": feedback_id, "status": status.value, "reason": reason, "at": at, "step": step}
        for feedback_id in feedback_ids
    ]
    if rows:
        session.execute(insert(FeedbackStatusRow), rows)


def append_policy_status(
    session: Session, version: int, status: PolicyStatus, reason: str | None, at: datetime
) -> None:
    """Say what became of a policy."""
    session.execute(insert(PolicyStatusRow), {"version": version, "status": status.value, "reason": reason, "at": at})
