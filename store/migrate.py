"""Bring a database to the schema of this version, and refuse one that is not.

Invariant guarded here: an upgrade is one transaction, and a database that a later version made is never touched.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, text

from store.database import connect, database_url, translated
from store.errors import DatabaseOutdatedError, DatabaseTooNewError

UPGRADE_LOCK = 0x7469_6465
"""Number of PostgreSQL's advisory lock that upgrades take ("tide")."""


def upgrade(url: str) -> None:
    """Create the schema, or bring it to this version's; at the current version it changes nothing.

    Raises DatabaseTooNewError for a database of a later version, DatabaseUnavailableError if it cannot be used.
    """
    parsed = database_url(url)
    make_room(parsed)
    # Off, because SQLite alters a table by copying it, and dropping the original would cascade.
    engine = connect(parsed, foreign_keys=False)
    try:
        with translated(parsed), engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": UPGRADE_LOCK})
            config = _config()
            if _known_revision(connection, config) == _head(config):
                return
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        engine.dispose()


def check(url: str) -> None:
    """Return if the database has exactly this version's schema.

    Raises DatabaseOutdatedError if it waits for an upgrade (or does not exist yet), DatabaseTooNewError if a later
    version made it, DatabaseUnavailableError if it cannot be used. Changes nothing.
    """
    parsed = database_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        raise DatabaseOutdatedError(f"there is no database at {parsed.database}: run `tideline db upgrade`")
    engine = connect(parsed)
    try:
        with translated(parsed), engine.connect() as connection:
            config = _config()
            revision, head = _known_revision(connection, config), _head(config)
    finally:
        engine.dispose()
    if revision != head:
        found = "has no tables yet" if revision is None else f"is at revision {revision}, and this version needs {head}"
        place = parsed.render_as_string(hide_password=True)
        raise DatabaseOutdatedError(f"the database {place} {found}: run `tideline db upgrade`")


def make_room(url: URL) -> None:
    """Create the directory of a SQLite database; SQLite itself creates only the file."""
    if url.get_backend_name() == "sqlite" and url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)


def _config() -> Config:
    config = Config()
    # Found as a package, so that it works from a wheel as from a checkout.
    config.set_main_option("script_location", str(files("migrations")).replace("%", "%%"))
    return config


def _head(config: Config) -> str | None:
    return ScriptDirectory.from_config(config).get_current_head()


def _known_revision(connection: Connection, config: Config) -> str | None:
    """The revision the database is at, None for an empty one. Raises DatabaseTooNewError if it is not one of ours."""
    revision = MigrationContext.configure(connection).get_current_revision()
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        place = connection.engine.url.render_as_string(hide_password=True)
        raise DatabaseTooNewError(
            f"the database {place} is at revision {revision}, which this version does not know: "
            "a later version of Tideline made it, so run that one"
        )
    return revision
