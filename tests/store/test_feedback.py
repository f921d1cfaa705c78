"""What becomes of feedback, as API.md promises it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from store import feedback, queue, trajectories
from store.database import Database
from store.errors import IdempotencyConflictError, UnknownTrajectoryError
from store.types import FeedbackReceipt, FeedbackStatus, TrajectoryStatus
from tests.store.records import (
    NOON,
    at,
    claim,
    feedback_status,
    judge,
    make_policy,
    make_step,
    make_submission,
    record,
    store_starting_policy,
    store_trajectory,
)


def test_reward_is_queued_and_makes_the_trajectory_ready(database: Database) -> None:
    trajectory_id = store_trajectory(database)
    receipt = judge(database, trajectory_id, 0.5, source="user:42", turn=2, weight=2.0, api_key_id="key", now=at(3))
    assert receipt == FeedbackReceipt(receipt.id, trajectory_id, FeedbackStatus.QUEUED, None, created=True)
    status = database.read(lambda session: trajectories.status(session, trajectory_id))
    assert status == (TrajectoryStatus.READY, None)
    life = database.read(lambda session: feedback.get(session, receipt.id))
    assert life is not None
    assert [event.status for event in life.history] == ["accepted", "queued"]
    assert {event.at for event in life.history} == {at(3)}
    assert (life.reward, life.source, life.turn, life.weight, life.api_key_id) == (0.5, "user:42", 2, 2.0, "key")
    assert (life.created_at, life.content, life.trained_in_version) == (at(3), {"reward": 0.5}, None)


def test_unknown_feedback_is_none(database: Database) -> None:
    assert database.read(lambda session: feedback.get(session, "nobody")) is None


def test_unknown_trajectory_is_refused_and_nothing_is_stored(database: Database) -> None:
    with pytest.raises(UnknownTrajectoryError, match="no trajectory nobody"):
        judge(database, "nobody", idempotency_key="key")
    trajectory_id = store_trajectory(database)
    assert judge(database, trajectory_id, idempotency_key="key").created


def test_episode_feedback_lands_on_its_newest_trajectory(database: Database) -> None:
    store_trajectory(database, episode_id="run")
    newest = store_trajectory(database, episode_id="run")
    store_trajectory(database, episode_id="another run")
    assert judge(database, None, episode_id="run").trajectory_id == newest
    with pytest.raises(UnknownTrajectoryError, match="episode never"):
        judge(database, None, episode_id="never")


def test_comment_alone_stays_accepted_and_trains_nothing(database: Database) -> None:
    trajectory_id = store_trajectory(database)
    assert judge(database, trajectory_id, None).status is FeedbackStatus.ACCEPTED
    assert claim(database, "learner") == []


def test_comment_does_not_withdraw_the_reward_of_its_source(database: Database) -> None:
    trajectory_id = store_trajectory(database)
    thumb = judge(database, trajectory_id, 1.0)
    judge(database, trajectory_id, None)
    assert feedback_status(database, thumb.id) is FeedbackStatus.QUEUED
    assert [each.reward for each in claim(database, "learner")] == [1.0]


def test_later_reward_of_the_same_source_supersedes_the_earlier(database: Database) -> None:
    trajectory_id = store_trajectory(database)
    first = judge(database, trajectory_id, 1.0, source="user:1", now=at(5))
    other = judge(database, trajectory_id, 1.0, source="user:2", now=at(6))
    # The order of arrival decides, not a clock that was set back in between.
    second = judge(database, trajectory_id, -1.0, source="user:1", now=at(1))
    life = database.read(lambda session: feedback.get(session, first.id))
    assert life is not None
    assert life.status is FeedbackStatus.SUPERSEDED
    assert second.id in (life.reason or "")
    [judged] = claim(database, "learner")
    assert judged.reward == 0.0
    assert set(judged.feedback_ids) == {other.id, second.id}


def test_rewards_for_different_turns_stand_beside_each_other(database: Database) -> None:
    trajectory_id = store_trajectory(database)
    first = judge(database, trajectory_id, 1.0, turn=0)
    second = judge(database, trajectory_id, 0.0, turn=1)
    [judged] = claim(database, "learner")
    assert judged.reward == 0.5
    assert judged.feedback_ids == (first.id, second.id)


def test_only_the_feedback_that_counts_is_trained(database: Database) -> None:
    store_starting_policy(database)
    trajectory_id = store_trajectory(database)
    machine = judge(database, trajectory_id, -1.0, source="orm:style", source_kind="reward_model")
    human = judge(database, trajectory_id, 1.0, source="user:1")
    [judged] = claim(database, "learner")
    assert (judged.reward, judged.feedback_ids) == (1.0, (human.id,))
    record(database, make_step(1, 1), make_policy(1), "learner", [judged])
    assert feedback_status(database, human.id) is FeedbackStatus.TRAINED
    assert feedback_status(database, machine.id) is FeedbackStatus.DROPPED


def test_weight_of_zero_keeps_the_trajectory_waiting(database: Database) -> None:
    trajectory_id = store_trajectory(database)
    receipt = judge(database, trajectory_id, 1.0, weight=0.0, aggregation="weighted_mean")
    assert receipt.status is FeedbackStatus.ACCEPTED
    assert claim(database, "learner") == []
    database.write(lambda session: queue.expire_unjudged(session, at(1), at(2)))
    assert feedback_status(database, receipt.id) is FeedbackStatus.EXPIRED


def test_reward_for_what_is_never_trained_is_dropped_with_the_reason(database: Database) -> None:
    untrainable = store_trajectory(database, trainable=False, untrainable_reason="top_p is 0.9")
    receipt = judge(database, untrainable)
    assert receipt.status is FeedbackStatus.DROPPED
    assert receipt.reason == "the trajectory is untrainable: top_p is 0.9"
    quarantined = store_trajectory(database, version_spans=())
    assert judge(database, quarantined).status is FeedbackStatus.DROPPED
    expired = store_trajectory(database)
    database.write(lambda session: queue.expire_unjudged(session, at(1), at(2)))
    receipt = judge(database, expired)
    assert receipt.status is FeedbackStatus.DROPPED
    assert receipt.reason == "the trajectory is expired: nobody judged it in time"


def test_reward_for_a_trained_trajectory_is_late(database: Database) -> None:
    store_starting_policy(database)
    trajectory_id = store_trajectory(database)
    first = judge(database, trajectory_id)
    record(database, make_step(1, 1), make_policy(1), "learner", claim(database, "learner"))
    life = database.read(lambda session: feedback.get(session, first.id))
    assert life is not None
    assert (life.status, life.reason, life.trained_in_version) == (FeedbackStatus.TRAINED, "step 1 (policy)", 1)
    receipt = judge(database, trajectory_id, -1.0)
    assert (receipt.status, receipt.reason) == (FeedbackStatus.LATE, "the trajectory was trained already")
    assert feedback_status(database, first.id) is FeedbackStatus.TRAINED
    assert claim(database, "learner") == []


def test_reward_during_a_lease_waits_and_is_late_once_trained(database: Database) -> None:
    store_starting_policy(database)
    trajectory_id = store_trajectory(database)
    first = judge(database, trajectory_id, 1.0)
    claimed = claim(database, "learner")
    second = judge(database, trajectory_id, -1.0)
    assert second.status is FeedbackStatus.ACCEPTED
    assert feedback_status(database, first.id) is FeedbackStatus.QUEUED
    record(database, make_step(1, 1), make_policy(1), "learner", claimed)
    assert feedback_status(database, first.id) is FeedbackStatus.TRAINED
    assert feedback_status(database, second.id) is FeedbackStatus.LATE


def test_reward_during_a_lease_counts_when_the_lease_is_released(database: Database) -> None:
    trajectory_id = store_trajectory(database)
    first = judge(database, trajectory_id, 1.0)
    claim(database, "learner")
    second = judge(database, trajectory_id, -1.0)
    assert database.write(lambda session: queue.release(session, "learner", now=at(9))) == 1
    assert feedback_status(database, first.id) is FeedbackStatus.SUPERSEDED
    assert feedback_status(database, second.id) is FeedbackStatus.QUEUED
    [judged] = claim(database, "another")
    assert (judged.reward, judged.feedback_ids) == (-1.0, (second.id,))


def test_reward_during_a_lease_counts_when_the_lease_runs_out(database: Database) -> None:
    trajectory_id = store_trajectory(database)
    judge(database, trajectory_id, 1.0)
    claim(database, "learner", lease_seconds=60)
    second = judge(database, trajectory_id, -1.0)
    [judged] = claim(database, "another", now=at(60))
    assert (judged.reward, judged.feedback_ids) == (-1.0, (second.id,))


def test_repeated_key_returns_the_first_receipt_and_its_present_status(database: Database) -> None:
    trajectory_id = store_trajectory(database)
    first = judge(database, trajectory_id, 1.0, idempotency_key="key")
    again = judge(database, trajectory_id, 1.0, idempotency_key="key", now=at(5))
    assert again == FeedbackReceipt(first.id, trajectory_id, FeedbackStatus.QUEUED, None, created=False)
    judge(database, trajectory_id, -1.0)
    again = judge(database, trajectory_id, 1.0, idempotency_key="key")
    assert (again.id, again.status, again.created) == (first.id, FeedbackStatus.SUPERSEDED, False)


@pytest.mark.parametrize(
    "changes", [{"reward": 0.5}, {"source": "user:2"}, {"turn": 1}, {"weight": 2.0}, {"content": {"comment": "no"}}]
)
def test_repeated_key_with_other_content_is_a_conflict(database: Database, changes: dict[str, object]) -> None:
    trajectory_id = store_trajectory(database)
    judge(database, trajectory_id, 1.0, idempotency_key="key")
    with pytest.raises(IdempotencyConflictError, match="'key'"):
        judge(database, trajectory_id, **({"idempotency_key": "key"} | changes))  # type: ignore[arg-type]
    assert [each.reward for each in claim(database, "learner")] == [1.0]


def test_idempotency_keys_of_two_clients_do_not_collide(database: Database) -> None:
    trajectory_id = store_trajectory(database)
    first = judge(database, trajectory_id, 1.0, idempotency_key="key", api_key_id="a", source="a")
    second = judge(database, trajectory_id, 0.0, idempotency_key="key", api_key_id="b", source="b")
    assert second.created
    assert first.id != second.id


def test_concurrent_submits_with_one_key_store_one_feedback(database: Database) -> None:
    chosen = [store_trajectory(database) for _ in range(4)]

    def submit(index: int) -> str:
        submission = make_submission(chosen[index % 4], idempotency_key="key")
        try:
            return database.write(lambda session: feedback.submit(session, submission, "priority", now=NOON)).id
        except IdempotencyConflictError:
            return "conflict"

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(submit, range(16)))
    # Four trajectories compete for the key: one wins, its repeats see its id, the others conflict.
    assert len(set(outcomes) - {"conflict"}) == 1
    assert outcomes.count("conflict") == 12
    assert len(claim(database, "learner")) == 1


def test_concurrent_rewards_of_one_source_leave_one_standing(database: Database) -> None:
    trajectory_id = store_trajectory(database)

    def submit(index: int) -> FeedbackReceipt:
        return judge(database, trajectory_id, index / 16)

    with ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(submit, range(16)))
    statuses = [feedback_status(database, receipt.id) for receipt in receipts]
    assert statuses.count(FeedbackStatus.QUEUED) == 1
    assert statuses.count(FeedbackStatus.SUPERSEDED) == 15
    [judged] = claim(database, "learner")
    standing = statuses.index(FeedbackStatus.QUEUED)
    assert (judged.reward, judged.feedback_ids) == (standing / 16, (receipts[standing].id,))
