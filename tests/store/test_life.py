"""Any interleaving of rewards, claims, lost leases and updates ends as a simple model in memory says it does."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store import policies, queue, steps, trajectories
from store.database import Database
from store.errors import LeaseLostError
from store.types import JudgedTrajectory
from tests.store.records import at, claim, feedback_status, judge, make_step, store_starting_policy, store_trajectory

LEASE_SECONDS = 5
OWNERS = ("first", "second")


@dataclass
class ModelFeedback:
    id: str
    source: str
    reward: float | None
    status: str = "accepted"

    @property
    def is_open(self) -> bool:
        return self.reward is not None and self.status in ("accepted", "queued")


@dataclass
class ModelTrajectory:
    """The same life, without a database: aggregation is the mean of the newest reward of each source."""

    id: str
    status: str = "sampled"
    feedback: list[ModelFeedback] = field(default_factory=list)
    counting: list[str] = field(default_factory=list)
    reward: float | None = None
    ready_at: int = 0
    owner: str | None = None
    lease_ends: int = 0

    def submit(self, entry: ModelFeedback, now: int) -> None:
        self.feedback.append(entry)
        if entry.reward is None:
            return
        if self.status == "trained":
            entry.status = "late"
        elif self.status in ("dropped", "expired"):
            entry.status = "dropped"
        elif self.owner is None:
            self.rejudge(now)

    def rejudge(self, now: int) -> None:
        newest = {entry.source: entry for entry in self.feedback if entry.is_open}
        for entry in self.feedback:
            if entry.is_open:
                entry.status = "queued" if newest[entry.source] is entry else "superseded"
        standing = [entry for entry in self.feedback if entry.is_open]
        self.counting = [entry.id for entry in standing]
        self.reward = sum(entry.reward or 0 for entry in standing) / len(standing)
        if self.status == "sampled":
            self.status, self.ready_at = "ready", now

    def finish(self, status: str) -> None:
        self.status, self.owner = status, None
        for entry in self.feedback:
            if entry.is_open:
                fate = "trained" if entry.id in self.counting else "late"
                entry.status = fate if status == "trained" else status


@dataclass
class Model:
    trajectories: dict[str, ModelTrajectory]

    def claim(self, owner: str, limit: int, now: int) -> list[ModelTrajectory]:
        free = [
            each
            for each in self.trajectories.values()
            if each.status == "ready" and (each.owner is None or each.lease_ends <= now)
        ]
        taken = sorted(free, key=lambda each: (each.ready_at, each.id))[:limit]
        for each in taken:
            if each.owner is not None:
                each.rejudge(now)
            each.owner, each.lease_ends = owner, now + LEASE_SECONDS
        return taken

    def holds(self, owner: str, claimed: list[JudgedTrajectory]) -> bool:
        return all(
            self.trajectories[each.trajectory.id].owner == owner
            and tuple(self.trajectories[each.trajectory.id].counting) == each.feedback_ids
            for each in claimed
        )


rewards = st.none() | st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0])
operations = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 2), st.sampled_from(["user:1", "user:2"]), rewards),
    st.tuples(st.just("claim"), st.sampled_from(OWNERS), st.integers(1, 3)),
    st.tuples(st.just("record"), st.sampled_from(OWNERS)),
    st.tuples(st.just("drop"), st.sampled_from(OWNERS)),
    st.tuples(st.just("release"), st.sampled_from(OWNERS)),
    st.tuples(st.just("wait")),
    st.tuples(st.just("expire")),
)


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(chosen=st.lists(operations, min_size=3, max_size=25))
def test_any_interleaving_ends_as_the_model_says(database: Database, chosen: list[tuple]) -> None:  # type: ignore[type-arg]
    if database.read(policies.active) is None:
        store_starting_policy(database)
    ids = [store_trajectory(database) for _ in range(3)]
    model = Model({each: ModelTrajectory(each) for each in ids})
    claimed: dict[str, list[JudgedTrajectory]] = {owner: [] for owner in OWNERS}
    now = 0
    for operation, *arguments in chosen:
        now += 1
        if operation == "wait":
            now += LEASE_SECONDS
        elif operation == "expire":
            database.write(lambda session, now=now: queue.expire_unjudged(session, at(1), at(now)))
            for each in model.trajectories.values():
                if each.status == "sampled":
                    each.finish("expired")
        elif operation == "submit":
            index, source, reward = arguments
            receipt = judge(database, ids[index], reward, source=source, aggregation="mean", now=at(now))
            entry = ModelFeedback(receipt.id, source, reward)
            model.trajectories[ids[index]].submit(entry, now)
            assert receipt.status == entry.status
        elif operation == "claim":
            owner, limit = arguments
            taken = claim(database, owner, limit, lease_seconds=LEASE_SECONDS, now=at(now))
            expected = model.claim(owner, limit, now)
            assert [(each.trajectory.id, each.reward) for each in taken] == [
                (each.id, each.reward) for each in expected
            ]
            claimed[owner] += taken
        elif operation == "release":
            [owner] = arguments
            database.write(lambda session, owner=owner, now=now: queue.release(session, owner, now=at(now)))
            for each in model.trajectories.values():
                if each.owner == owner:
                    each.owner = None
                    each.rejudge(now)
            claimed[owner] = []
        else:
            [owner] = arguments
            batch, claimed[owner] = claimed[owner], []
            finish(database, model, operation, owner, batch, now)
    for each in model.trajectories.values():
        status = database.read(lambda session, each=each: trajectories.status(session, each.id))
        assert status is not None
        assert status[0] == each.status
        assert [feedback_status(database, entry.id) for entry in each.feedback] == [
            entry.status for entry in each.feedback
        ]
    empty_the_queue(database)


def finish(
    database: Database, model: Model, operation: str, owner: str, batch: list[JudgedTrajectory], now: int
) -> None:
    """Train or drop what `owner` claimed; both must fail exactly when the model says that something was lost."""
    batch = list({each.trajectory.id: each for each in batch}.values())
    if operation == "record":
        step = make_step(database.read(steps.count) + 1)
        fate, keeps = "trained", model.holds(owner, batch)
    else:
        fate, keeps = "dropped", all(model.trajectories[each.trajectory.id].owner == owner for each in batch)

    def run() -> None:
        if operation == "record":
            database.write(lambda session: steps.record(session, step, None, owner, batch, [], at(now)))
        else:
            ids = [each.trajectory.id for each in batch]
            database.write(lambda session: queue.drop(session, owner, ids, "stale", now=at(now)))

    if not keeps:
        with pytest.raises(LeaseLostError):
            run()
        return
    run()
    for each in batch:
        model.trajectories[each.trajectory.id].finish(fate)


def empty_the_queue(database: Database) -> None:
    """So that the next example begins with nothing to claim."""
    left = claim(database, "end", now=at(10_000))
    ids = [each.trajectory.id for each in left]
    database.write(lambda session: queue.drop(session, "end", ids, "the example is over"))
    database.write(lambda session: queue.expire_unjudged(session, at(10_000), at(10_000)))
