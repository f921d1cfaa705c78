"""Trajectories: written once, read many times.

Invariant guarded here: only a trajectory that passes `Trajectory.check` and can be trained gets a place in the training
queue. One whose arrays contradict each other is kept as it came, with status `quarantined` and the reason.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
from sqlalchemy import insert as sql_insert
from sqlalchemy import select
from sqlalchemy.orm import Session

from store.errors import DuplicateTrajectoryError
from store.models import TrainingQueueRow, TrajectoryRow
from store.statuses import append_trajectory_status, trajectory_status
from store.types import Trajectory, TrajectoryInvariantError, TrajectoryStatus, VersionSpan


def insert(session: Session, trajectory: Trajectory, *, api_key_id: str | None = None) -> TrajectoryStatus:
    """Store a trajectory and say how its life begins: sampled, untrainable or quarantined.

    A trajectory marked trainable from which nothing can be learned (no generated token, or temperature 0, which has no
    distribution to compare with) is stored as untrainable. Raises DuplicateTrajectoryError for a known id.
    """
    status, reason = _first_status(trajectory)
    trainable = status is TrajectoryStatus.SAMPLED
    if session.scalar(select(TrajectoryRow.id).where(TrajectoryRow.id == trajectory.id)) is not None:
        raise DuplicateTrajectoryError(f"trajectory {trajectory.id} is stored already")
    session.execute(sql_insert(TrajectoryRow), _to_values(trajectory, trainable, reason, api_key_id))
    append_trajectory_status(session, trajectory.id, status, reason, datetime.now(UTC))
    if trainable:
        place = {"trajectory_id": trajectory.id, "created_at": trajectory.created_at, "feedback_ids": []}
        session.execute(sql_insert(TrainingQueueRow), place)
    return status


def get(session: Session, trajectory_id: str) -> Trajectory | None:
    """The trajectory as it was stored, or None if there is none or its content was erased."""
    return get_many(session, [trajectory_id]).get(trajectory_id)


def get_many(session: Session, trajectory_ids: list[str]) -> dict[str, Trajectory]:
    """Trajectories by id; unknown and erased ones are left out."""
    rows = session.scalars(select(TrajectoryRow).where(TrajectoryRow.id.in_(trajectory_ids)))
    return {row.id: trajectory for row in rows if (trajectory := _from_row(row)) is not None}


def status(session: Session, trajectory_id: str) -> tuple[TrajectoryStatus, str | None] | None:
    """Current status and its reason, or None for an unknown trajectory."""
    return trajectory_status(session, trajectory_id)


def newest_of_episode(session: Session, episode_id: str) -> str | None:
    """The id of the episode's newest trajectory, or None for an unknown episode."""
    return session.scalar(
        select(TrajectoryRow.id)
        .where(TrajectoryRow.episode_id == episode_id)
        .order_by(TrajectoryRow.id.desc())
        .limit(1)
    )


def _first_status(trajectory: Trajectory) -> tuple[TrajectoryStatus, str | None]:
    try:
        trajectory.check()
    except TrajectoryInvariantError as error:
        return TrajectoryStatus.QUARANTINED, str(error)
    if not trajectory.trainable:
        return TrajectoryStatus.UNTRAINABLE, trajectory.untrainable_reason
    if trajectory.num_generated == 0:
        return TrajectoryStatus.UNTRAINABLE, "no token was generated"
    if trajectory.temperature == 0:
        return TrajectoryStatus.UNTRAINABLE, "sampled at temperature 0"
    return TrajectoryStatus.SAMPLED, None


def _to_values(trajectory: Trajectory, trainable: bool, reason: str | None, api_key_id: str | None) -> dict[str, Any]:
    return {
        "id": trajectory.id,
        "created_at": trajectory.created_at,
        "episode_id": trajectory.episode_id,
        "parent_trajectory_id": trajectory.parent_trajectory_id,
        "admitted_version": trajectory.admitted_version,
        "oldest_version": trajectory.oldest_version,
        # A quarantined mask may hold anything: its sum means nothing, its number of non-zero entries always fits.
        "num_generated": int(np.count_nonzero(trajectory.loss_mask)),
        "trainable": trainable,
        "untrainable_reason": reason,
        "finish_reason": trajectory.finish_reason,
        "temperature": trajectory.temperature,
        "api_key_id": api_key_id,
        "user": trajectory.user,
        "version_spans": [[span.version, span.start, span.end] for span in trajectory.version_spans],
        "sampling": trajectory.sampling,
        "request_metadata": trajectory.metadata,
        "messages": trajectory.messages,
        "text": trajectory.text,
        "token_ids": trajectory.token_ids,
        "loss_mask": trajectory.loss_mask,
        "behaviour_logprobs": trajectory.behaviour_logprobs,
    }


def _from_row(row: TrajectoryRow) -> Trajectory | None:
    if row.token_ids is None or row.loss_mask is None or row.behaviour_logprobs is None:
        return None
    return Trajectory(
        id=row.id,
        created_at=row.created_at,
        token_ids=row.token_ids,
        loss_mask=row.loss_mask,
        behaviour_logprobs=row.behaviour_logprobs,
        version_spans=tuple(VersionSpan(version, start, end) for version, start, end in row.version_spans),
        # SQLite keeps a NaN (only a quarantined trajectory has one) as NULL.
        temperature=float("nan") if row.temperature is None else row.temperature,
        finish_reason=row.finish_reason,
        messages=row.messages or [],
        text=row.text or "",
        admitted_version=row.admitted_version,
        trainable=row.trainable,
        untrainable_reason=row.untrainable_reason,
        sampling=row.sampling,
        metadata=row.request_metadata or {},
        episode_id=row.episode_id,
        parent_trajectory_id=row.parent_trajectory_id,
        user=row.user,
    )
