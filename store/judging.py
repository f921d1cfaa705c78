"""From the feedback on one trajectory to the reward it will be trained with.

Invariant guarded here: a place in the training queue that nobody leases carries the aggregate of the feedback that
stands at that moment; one that is leased keeps what the learner was given, and is judged again when it comes back.

    judged while free       accepted -> queued                  an earlier judgement of that source -> superseded
    judged while leased     accepted, then late (trained without it), or queued (the lease ended)
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from store.models import FeedbackRow, FeedbackStatusRow, TrainingQueueRow
from store.rewards import Aggregation, Judgement, aggregate, counted
from store.statuses import append_feedback_status, append_trajectory_status
from store.types import FeedbackStatus, TrajectoryStatus


@dataclass(frozen=True, slots=True)
class OpenJudgement:
    """Feedback with a reward whose life has not ended: it is `accepted` or `queued`."""

    id: str
    source: str
    turn: int | None
    status: FeedbackStatus
    judgement: Judgement


def open_judgements(session: Session, trajectory_id: str) -> list[OpenJudgement]:
    """The open judgements of a trajectory in the order they arrived. The caller holds the lock of its place."""
    current = (
        select(FeedbackStatusRow.status)
        .where(FeedbackStatusRow.feedback_id == FeedbackRow.id)
        .order_by(FeedbackStatusRow.id.desc())
        .limit(1)
        .scalar_subquery()
    )
    rows = session.execute(
        select(
            FeedbackRow.id,
            FeedbackRow.source,
            FeedbackRow.turn,
            FeedbackRow.reward,
            FeedbackRow.source_kind,
            FeedbackRow.weight,
            current.label("status"),
        )
        .where(FeedbackRow.trajectory_id == trajectory_id, FeedbackRow.reward.is_not(None))
        .order_by(FeedbackRow.sequence)
    )
    open_statuses = (FeedbackStatus.ACCEPTED, FeedbackStatus.QUEUED)
    return [
        OpenJudgement(
            id=row.id,
            source=row.source,
            turn=row.turn,
            status=FeedbackStatus(row.status),
            judgement=Judgement(row.reward, row.source_kind, row.weight),
        )
        for row in rows
        if row.status in open_statuses
    ]


def rejudge(session: Session, place: TrainingQueueRow, at: datetime) -> None:
    """Bring a free place up to date with the feedback on its trajectory. The caller holds the lock of the place."""
    arrived = open_judgements(session, place.trajectory_id)
    newest = {(judgement.source, judgement.turn): judgement for judgement in arrived}
    standing = list(newest.values())
    for earlier in arrived:
        later = newest[earlier.source, earlier.turn]
        if later is not earlier:
            reason = f"{later.id} of the same source came later"
            append_feedback_status(session, [earlier.id], FeedbackStatus.SUPERSEDED, reason, at)
    mode = cast(Aggregation, place.aggregation)
    reward = aggregate([judgement.judgement for judgement in standing], mode)
    if reward is None:
        if place.reward is not None:
            reason = "no judgement of it stands any more"
            append_trajectory_status(session, place.trajectory_id, TrajectoryStatus.SAMPLED, reason, at)
        place.reward, place.ready_at, place.feedback_ids = None, None, []
        return
    if place.reward is None:
        append_trajectory_status(session, place.trajectory_id, TrajectoryStatus.READY, None, at)
        place.ready_at = at
    place.reward = reward
    place.feedback_ids = [standing[index].id for index in counted([each.judgement for each in standing], mode)]
    fresh = [judgement.id for judgement in standing if judgement.status is FeedbackStatus.ACCEPTED]
    append_feedback_status(session, fresh, FeedbackStatus.QUEUED, None, at)


def leave_queue(
    session: Session, place: TrainingQueueRow, status: TrajectoryStatus, reason: str | None, at: datetime
) -> None:
    """End the life of a trajectory that was not trained: its open judgements share its fate and its reason."""
    fate = FeedbackStatus.EXPIRED if status is TrajectoryStatus.EXPIRED else FeedbackStatus.DROPPED
    ids = [judgement.id for judgement in open_judgements(session, place.trajectory_id)]
    append_feedback_status(session, ids, fate, f"the trajectory was {status.value}: {reason}", at)
    append_trajectory_status(session, place.trajectory_id, status, reason, at)
    session.delete(place)


def leave_trained(session: Session, place: TrainingQueueRow, step: int, reason: str, at: datetime) -> None:
    """End the life of a trajectory that `step` trained, and of its open judgements.

    Those that the reward was made of are `trained`, those that arrived after the claim are `late`, and those that were
    known but did not count (outranked, or of weight 0) are `dropped`.
    """
    consumed = set(place.feedback_ids)
    left = [each for each in open_judgements(session, place.trajectory_id) if each.id not in consumed]
    append_feedback_status(session, place.feedback_ids, FeedbackStatus.TRAINED, reason, at, step=step)
    late = [each.id for each in left if each.status is FeedbackStatus.ACCEPTED]
    append_feedback_status(session, late, FeedbackStatus.LATE, "the trajectory was being trained when it came", at)
    outranked = [each.id for each in left if each.status is FeedbackStatus.QUEUED]
    uncounted = f"it did not count: aggregation is {place.aggregation}"
    append_feedback_status(session, outranked, FeedbackStatus.DROPPED, uncounted, at)
    append_trajectory_status(session, place.trajectory_id, TrajectoryStatus.TRAINED, reason, at)
    session.delete(place)
