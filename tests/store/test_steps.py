"""A learner update is recorded whole or not at all, and never twice for one trajectory."""

from __future__ import annotations

import dataclasses

import pytest
from sqlalchemy import func, insert, select
from sqlalchemy.exc import IntegrityError

from store import feedback, policies, queue, steps, trajectories
from store.database import Database
from store.errors import LeaseLostError
from store.models import Base, StepTrajectoryRow
from store.types import FeedbackStatus, PolicyStatus, TrajectoryStatus
from tests.store.records import (
    NOON,
    at,
    claim,
    feedback_status,
    judge,
    make_policy,
    make_step,
    record,
    store_starting_policy,
    store_trajectory,
)


def row_counts(database: Database) -> dict[str, int]:
    """How many rows each table has."""
    return database.read(
        lambda session: {
            name: session.scalar(select(func.count()).select_from(table)) or 0
            for name, table in Base.metadata.tables.items()
        }
    )


def test_record_links_policy_trajectories_and_feedback(database: Database) -> None:
    store_starting_policy(database)
    first, second, stale = (store_trajectory(database) for _ in range(3))
    receipts = [judge(database, each) for each in (first, second, stale)]
    claimed = {each.trajectory.id: each for each in claim(database, "learner")}
    step = make_step(1, 1, event="return_to_start", metrics={"explained_variance": float("nan"), "num_tokens": 6})
    consumed = [claimed[first], claimed[second]]
    record(database, step, make_policy(1), "learner", consumed, [(stale, "too stale")])

    [recorded] = database.read(lambda session: steps.since(session, 0))
    assert recorded == dataclasses.replace(step, metrics={"explained_variance": None, "num_tokens": 6})
    assert database.read(steps.latest) == recorded
    assert database.read(steps.count) == 1
    assert database.read(lambda session: steps.trajectory_ids(session, 1)) == sorted([first, second])
    policy = database.read(lambda session: policies.get(session, 1))
    assert policy is not None
    assert (policy.status, policy.parent_version) == (PolicyStatus.STAGED, 0)
    for trajectory_id in (first, second):
        status = database.read(lambda session, each=trajectory_id: trajectories.status(session, each))
        assert status == (TrajectoryStatus.TRAINED, "step 1 (policy)")
    status = database.read(lambda session: trajectories.status(session, stale))
    assert status == (TrajectoryStatus.DROPPED, "too stale")
    assert [feedback_status(database, each.id) for each in receipts] == ["trained", "trained", "dropped"]
    assert claim(database, "another", now=at(10_000)) == []


def test_step_without_a_policy_trains_in_no_version(database: Database) -> None:
    store_starting_policy(database)
    receipt = judge(database, store_trajectory(database))
    record(database, make_step(1), None, "learner", claim(database, "learner"))
    life = database.read(lambda session: feedback.get(session, receipt.id))
    assert life is not None
    assert (life.status, life.trained_in_version) == (FeedbackStatus.TRAINED, None)
    assert life.reason == "step 1 (critic_warmup)"


def test_steps_since_are_in_order(database: Database) -> None:
    store_starting_policy(database)
    assert database.read(steps.latest) is None
    for number in (1, 2, 3):
        record(database, make_step(number), None, "learner", [])
    assert [each.step for each in database.read(lambda session: steps.since(session, 1))] == [2, 3]
    assert database.read(steps.count) == 3


def test_exception_after_record_leaves_nothing(database: Database) -> None:
    store_starting_policy(database)
    judge(database, store_trajectory(database))
    claimed = claim(database, "learner")
    before = row_counts(database)

    class Crash(Exception):
        pass

    def crash_late(session: object) -> None:
        steps.record(session, make_step(1, 1), make_policy(1), "learner", claimed, [], NOON)  # type: ignore[arg-type]
        raise Crash

    with pytest.raises(Crash):
        database.write(crash_late)
    assert row_counts(database) == before
    record(database, make_step(1, 1), make_policy(1), "learner", claimed)
    assert row_counts(database) != before


def test_record_of_a_known_step_leaves_nothing(database: Database) -> None:
    store_starting_policy(database)
    record(database, make_step(1), None, "learner", [])
    receipt = judge(database, store_trajectory(database))
    claimed = claim(database, "learner")
    before = row_counts(database)
    with pytest.raises(IntegrityError):
        record(database, make_step(1, 1), make_policy(1), "learner", claimed)
    assert row_counts(database) == before
    assert feedback_status(database, receipt.id) is FeedbackStatus.QUEUED


def test_record_with_a_lost_lease_leaves_nothing(database: Database) -> None:
    store_starting_policy(database)
    kept, lost = (store_trajectory(database) for _ in range(2))
    judge(database, lost)
    claimed = claim(database, "slow", lease_seconds=60, now=at(0))
    assert [each.trajectory.id for each in claim(database, "fast", now=at(60))] == [lost]
    judge(database, kept)
    claimed += claim(database, "slow", now=at(61))
    before = row_counts(database)
    with pytest.raises(LeaseLostError, match=f"slow no longer holds trajectory {lost}"):
        record(database, make_step(1, 1), make_policy(1), "slow", claimed)
    assert row_counts(database) == before


def test_record_of_a_dropped_one_that_is_not_held_leaves_nothing(database: Database) -> None:
    store_starting_policy(database)
    held, free = (store_trajectory(database) for _ in range(2))
    judge(database, held)
    claimed = claim(database, "learner")
    judge(database, free)
    before = row_counts(database)
    with pytest.raises(LeaseLostError, match=free):
        record(database, make_step(1, 1), make_policy(1), "learner", claimed, [(free, "too stale")])
    assert row_counts(database) == before


def test_record_after_the_owner_was_given_another_judgement_is_refused(database: Database) -> None:
    store_starting_policy(database)
    trajectory_id = store_trajectory(database)
    judge(database, trajectory_id, 1.0)
    earlier = claim(database, "learner", lease_seconds=60, now=at(0))
    judge(database, trajectory_id, -1.0)
    later = claim(database, "learner", now=at(61))
    with pytest.raises(LeaseLostError, match="judged again"):
        record(database, make_step(1, 1), make_policy(1), "learner", earlier)
    record(database, make_step(1, 1), make_policy(1), "learner", later)


def test_record_finishes_a_lease_that_ran_out_if_nobody_took_it(database: Database) -> None:
    store_starting_policy(database)
    receipt = judge(database, store_trajectory(database))
    claimed = claim(database, "slow", lease_seconds=1, now=at(0))
    database.write(lambda session: steps.record(session, make_step(1), None, "slow", claimed, [], at(99)))
    assert feedback_status(database, receipt.id) is FeedbackStatus.TRAINED


def test_trajectory_is_not_recorded_twice(database: Database) -> None:
    store_starting_policy(database)
    trajectory_id = store_trajectory(database)
    judge(database, trajectory_id)
    claimed = claim(database, "learner")
    record(database, make_step(1), None, "learner", claimed)
    with pytest.raises(LeaseLostError):
        record(database, make_step(2), None, "learner", claimed)
    with pytest.raises(LeaseLostError):
        database.write(lambda session: queue.drop(session, "learner", [trajectory_id], "stale"))
    assert database.read(steps.count) == 1


def test_schema_forbids_training_one_trajectory_twice(database: Database) -> None:
    store_starting_policy(database)
    trajectory_id = store_trajectory(database)
    judge(database, trajectory_id)
    record(database, make_step(1), None, "learner", claim(database, "learner"))
    record(database, make_step(2), None, "learner", [])
    row = {"trajectory_id": trajectory_id, "pass_index": 0, "step": 2, "reward": 1.0, "feedback_ids": []}
    with pytest.raises(IntegrityError):
        database.write(lambda session: session.execute(insert(StepTrajectoryRow), row))


def test_record_refuses_a_policy_of_another_version(database: Database) -> None:
    store_starting_policy(database)
    with pytest.raises(ValueError, match="names version 2"):
        record(database, make_step(1, 2), make_policy(1), "learner", [])
