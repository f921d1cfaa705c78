"""Alembic's environment. One invocation is one transaction: a revision that fails leaves the schema as it was.

The database is, strongest first: the connection that `store.migrate` passes, `-x url=...`, the settings.
"""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from sqlalchemy import JSON, Connection
from sqlalchemy.types import TypeDecorator

from store.database import connect, database_url
from store.migrate import make_room
from store.models import Base
from store.settings import Settings


def _plain_types(kind: str, item: Any, context: object) -> str | Literal[False]:
    """Revisions name column types of SQLAlchemy only, so that later changes to ours do not change the past."""
    if kind == "type" and isinstance(item, TypeDecorator):
        return f"sa.{item.impl!r}"
    return "sa.JSON()" if kind == "type" and isinstance(item, JSON) else False


def _run(connection: Connection) -> None:
    # SQLite cannot alter a table in place: render_as_batch copies it.
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        compare_server_default=True,
        render_as_batch=True,
        render_item=_plain_types,
    )
    with context.begin_transaction():
        context.run_migrations()


def _run_online() -> None:
    connection = context.config.attributes.get("connection")
    if connection is not None:
        _run(connection)
        return
    url = database_url(context.get_x_argument(as_dictionary=True).get("url") or Settings().resolved_database_url)
    make_room(url)
    engine = connect(url, foreign_keys=False)
    try:
        with engine.begin() as own:
            _run(own)
    finally:
        engine.dispose()


if context.is_offline_mode():
    raise SystemExit("offline mode (--sql) is not supported: the revisions look at the database they change")
_run_online()
