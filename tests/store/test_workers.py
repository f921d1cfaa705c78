"""One process per role."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from store import workers
from store.database import Database
from store.errors import LeaseLostError
from tests.store.records import at


def acquire(database: Database, owner: str, seconds: float, role: str = "learner") -> bool:
    return database.write(lambda session: workers.acquire(session, role, owner, 30, at(seconds)))


def test_role_is_refused_while_another_lease_lives(database: Database) -> None:
    assert acquire(database, "first", 0)
    assert not acquire(database, "second", 29.9)
    assert acquire(database, "second", 0, role="engine")
    assert acquire(database, "first", 29.9)
    assert not acquire(database, "second", 30)
    assert acquire(database, "second", 59.9)


def test_processes_that_start_at_once_do_not_both_get_the_role(database: Database) -> None:
    start = threading.Barrier(6)

    def race(owner: int) -> bool:
        start.wait()
        return acquire(database, f"owner {owner}", 0)

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(race, range(6))) == 1


def test_heartbeat_keeps_the_role_and_shows_the_state(database: Database) -> None:
    acquire(database, "first", 0)
    state = {"phase": "training", "explained_variance": float("nan")}
    database.write(lambda session: workers.heartbeat(session, "learner", "first", state, 30, at(20)))
    assert not acquire(database, "second", 49)
    worker = database.read(lambda session: workers.get(session, "learner"))
    assert worker is not None
    assert (worker.owner, worker.heartbeat_at, worker.lease_expires_at) == ("first", at(20), at(50))
    assert worker.state == {"phase": "training", "explained_variance": None}


def test_heartbeat_of_a_process_that_was_replaced_fails(database: Database) -> None:
    acquire(database, "first", 0)
    acquire(database, "second", 30)
    with pytest.raises(LeaseLostError, match="first no longer holds the role learner"):
        database.write(lambda session: workers.heartbeat(session, "learner", "first", {}, 30, at(31)))
    with pytest.raises(LeaseLostError):
        database.write(lambda session: workers.heartbeat(session, "engine", "first", {}, 30, at(31)))


def test_release_frees_the_role_at_once_and_only_for_its_owner(database: Database) -> None:
    acquire(database, "first", 0)
    database.write(lambda session: workers.release(session, "learner", "second"))
    assert not acquire(database, "second", 1)
    database.write(lambda session: workers.release(session, "learner", "first"))
    assert acquire(database, "second", 1)


def test_restart_request_is_handed_out_once(database: Database) -> None:
    acquire(database, "first", 0, role="engine")
    assert database.write(lambda session: workers.take_restart_request(session, "engine")) is None
    database.write(lambda session: workers.request_restart(session, "engine", "the probe did not match", at(1)))
    worker = database.read(lambda session: workers.get(session, "engine"))
    assert worker is not None
    assert worker.restart_requested == "the probe did not match"
    assert database.write(lambda session: workers.take_restart_request(session, "engine")) == "the probe did not match"
    assert database.write(lambda session: workers.take_restart_request(session, "engine")) is None


def test_restart_request_waits_for_the_role_to_be_taken(database: Database) -> None:
    database.write(lambda session: workers.request_restart(session, "engine", "why", at(5)))
    assert database.read(lambda session: workers.get(session, "engine")) is None
    assert acquire(database, "first", 5, role="engine")
    assert database.write(lambda session: workers.take_restart_request(session, "engine")) == "why"


def test_unknown_role_is_none(database: Database) -> None:
    assert database.read(lambda session: workers.get(session, "learner")) is None
    assert database.write(lambda session: workers.take_restart_request(session, "learner")) is None
