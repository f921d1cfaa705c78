"""`tideline policies`: what versions there are, read from the database."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.cli.options import ConfigFile, DatabaseUrl, DataDir, fail, resolve_settings
from store import migrate, policies
from store.database import Database
from store.types import TidelineError

group = typer.Typer(no_args_is_help=True)


@group.callback()
def root() -> None:
    """The versions of the policy."""


@group.command("list")
def list_policies(data_dir: DataDir = None, database_url: DatabaseUrl = None, config: ConfigFile = None) -> None:
    """List every version: where it came from, what became of it, when it was served."""
    settings = resolve_settings(data_dir=data_dir, database_url=database_url, config=config)
    try:
        migrate.check(settings.resolved_database_url)
        database = Database(settings.resolved_database_url)
        records = database.read(policies.list_all)
        database.close()
    except TidelineError as error:
        fail(str(error))
    table = Table("version", "parent", "status", "event", "made", "first served", "directory")
    for record in records:
        table.add_row(
            str(record.version),
            "" if record.parent_version is None else str(record.parent_version),
            record.status.value,
            record.event or "",
            f"{record.created_at:%Y-%m-%d %H:%M:%S}",
            "" if record.activated_at is None else f"{record.activated_at:%Y-%m-%d %H:%M:%S}",
            escape(record.path),
        )
    Console(soft_wrap=True).print(table)
