"""Learner updates, each committed whole.

Invariant guarded here: the step, the policy version it produced, the trajectories it consumed and the end of their
feedback appear together or not at all, and only while the learner still holds every one of those trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import and_, func, or_, select
from sqlalchemy import insert as sql_insert
from sqlalchemy.orm import Session

from store import policies
from store.errors import LeaseLostError
from store.judging import leave_queue, leave_trained
from store.models import LearningStepRow, StepTrajectoryRow
from store.queue import held
from store.types import JudgedTrajectory, PolicyRecord, StepRecord, TrajectoryStatus

FIRST_PASS = 0


def record(
    session: Session,
    step: StepRecord,
    policy: PolicyRecord | None,
    owner: str,
    consumed: Sequence[JudgedTrajectory],
    dropped: Sequence[tuple[str, str]],
    now: datetime,
) -> None:
    """Record one update: its metrics, its policy (None if it produced none), what it trained on and what it refused.

    `dropped` holds (trajectory id, reason). Raises LeaseLostError if `owner` no longer holds one of the trajectories
    as it was claimed, ValueError if step and policy disagree on the version, and IntegrityError if the step or one of
    its trajectories was recorded before; then nothing is written.
    """
    if step.version != (policy.version if policy is not None else None):
        raise ValueError(f"step {step.step} names version {step.version}, but its policy is {policy}")
    refused = dict(dropped)
    places = held(session, owner, [each.trajectory.id for each in consumed] + list(refused))
    for each in consumed:
        if tuple(places[each.trajectory.id].feedback_ids) != each.feedback_ids:
            raise LeaseLostError(f"trajectory {each.trajectory.id} was judged again since {owner} claimed it")
    if policy is not None:
        policies.insert(session, policy)
    session.execute(sql_insert(LearningStepRow), _to_values(step))
    rows: list[dict[str, Any]] = [
        {
            "trajectory_id": each.trajectory.id,
            "pass_index": FIRST_PASS,
            "step": step.step,
            "reward": each.reward,
            "feedback_ids": list(each.feedback_ids),
        }
        for each in consumed
    ]
    if rows:
        session.execute(sql_insert(StepTrajectoryRow), rows)
    reason = f"step {step.step} ({step.kind})"
    for each in consumed:
        leave_trained(session, places[each.trajectory.id], step.step, reason, now)
    for trajectory_id, why in refused.items():
        leave_queue(session, places[trajectory_id], TrajectoryStatus.DROPPED, why, now)
    session.flush()


def since(session: Session, step: int) -> list[StepRecord]:
    """The updates after update number `step`, the oldest first."""
    rows = session.scalars(select(LearningStepRow).where(LearningStepRow.step > step).order_by(LearningStepRow.step))
    return [_from_row(row) for row in rows]


def latest(session: Session) -> StepRecord | None:
    """The last update, or None before the first."""
    row = session.scalar(select(LearningStepRow).order_by(LearningStepRow.step.desc()).limit(1))
    return None if row is None else _from_row(row)


def newest_of(session: Session, version: int) -> int | None:
    """The last step whose training state belongs to `version`: the one that made it, or a critic-only one after it."""
    made_none = and_(LearningStepRow.version.is_(None), LearningStepRow.parent_version == version)
    return session.scalar(
        select(func.max(LearningStepRow.step)).where(or_(LearningStepRow.version == version, made_none))
    )


def count(session: Session) -> int:
    """How many updates there were."""
    return session.scalar(select(func.count()).select_from(LearningStepRow)) or 0


def trajectory_ids(session: Session, step: int) -> list[str]:
    """The trajectories that update number `step` consumed, in order of id."""
    return list(
        session.scalars(
            select(StepTrajectoryRow.trajectory_id)
            .where(StepTrajectoryRow.step == step)
            .order_by(StepTrajectoryRow.trajectory_id)
        )
    )


def _to_values(step: StepRecord) -> dict[str, Any]:
    return {
        "step": step.step,
        "version": step.version,
        "parent_version": step.parent_version,
        "kind": step.kind,
        "started_at": step.started_at,
        "finished_at": step.finished_at,
        "event": step.event,
        "metrics": step.metrics,
    }


def _from_row(row: LearningStepRow) -> StepRecord:
    return StepRecord(
        step=row.step,
        version=row.version,
        parent_version=row.parent_version,
        kind=row.kind,
        started_at=row.started_at,
        finished_at=row.finished_at,
        metrics=row.metrics,
        event=row.event,
    )
