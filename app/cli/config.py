"""`tideline config`: the resolved settings, each with its meaning.

Invariant: what `--format toml` and `--format json` print is a whole configuration that can be read back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from app.cli.options import ConfigFile, DatabaseUrl, DataDir, Host, Model, Port, Profile, resolve_settings
from store.types import JsonObject


class Format(StrEnum):
    """How to print the settings."""

    TEXT = "text"
    TOML = "toml"
    JSON = "json"


def config(
    profile: Profile = None,
    model: Model = None,
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
    format: Annotated[Format, typer.Option(help="text explains each setting; toml and json can be read back.")] = (
        Format.TEXT
    ),
) -> None:
    """Print every setting as it resolves here, with its meaning."""
    settings = resolve_settings(
        profile=profile,
        model=model,
        host=host,
        port=port,
        data_dir=data_dir,
        database_url=database_url,
        config=config,
    )
    values = settings.model_dump(mode="json")
    if format is Format.JSON:
        typer.echo(json.dumps(values, indent=2))
    elif format is Format.TOML:
        typer.echo("\n".join(toml_lines(values)))
    else:
        typer.echo("\n".join(explained_lines(settings)))


def explained_lines(section: BaseModel, prefix: str = "") -> Iterator[str]:
    """Each setting as `name = value`, its meaning on the line below."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from explained_lines(value, f"{prefix}{name}.")
            continue
        yield f"{prefix}{name} = {_explained_value(section.model_dump(mode='json')[name])}"
        yield f"    {field.description}"


def toml_lines(values: JsonObject, table: str = "") -> Iterator[str]:
    """The settings as TOML. What is unset is left out: TOML has no null."""
    for name, value in values.items():
        if value is not None and not isinstance(value, dict):
            yield f"{name} = {json.dumps(value, ensure_ascii=False)}"  # JSON's strings, numbers, lists are TOML's
    for name, value in values.items():
        if isinstance(value, dict):
            path = f"{table}.{name}" if table else name
            yield from ("", f"[{path}]", *toml_lines(value, path))


def _explained_value(value: Any) -> str:
    return "(unset)" if value is None else json.dumps(value, ensure_ascii=False)
