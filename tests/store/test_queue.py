"""A judged trajectory is with at most one learner."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from store import queue, trajectories
from store.database import Database
from store.errors import LeaseLostError
from store.types import FeedbackStatus, QueueStats, TrajectoryStatus
from tests.store.records import at, claim, feedback_status, judge, store_trajectory


def stats(database: Database, seconds: float) -> QueueStats:
    return database.read(lambda session: queue.stats(session, at(seconds)))


def test_claim_takes_the_oldest_ready_first(database: Database) -> None:
    first, second, third = (store_trajectory(database) for _ in range(3))
    judge(database, third, now=at(1))
    judge(database, first, now=at(2))
    judge(database, second, now=at(3))
    assert [each.trajectory.id for each in claim(database, "learner", 2, now=at(4))] == [third, first]
    [last] = claim(database, "learner", 2, now=at(4))
    assert (last.trajectory.id, last.ready_at) == (second, at(3))


def test_claim_of_nothing_is_empty(database: Database) -> None:
    store_trajectory(database)
    assert claim(database, "learner") == []
    assert stats(database, 0) == QueueStats(num_ready=0, num_leased=0, oldest_ready_at=None)


def test_judged_again_keeps_its_place_in_the_queue(database: Database) -> None:
    first, second = (store_trajectory(database) for _ in range(2))
    judge(database, first, now=at(1))
    judge(database, second, now=at(2))
    judge(database, first, -1.0, now=at(3))
    assert [(each.trajectory.id, each.ready_at) for each in claim(database, "learner")] == [
        (first, at(1)),
        (second, at(2)),
    ]


def test_concurrent_claimers_never_share_a_trajectory(database: Database) -> None:
    expected = {store_trajectory(database) for _ in range(60)}
    for trajectory_id in expected:
        judge(database, trajectory_id)
    start = threading.Barrier(4)

    def drain(owner: str) -> list[str]:
        start.wait()
        taken: list[str] = []
        misses = 0
        while misses < 3:
            batch = [each.trajectory.id for each in claim(database, owner, 4)]
            misses = 0 if batch else misses + 1
            taken += batch
        return taken

    with ThreadPoolExecutor(4) as pool:
        taken = [each for batch in pool.map(drain, ["a", "b", "c", "d"]) for each in batch]
    assert len(taken) == len(set(taken))
    assert set(taken) == expected


def test_lease_that_ran_out_is_claimable_again(database: Database) -> None:
    trajectory_id = store_trajectory(database)
    judge(database, trajectory_id)
    claim(database, "first", lease_seconds=60, now=at(0))
    assert claim(database, "second", now=at(59.9)) == []
    assert stats(database, 59.9) == QueueStats(num_ready=0, num_leased=1, oldest_ready_at=None)
    assert stats(database, 60) == QueueStats(num_ready=1, num_leased=0, oldest_ready_at=at(0))
    assert [each.trajectory.id for each in claim(database, "second", now=at(60))] == [trajectory_id]
    with pytest.raises(LeaseLostError, match="first no longer holds"):
        database.write(lambda session: queue.drop(session, "first", [trajectory_id], "stale"))


def test_renew_extends_only_the_leases_of_its_owner(database: Database) -> None:
    mine, other = (store_trajectory(database) for _ in range(2))
    judge(database, mine, now=at(0))
    claim(database, "me", lease_seconds=60, now=at(0))
    judge(database, other, now=at(1))
    claim(database, "another", lease_seconds=60, now=at(1))
    assert database.write(lambda session: queue.renew(session, "me", 60, at(50))) == 1
    assert [each.trajectory.id for each in claim(database, "third", now=at(105))] == [other]
    assert [each.trajectory.id for each in claim(database, "third", now=at(110))] == [mine]
    assert database.write(lambda session: queue.renew(session, "me", 60, at(110))) == 0


def test_release_gives_back_only_what_its_owner_holds(database: Database) -> None:
    mine, other = (store_trajectory(database) for _ in range(2))
    judge(database, mine, now=at(0))
    claim(database, "me")
    judge(database, other, now=at(1))
    claim(database, "another")
    assert database.write(lambda session: queue.release(session, "me")) == 1
    assert stats(database, 2) == QueueStats(num_ready=1, num_leased=1, oldest_ready_at=at(0))
    assert [each.trajectory.id for each in claim(database, "third")] == [mine]


def test_drop_ends_trajectory_and_feedback_with_the_reason(database: Database) -> None:
    trajectory_id = store_trajectory(database)
    before = judge(database, trajectory_id)
    claim(database, "learner")
    during = judge(database, trajectory_id, -1.0)
    database.write(lambda session: queue.drop(session, "learner", [trajectory_id], "17 versions old"))
    status = database.read(lambda session: trajectories.status(session, trajectory_id))
    assert status == (TrajectoryStatus.DROPPED, "17 versions old")
    assert feedback_status(database, before.id) is FeedbackStatus.DROPPED
    assert feedback_status(database, during.id) is FeedbackStatus.DROPPED
    after = judge(database, trajectory_id, 0.5)
    assert (after.status, after.reason) == (FeedbackStatus.DROPPED, "the trajectory is dropped: 17 versions old")
    assert claim(database, "learner", now=at(1_000)) == []


def test_drop_of_one_that_is_not_held_drops_none(database: Database) -> None:
    held, free = (store_trajectory(database) for _ in range(2))
    judge(database, held)
    claim(database, "learner")
    judge(database, free)
    with pytest.raises(LeaseLostError, match=free):
        database.write(lambda session: queue.drop(session, "learner", [held, free], "stale"))
    assert stats(database, 1) == QueueStats(num_ready=1, num_leased=1, oldest_ready_at=at(0))


def test_claims_and_rewards_at_once_lose_nothing(database: Database) -> None:
    expected = [store_trajectory(database) for _ in range(40)]

    def submit(trajectory_id: str) -> None:
        judge(database, trajectory_id, 0.25, source="user:1")
        judge(database, trajectory_id, 0.75, source="user:2")

    taken: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        submits = [pool.submit(submit, trajectory_id) for trajectory_id in expected]
        while not all(each.done() for each in submits):
            taken += [each.trajectory.id for each in claim(database, "learner", 5)]
        for each in submits:
            each.result()
    database.write(lambda session: queue.release(session, "learner", now=at(1)))
    assert len(taken) == len(set(taken))
    finally_claimed = claim(database, "learner")
    assert sorted(each.trajectory.id for each in finally_claimed) == sorted(expected)
    assert {each.reward for each in finally_claimed} == {0.5}


def test_judged_by_version_reads_what_waits_and_claims_nothing(database: Database) -> None:
    first, second = (store_trajectory(database) for _ in range(2))
    unjudged = store_trajectory(database)
    later = store_trajectory(database, admitted_version=1)
    judge(database, second, 0.25, now=at(1))
    judge(database, first, now=at(2))
    judge(database, later, now=at(3))
    claim(database, "learner", 1, now=at(4))
    found = database.read(lambda session: queue.judged_by_version(session, 0, 10))
    assert [(each.trajectory.id, each.reward) for each in found] == [(second, 0.25), (first, 1.0)]
    assert unjudged not in {each.trajectory.id for each in found}
    assert database.read(lambda session: queue.count_judged_by_version(session, 0)) == 2
    assert [each.trajectory.id for each in database.read(lambda s: queue.judged_by_version(s, 0, 1))] == [second]
    assert [each.trajectory.id for each in claim(database, "learner", now=at(5))] == [first, later]
