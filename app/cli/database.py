"""`tideline db`: bring the database to the current migration, or say whether it is there."""

from __future__ import annotations

import typer
from rich.console import Console

from app.cli.options import ConfigFile, DatabaseUrl, DataDir, fail, resolve_settings
from store import migrate
from store.types import TidelineError

group = typer.Typer(no_args_is_help=True)


@group.command()
def upgrade(data_dir: DataDir = None, database_url: DatabaseUrl = None, config: ConfigFile = None) -> None:
    """Create the database, or bring it to the current migration."""
    settings = resolve_settings(data_dir=data_dir, database_url=database_url, config=config)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    try:
        migrate.upgrade(settings.resolved_database_url)
    except TidelineError as error:
        fail(str(error))
    Console(soft_wrap=True).print("the database is at the current migration")


@group.command()
def check(data_dir: DataDir = None, database_url: DatabaseUrl = None, config: ConfigFile = None) -> None:
    """Say whether the database is at the current migration; exit code 1 if not."""
    settings = resolve_settings(data_dir=data_dir, database_url=database_url, config=config)
    try:
        migrate.check(settings.resolved_database_url)
    except TidelineError as error:
        fail(str(error))
    Console(soft_wrap=True).print("the database is at the current migration")
