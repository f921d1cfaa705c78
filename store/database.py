"""Connections and transactions. One call of `read` or `write` is one transaction.

Invariant guarded here: what `write` returned from is on the disk. SQLite runs in WAL mode with synchronous=FULL, so a
commit is synced before it is acknowledged; on PostgreSQL that is its default, synchronous_commit=on.

A write on SQLite begins with BEGIN IMMEDIATE: it takes the write lock before it reads, so what it decides on cannot
change under it. On PostgreSQL the functions lock the rows they decide on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DBAPIError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from store.columns import dump_json
from store.errors import DatabaseUnavailableError, DatabaseUrlError

T = TypeVar("T")

BUSY_TIMEOUT_SECONDS = 30
"""How long a SQLite connection waits for another process's write to end."""


class Database:
    """A database for code that blocks: the learner and the command line. Safe to use from several threads."""

    def __init__(self, url: str) -> None:
        """Connects lazily. Raises DatabaseUrlError for a URL that is neither SQLite's nor PostgreSQL's."""
        self._url = database_url(url)
        self._engine = connect(self._url)
        self._reading = self._engine.execution_options(**_read_options(self._url))
        self._writing = self._engine.execution_options(**_write_options(self._url))

    def read(self, fn: Callable[[Session], T]) -> T:
        """What `fn` returns, from one consistent snapshot. Writing inside `fn` is an error of the database.

        Raises DatabaseUnavailableError when the database cannot be reached or used.
        """
        with translated(self._url), Session(self._reading) as session:
            return fn(session)

    def write(self, fn: Callable[[Session], T]) -> T:
        """What `fn` returns, committed and durable. An exception in `fn` leaves nothing of what it wrote.

        Raises DatabaseUnavailableError when the database cannot be reached or used.
        """
        with translated(self._url), Session(self._writing) as session, session.begin():
            return fn(session)

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()


class AsyncDatabase:
    """The same for the app's event loop; `fn` stays an ordinary function and runs beside the loop's other tasks."""

    def __init__(self, url: str) -> None:
        """Connects lazily. Raises DatabaseUrlError for a URL that is neither SQLite's nor PostgreSQL's."""
        self._url = database_url(url)
        self._engine = connect_async(self._url)
        self._reading = self._engine.execution_options(**_read_options(self._url))
        self._writing = self._engine.execution_options(**_write_options(self._url))
        # SQLite has one writer at a time and no queue for the others: they would poll. Here they queue in order.
        self._writer = asyncio.Lock() if self._url.get_backend_name() == "sqlite" else None

    async def read(self, fn: Callable[[Session], T]) -> T:
        """See Database.read."""
        with translated(self._url):
            async with AsyncSession(self._reading) as session:
                return await session.run_sync(fn)

    async def write(self, fn: Callable[[Session], T]) -> T:
        """See Database.write. Cancelled before the commit, it leaves nothing."""
        with translated(self._url):
            async with self._turn_to_write(), AsyncSession(self._writing) as session, session.begin():
                return await session.run_sync(fn)

    @contextlib.asynccontextmanager
    async def _turn_to_write(self) -> AsyncIterator[None]:
        if self._writer is None:
            yield
        else:
            async with self._writer:
                yield

    async def close(self) -> None:
        """Close every connection."""
        await self._engine.dispose()


def database_url(url: str) -> URL:
    """`url` with the driver this project uses: psycopg 3 on PostgreSQL, the standard library's on SQLite.

    Raises DatabaseUrlError for anything else.
    """
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
    except (ArgumentError, NoSuchModuleError) as error:
        raise DatabaseUrlError(f"database_url is not an SQLAlchemy URL: {error}") from error
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if backend == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise DatabaseUrlError("database_url must name a file: every process opens the SQLite database by itself")
        return parsed.set(drivername="sqlite")
    raise DatabaseUrlError(f"database_url is for {backend}; only sqlite and postgresql work")


def connect(url: URL, *, foreign_keys: bool = True) -> Engine:
    """An engine whose transactions behave as this module promises. `foreign_keys` off is for migrations on SQLite."""
    engine = create_engine(url, **_engine_arguments(url))
    if url.get_backend_name() == "sqlite":
        _prepare_sqlite(engine, foreign_keys=foreign_keys)
    return engine


def connect_async(url: URL) -> AsyncEngine:
    """The same for asyncio."""
    drivername = "sqlite+aiosqlite" if url.get_backend_name() == "sqlite" else url.drivername
    engine = create_async_engine(url.set(drivername=drivername), **_engine_arguments(url))
    if url.get_backend_name() == "sqlite":
        _prepare_sqlite(engine.sync_engine, foreign_keys=True)
    return engine


def _engine_arguments(url: URL) -> dict[str, Any]:
    if url.get_backend_name() == "sqlite":
        return {"json_serializer": dump_json, "connect_args": {"timeout": BUSY_TIMEOUT_SECONDS}}
    # The server may have restarted since a connection was last used.
    return {"json_serializer": dump_json, "pool_pre_ping": True}


def _read_options(url: URL) -> dict[str, Any]:
    if url.get_backend_name() == "sqlite":
        return {"tideline_writes": False}
    return {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}


def _write_options(url: URL) -> dict[str, Any]:
    if url.get_backend_name() == "sqlite":
        return {"tideline_writes": True}
    # What a row lock waited for must be seen once it is granted; stricter levels fail there instead.
    return {"isolation_level": "READ COMMITTED"}


def _prepare_sqlite(engine: Engine, *, foreign_keys: bool) -> None:
    @event.listens_for(engine, "connect")
    def _set_pragmas(connection: Any, record: object) -> None:
        # None stops the driver from opening transactions by itself, so that the kind of BEGIN is ours to choose.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_SECONDS * 1000}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("tideline_writes", True)
        connection.exec_driver_sql(f"PRAGMA query_only = {'OFF' if writes else 'ON'}")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextlib.contextmanager
def translated(url: URL) -> Iterator[None]:
    """Raise DatabaseUnavailableError, the one error callers handle, for a lost, locked, full or broken database."""
    try:
        yield
    except PoolTimeoutError as error:
        place = url.render_as_string(hide_password=True)
        raise DatabaseUnavailableError(f"the database {place} is overloaded: no connection came free") from error
    except DBAPIError as error:
        # SQLite reports a damaged file, or one that is no database, as plain DatabaseError.
        broken = type(error) is DatabaseError or isinstance(error, OperationalError | InterfaceError)
        if not (broken or error.connection_invalidated):
            raise
        place = url.render_as_string(hide_password=True)
        raise DatabaseUnavailableError(f"the database {place} cannot be used: {error.orig}") from error
