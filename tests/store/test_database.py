"""One call is one transaction, and what was written stays."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import InternalError
from sqlalchemy.orm import Session

from store import trajectories, workers
from store.database import AsyncDatabase, Database, database_url
from store.errors import DatabaseUnavailableError, DatabaseUrlError
from tests.store.records import NOON, make_trajectory


@pytest.fixture
async def async_database(migrated_url: str) -> AsyncIterator[AsyncDatabase]:
    opened = AsyncDatabase(migrated_url)
    yield opened
    await opened.close()


def durability(session: Session) -> dict[str, str]:
    """The settings that decide whether a commit survives a loss of power."""
    names = {"sqlite": ("journal_mode", "synchronous", "foreign_keys"), "postgresql": ("synchronous_commit", "fsync")}
    dialect = session.get_bind().dialect.name
    verb = "PRAGMA" if dialect == "sqlite" else "SHOW"
    return {name: str(session.scalar(text(f"{verb} {name}"))) for name in names[dialect]}


DURABLE = [
    {"journal_mode": "wal", "synchronous": "2", "foreign_keys": "1"},
    {"synchronous_commit": "on", "fsync": "on"},
]


def test_every_connection_syncs_on_commit(database: Database) -> None:
    assert database.write(durability) in DURABLE
    with ThreadPoolExecutor(3) as pool:
        assert all(found in DURABLE for found in pool.map(lambda _: database.write(durability), range(6)))


async def test_every_async_connection_syncs_on_commit(async_database: AsyncDatabase) -> None:
    found = await asyncio.gather(*(async_database.write(durability) for _ in range(4)))
    assert all(each in DURABLE for each in found)


def test_exception_rolls_back_and_reaches_the_caller(database: Database) -> None:
    trajectory = make_trajectory()

    def fail(session: Session) -> None:
        trajectories.insert(session, trajectory)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        database.write(fail)
    assert database.read(lambda session: trajectories.get(session, trajectory.id)) is None


def test_read_cannot_write(database: Database) -> None:
    with pytest.raises((DatabaseUnavailableError, InternalError), match=r"readonly|read-only"):
        database.read(lambda session: workers.acquire(session, "learner", "me", 30, NOON))
    assert database.write(lambda session: workers.acquire(session, "learner", "me", 30, NOON))


def test_read_sees_one_snapshot(database: Database) -> None:
    trajectory = make_trajectory()

    def look_twice(session: Session) -> tuple[bool, bool]:
        before = trajectories.get(session, trajectory.id) is not None
        with ThreadPoolExecutor(1) as pool:
            pool.submit(database.write, lambda other: trajectories.insert(other, trajectory)).result()
        return before, trajectories.get(session, trajectory.id) is not None

    assert database.read(look_twice) == (False, False)
    assert database.read(lambda session: trajectories.get(session, trajectory.id)) is not None


async def test_async_and_sync_share_the_data(migrated_url: str, async_database: AsyncDatabase) -> None:
    trajectory = make_trajectory()
    await async_database.write(lambda session: trajectories.insert(session, trajectory))
    assert await async_database.read(lambda session: trajectories.get(session, trajectory.id)) is not None
    database = Database(migrated_url)
    assert database.read(lambda session: trajectories.get(session, trajectory.id)) is not None
    database.close()


async def test_async_exception_rolls_back(async_database: AsyncDatabase) -> None:
    trajectory = make_trajectory()

    def fail(session: Session) -> None:
        trajectories.insert(session, trajectory)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await async_database.write(fail)
    assert await async_database.read(lambda session: trajectories.get(session, trajectory.id)) is None


async def test_many_async_writers_lose_nothing(async_database: AsyncDatabase) -> None:
    many = [make_trajectory() for _ in range(60)]
    await asyncio.gather(
        *(async_database.write(lambda session, each=each: trajectories.insert(session, each)) for each in many)
    )
    stored = await async_database.read(
        lambda session: trajectories.get_many(session, [trajectory.id for trajectory in many])
    )
    assert len(stored) == 60


async def test_cancelled_write_leaves_the_database_usable(async_database: AsyncDatabase) -> None:
    many = [make_trajectory() for _ in range(20)]
    tasks = [
        asyncio.create_task(async_database.write(lambda session, each=each: trajectories.insert(session, each)))
        for each in many
    ]
    await asyncio.sleep(0.01)
    for task in tasks[::2]:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    stored = await async_database.read(lambda session: trajectories.get_many(session, [each.id for each in many]))
    acknowledged = {
        each.id for each, outcome in zip(many, outcomes, strict=True) if not isinstance(outcome, BaseException)
    }
    assert len(acknowledged) >= 10
    assert acknowledged <= set(stored)
    for trajectory_id in stored:
        status = await async_database.read(lambda session, each=trajectory_id: trajectories.status(session, each))
        assert status is not None


def write_in_another_process(url: str, number: int) -> None:
    database = Database(url)
    for _ in range(number):
        trajectory = make_trajectory(text="from another process")
        database.write(lambda session, each=trajectory: trajectories.insert(session, each))
    database.close()


def test_several_processes_write_at_once(migrated_url: str) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=write_in_another_process, args=(migrated_url, 15)) for _ in range(2)]
    for process in processes:
        process.start()
    write_in_another_process(migrated_url, 15)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    database = Database(migrated_url)
    assert database.read(lambda session: session.scalar(text("SELECT count(*) FROM trajectories"))) == 45
    database.close()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("postgresql://me:secret@host/name", "postgresql+psycopg://me:secret@host/name"),
        ("postgres://host/name", "postgresql+psycopg://host/name"),
        ("postgresql+asyncpg://host/name", "postgresql+psycopg://host/name"),
        ("sqlite+aiosqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
    ],
)
def test_database_url_takes_the_project_s_drivers(given: str, expected: str) -> None:
    assert database_url(given).render_as_string(hide_password=False) == expected


@pytest.mark.parametrize("url", ["mysql://host/name", "sqlite://", "sqlite:///:memory:", "tideline.db", ""])
def test_database_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(DatabaseUrlError, match="database_url"):
        database_url(url)


def test_database_that_does_not_answer_is_named_without_its_password() -> None:
    database = Database("postgresql://me:secret@127.0.0.1:1/name")
    with pytest.raises(DatabaseUnavailableError, match=r"me:\*\*\*@127.0.0.1:1/name cannot be used") as caught:
        database.read(lambda session: session.execute(text("SELECT 1")))
    assert "secret" not in str(caught.value)
    database.close()


async def test_missing_directory_is_unavailable(tmp_path: Path) -> None:
    database = AsyncDatabase(f"sqlite:///{tmp_path / 'missing' / 'a.db'}")
    with pytest.raises(DatabaseUnavailableError, match="unable to open"):
        await database.write(lambda session: session.execute(text("SELECT 1")))
    await database.close()
    # The thread of a connection that never opened reports its end to this loop, and nothing awaits it.
    while any(thread.name.endswith("(_connection_worker_thread)") for thread in threading.enumerate()):
        await asyncio.sleep(0.01)
