"""The leased training queue.

Invariant guarded here: a judged trajectory is with at most one owner, and every way out of the queue (trained, dropped,
expired) writes the reason. A lease that ran out still counts until somebody claims: a slow learner whose work nobody
took over may finish it.

    unjudged --feedback--> ready --claim--> leased --steps.record--> trained
       |                     ^                |  +----drop---------> dropped
       +-> expired           +----------------+ release, or the lease ran out and was claimed again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import and_, case, func, or_, select, update
from sqlalchemy.orm import Session

from store.errors import LeaseLostError
from store.judging import leave_queue, rejudge
from store.models import TrainingQueueRow, TrajectoryRow
from store.trajectories import get_many
from store.types import JudgedTrajectory, QueueStats, Trajectory, TrajectoryStatus


def claim(session: Session, owner: str, limit: int, lease_seconds: float, now: datetime) -> list[JudgedTrajectory]:
    """Take up to `limit` ready trajectories, those that became ready first first, until `now + lease_seconds`.

    Trajectories whose lease ran out are claimable again, with the reward that their feedback amounts to now.
    """
    free = or_(TrainingQueueRow.lease_owner.is_(None), TrainingQueueRow.lease_expires_at <= now)
    places = session.scalars(
        select(TrainingQueueRow)
        .where(TrainingQueueRow.reward.is_not(None), free)
        .order_by(TrainingQueueRow.ready_at, TrainingQueueRow.trajectory_id)
        .limit(limit)
        .with_for_update(skip_locked=True)
        .execution_options(populate_existing=True)
    ).all()
    for place in places:
        if place.lease_owner is not None:
            _end_lease(session, place, now)
    claimed = [place for place in places if place.reward is not None]
    trajectories = get_many(session, [place.trajectory_id for place in claimed])
    judged = []
    for place in claimed:
        place.lease_owner = owner
        place.lease_expires_at = now + timedelta(seconds=lease_seconds)
        judged.append(_judged(place, trajectories))
    session.flush()
    return judged


def judged_by_version(session: Session, version: int, limit: int) -> list[JudgedTrajectory]:
    """Judged trajectories admitted under policy `version` that wait or are leased, oldest first; none is claimed."""
    places = session.scalars(
        select(TrainingQueueRow)
        .join(TrajectoryRow, TrajectoryRow.id == TrainingQueueRow.trajectory_id)
        .where(TrainingQueueRow.reward.is_not(None), TrajectoryRow.admitted_version == version)
        .order_by(TrainingQueueRow.ready_at, TrainingQueueRow.trajectory_id)
        .limit(limit)
    ).all()
    trajectories = get_many(session, [place.trajectory_id for place in places])
    return [_judged(place, trajectories) for place in places]


def count_judged_by_version(session: Session, version: int) -> int:
    """How many `judged_by_version` could give."""
    return (
        session.scalar(
            select(func.count())
            .select_from(TrainingQueueRow)
            .join(TrajectoryRow, TrajectoryRow.id == TrainingQueueRow.trajectory_id)
            .where(TrainingQueueRow.reward.is_not(None), TrajectoryRow.admitted_version == version)
        )
        or 0
    )


def renew(session: Session, owner: str, lease_seconds: float, now: datetime) -> int:
    """Extend every lease of `owner` until `now + lease_seconds`; returns how many it holds."""
    renewed = session.scalars(
        update(TrainingQueueRow)
        .where(TrainingQueueRow.lease_owner == owner)
        .values(lease_expires_at=now + timedelta(seconds=lease_seconds))
        .returning(TrainingQueueRow.trajectory_id)
    )
    return len(renewed.all())


def release(session: Session, owner: str, *, now: datetime | None = None) -> int:
    """Give back everything `owner` holds, judged again with the feedback that came meanwhile; returns how many."""
    places = session.scalars(
        select(TrainingQueueRow)
        .where(TrainingQueueRow.lease_owner == owner)
        .order_by(TrainingQueueRow.trajectory_id)
        .with_for_update()
        .execution_options(populate_existing=True)
    ).all()
    for place in places:
        _end_lease(session, place, now or datetime.now(UTC))
    session.flush()
    return len(places)


def drop(
    session: Session, owner: str, trajectory_ids: Sequence[str], reason: str, *, now: datetime | None = None
) -> None:
    """Take trajectories that `owner` holds out of the queue untrained. Raises LeaseLostError for one it has lost."""
    for place in held(session, owner, trajectory_ids).values():
        leave_queue(session, place, TrajectoryStatus.DROPPED, reason, now or datetime.now(UTC))
    session.flush()


def expire_unjudged(session: Session, before: datetime, now: datetime) -> int:
    """Expire the trajectories created before `before` that nobody judged; returns how many.

    Without a reward there is no training: an expired trajectory is never trained as zero.
    """
    places = session.scalars(
        select(TrainingQueueRow)
        .where(TrainingQueueRow.reward.is_(None), TrainingQueueRow.created_at < before)
        .order_by(TrainingQueueRow.trajectory_id)
        .with_for_update(skip_locked=True)
        .execution_options(populate_existing=True)
    ).all()
    for place in places:
        leave_queue(session, place, TrajectoryStatus.EXPIRED, "nobody judged it in time", now)
    session.flush()
    return len(places)


def stats(session: Session, now: datetime) -> QueueStats:
    """How many judged trajectories wait for a learner, how many one holds, and since when the first waits."""
    leased = and_(TrainingQueueRow.lease_owner.is_not(None), TrainingQueueRow.lease_expires_at > now)
    free_since = case((leased, None), else_=TrainingQueueRow.ready_at)
    num_judged, num_ready, oldest_ready_at = session.execute(
        select(func.count(), func.count(free_since), func.min(free_since)).where(TrainingQueueRow.reward.is_not(None))
    ).one()
    return QueueStats(num_ready=num_ready, num_leased=num_judged - num_ready, oldest_ready_at=oldest_ready_at)


def held(session: Session, owner: str, trajectory_ids: Sequence[str]) -> dict[str, TrainingQueueRow]:
    """Lock the places of these trajectories, in one order for all callers.

    Raises LeaseLostError if `owner` no longer holds one of them.
    """
    places = {
        place.trajectory_id: place
        for place in session.scalars(
            select(TrainingQueueRow)
            .where(TrainingQueueRow.trajectory_id.in_(trajectory_ids), TrainingQueueRow.lease_owner == owner)
            .order_by(TrainingQueueRow.trajectory_id)
            .with_for_update()
            .execution_options(populate_existing=True)
        )
    }
    for trajectory_id in trajectory_ids:
        if trajectory_id not in places:
            raise LeaseLostError(f"{owner} no longer holds trajectory {trajectory_id}")
    return places


def _judged(place: TrainingQueueRow, trajectories: Mapping[str, Trajectory]) -> JudgedTrajectory:
    assert place.reward is not None
    assert place.ready_at is not None
    return JudgedTrajectory(
        trajectory=trajectories[place.trajectory_id],
        reward=place.reward,
        ready_at=place.ready_at,
        feedback_ids=tuple(place.feedback_ids),
    )


def _end_lease(session: Session, place: TrainingQueueRow, at: datetime) -> None:
    place.lease_owner = None
    place.lease_expires_at = None
    rejudge(session, place, at)
