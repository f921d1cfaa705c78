"""Every test of the store that takes `database_url` runs twice: on SQLite and on PostgreSQL.

PostgreSQL's server is TIDELINE_TEST_DATABASE_URL or the local default; where none answers those tests are skipped. A
test run has its own schema there, dropped at the end.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url, text

from store import migrate
from store.database import Database, connect, database_url
from store.errors import DatabaseUnavailableError
from store.ids import new_id
from store.models import Base

DEFAULT_POSTGRESQL_URL = "postgresql://root@127.0.0.1:5432/test"


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated empty database that tests copy."""
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    migrate.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def postgresql_server() -> str:
    """The URL of a PostgreSQL database in which this run may create schemas."""
    url = make_url(os.environ.get("TIDELINE_TEST_DATABASE_URL", DEFAULT_POSTGRESQL_URL))
    url = url.update_query_dict({"connect_timeout": "5"})
    server = url.render_as_string(hide_password=False)
    database = Database(server)
    try:
        database.read(lambda session: session.execute(text("SELECT 1")))
    except DatabaseUnavailableError as error:
        pytest.skip(f"no PostgreSQL: {error}")
    finally:
        database.close()
    return server


def create_schema(server: str) -> tuple[str, str]:
    """Name and URL of a fresh empty schema."""
    name = f"tideline_{new_id().replace('-', '')}"
    _run(server, f"CREATE SCHEMA {name}")
    url = make_url(server).update_query_dict({"options": f"-csearch_path={name}"})
    return name, url.render_as_string(hide_password=False)


def drop_schema(server: str, name: str) -> None:
    """Remove a schema and all that is in it."""
    _run(server, f"DROP SCHEMA {name} CASCADE")


def _run(server: str, statement: str) -> None:
    engine = connect(database_url(server))
    with engine.begin() as connection:
        connection.execute(text(statement))
    engine.dispose()


@pytest.fixture(scope="session")
def migrated_postgresql(postgresql_server: str) -> Iterator[str]:
    """The URL of this run's migrated schema."""
    name, url = create_schema(postgresql_server)
    migrate.upgrade(url)
    yield url
    drop_schema(postgresql_server, name)


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without tables."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    server = request.getfixturevalue("postgresql_server")
    name, url = create_schema(server)
    yield url
    drop_schema(server, name)


@pytest.fixture(params=["sqlite", "postgresql"])
def migrated_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with all tables, all of them empty."""
    if request.param == "sqlite":
        path = tmp_path / "tideline.db"
        shutil.copy(request.getfixturevalue("migrated_sqlite"), path)
        return f"sqlite:///{path}"
    url: str = request.getfixturevalue("migrated_postgresql")
    tables = ", ".join(f'"{table.name}"' for table in Base.metadata.sorted_tables)
    _run(url, f"TRUNCATE {tables}")
    return url


@pytest.fixture
def database(migrated_url: str) -> Iterator[Database]:
    """An open empty database."""
    opened = Database(migrated_url)
    yield opened
    opened.close()
