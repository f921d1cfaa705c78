"""The migrations build exactly the models' schema, and refuse what they do not know."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text

import migrations
from store import migrate
from store.database import connect, database_url
from store.errors import DatabaseOutdatedError, DatabaseTooNewError, DatabaseUnavailableError
from store.models import Base

ROOT = Path(migrations.__file__).parent.parent


def tables(url: str) -> set[str]:
    engine = connect(database_url(url))
    found = set(inspect(engine).get_table_names())
    engine.dispose()
    return found


def execute(url: str, statement: str) -> None:
    engine = connect(database_url(url))
    with engine.begin() as connection:
        connection.execute(text(statement))
    engine.dispose()


def test_upgrade_builds_the_models_schema(empty_database_url: str) -> None:
    migrate.upgrade(empty_database_url)
    engine = connect(database_url(empty_database_url))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_upgrade_twice_changes_nothing(empty_database_url: str) -> None:
    migrate.upgrade(empty_database_url)
    before = tables(empty_database_url)
    migrate.upgrade(empty_database_url)
    migrate.check(empty_database_url)
    assert tables(empty_database_url) == before == set(Base.metadata.tables) | {"alembic_version"}


def test_downgrade_removes_what_upgrade_made(empty_database_url: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(ROOT / "migrations"))
    engine = connect(database_url(empty_database_url), foreign_keys=False)
    for _ in range(2):
        for run, target in ((command.upgrade, "head"), (command.downgrade, "base")):
            with engine.begin() as connection:
                config.attributes["connection"] = connection
                run(config, target)
        assert set(inspect(engine).get_table_names()) == {"alembic_version"}
    engine.dispose()


UPGRADER = """
import sys
from store import migrate
print("ready", flush=True)
sys.stdin.readline()
migrate.upgrade(sys.argv[1])
"""


def test_upgrades_at_the_same_moment_agree(empty_database_url: str) -> None:
    upgraders = [
        subprocess.Popen(
            [sys.executable, "-c", UPGRADER, empty_database_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for upgrader in upgraders:
        assert upgrader.stdout is not None
        upgrader.stdout.readline()
    for upgrader in upgraders:
        assert upgrader.stdin is not None
        upgrader.stdin.write("\n")
        upgrader.stdin.flush()
    complaints = [upgrader.communicate()[1] for upgrader in upgraders]
    assert [upgrader.returncode for upgrader in upgraders] == [0, 0], complaints
    migrate.check(empty_database_url)


def test_check_of_an_empty_database_asks_for_an_upgrade(empty_database_url: str) -> None:
    with pytest.raises(DatabaseOutdatedError, match="run `tideline db upgrade`"):
        migrate.check(empty_database_url)
    execute(empty_database_url, "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
    with pytest.raises(DatabaseOutdatedError, match="has no tables yet"):
        migrate.check(empty_database_url)


def test_check_creates_no_database(tmp_path: Path) -> None:
    with pytest.raises(DatabaseOutdatedError, match="there is no database"):
        migrate.check(f"sqlite:///{tmp_path / 'a.db'}")
    assert list(tmp_path.iterdir()) == []


def test_database_of_a_later_version_is_refused_and_left_alone(empty_database_url: str) -> None:
    migrate.upgrade(empty_database_url)
    execute(empty_database_url, "UPDATE alembic_version SET version_num = '9999'")
    execute(empty_database_url, "CREATE TABLE of_the_future (id INTEGER)")
    before = tables(empty_database_url)
    for refuse in (migrate.upgrade, migrate.check):
        with pytest.raises(DatabaseTooNewError, match=r"revision 9999, .*a later version of Tideline made it"):
            refuse(empty_database_url)
    assert tables(empty_database_url) == before


def test_upgrade_creates_the_directory_of_a_sqlite_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'deep' / 'er' / 'a%20b.db'}"
    migrate.upgrade(url)
    migrate.check(url)


def test_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_text("not a database, but a text of some length" * 100)
    for refuse in (migrate.upgrade, migrate.check):
        with pytest.raises(DatabaseUnavailableError, match=r"a\.db cannot be used: file is not a database"):
            refuse(f"sqlite:///{path}")


def test_alembic_command_finds_no_difference(tmp_path: Path) -> None:
    url = f"url=sqlite:///{tmp_path / 'new' / 'a.db'}"
    for arguments in (["upgrade", "head"], ["check"]):
        result = subprocess.run(
            [sys.executable, "-m", "alembic", "-x", url, *arguments], cwd=ROOT, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout + result.stderr
    assert "No new upgrade operations detected" in result.stdout
