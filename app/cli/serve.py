"""`tideline serve`, and its parts each alone: `app`, `engine`, `learner`.

Invariant: whatever can be known to be wrong is said in one sentence before anything is started.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import structlog
import typer
from rich.console import Console

from app.cli.options import (
    INSTALL_ENGINE,
    USAGE_ERROR_CODE,
    ConfigFile,
    DatabaseUrl,
    DataDir,
    Host,
    Model,
    Port,
    Profile,
    fail,
    resolve_settings,
)
from app.cli.prepare import prepare
from app.cli.processes import APP_STREAM_SECONDS, child_specs, drain_order
from app.cli.status import ServerStatus
from app.inference.launcher import EngineStartError, resolve_kind
from app.supervisor import Supervisor
from store import migrate, policies, workers
from store.database import Database
from store.errors import DatabaseUnavailableError
from store.ids import new_id
from store.settings import Settings
from store.types import JsonObject, TidelineError

LEASE_SECONDS = 20.0
"""How long an engine that gives no sign of life is still taken to be there; it gives one every second."""
LOOPBACK_NAME = "localhost"
LOG_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def serve(
    profile: Profile = None,
    model: Model = None,
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Run the whole server: the HTTP service, one engine and the learner."""
    settings = resolve_settings(
        profile=profile,
        model=model,
        host=host,
        port=port,
        data_dir=data_dir,
        database_url=database_url,
        config=config,
    )
    raise typer.Exit(run_server(settings))


def run_server(settings: Settings, *, warm_start: bool = False) -> int:
    """Prepare, then run every process of a server until SIGTERM or SIGINT. Returns the exit code."""
    settings = with_free_port(settings)
    check_address(settings)
    _check_engine(settings)
    _prepare_or_fail(settings, warm_start)
    status = ServerStatus(settings, Console(stderr=True, soft_wrap=True, highlight=False))
    supervisor = Supervisor(
        child_specs(settings),
        drain_order=drain_order(settings),
        environment=os.environ,
        on_event=status.on_event,
        on_poll=status.on_poll,
    )
    code = supervisor.run()
    status.close()
    return code


def app(
    profile: Profile = None,
    model: Model = None,
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Run the HTTP service alone."""
    import uvicorn

    from app.service import create_app

    settings = resolve_settings(
        profile=profile,
        model=model,
        host=host,
        port=port,
        data_dir=data_dir,
        database_url=database_url,
        config=config,
    )
    check_address(settings)
    configure_logging(settings)
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        migrate.upgrade(settings.resolved_database_url)
    except (TidelineError, OSError) as error:
        fail(str(error), USAGE_ERROR_CODE)
    # uvicorn raises the signal that ended it once more when it is done; a clean end is exit code 0 here.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        access_log=False,
        timeout_graceful_shutdown=APP_STREAM_SECONDS,
    )


def engine(
    profile: Profile = None,
    model: Model = None,
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Run one engine on the newest active policy, and restart it when it dies or the learner asks for it."""
    settings = resolve_settings(
        profile=profile,
        model=model,
        host=host,
        port=port,
        data_dir=data_dir,
        database_url=database_url,
        config=config,
    )
    _check_engine(settings)
    _prepare_or_fail(settings, warm_start=False)
    configure_logging(settings)
    database = Database(settings.resolved_database_url)
    try:
        code = _run_engine(settings, database)
    except EngineStartError as error:
        fail(str(error), USAGE_ERROR_CODE)
    except TidelineError as error:
        fail(str(error))
    finally:
        database.close()
    raise typer.Exit(code)


def _run_engine(settings: Settings, database: Database) -> int:
    """Run the engine with what it needs of the database. Raises EngineStartError and the store's errors."""
    from app.inference.serve import run_engine

    owner = f"{socket.gethostname()}:{os.getpid()}:{new_id()}"
    log = structlog.get_logger("tideline.engine")

    def active_policy() -> tuple[int, Path]:
        record = database.read(policies.active)
        if record is None:
            raise TidelineError("there is no active policy to serve")
        return record.version, Path(record.path)

    def take_restart_request() -> str | None:
        try:
            # Asked about once a second, so look before locking anything.
            record = database.read(lambda session: workers.get(session, "engine"))
            if record is None or record.restart_requested is None:
                return None
            return database.write(lambda session: workers.take_restart_request(session, "engine"))
        except DatabaseUnavailableError as error:
            log.warning("cannot ask for restart requests", error=str(error))
            return None

    def on_state(state: JsonObject) -> None:
        now = datetime.now(UTC)
        try:
            database.write(lambda session: workers.heartbeat(session, "engine", owner, state, LEASE_SECONDS, now))
        except DatabaseUnavailableError as error:
            log.warning("cannot show a sign of life", error=str(error))  # it serves all the same

    _acquire_engine_role(database, owner)
    log.info("engine process started", owner=owner)
    try:
        return run_engine(settings, active_policy, take_restart_request, on_state)
    finally:
        database.write(lambda session: workers.release(session, "engine", owner))


def _acquire_engine_role(database: Database, owner: str) -> None:
    """Become the engine. One that was killed keeps its lease for a while, so wait that long for it to run out."""
    deadline = time.monotonic() + 2 * LEASE_SECONDS
    while not database.write(
        lambda session: workers.acquire(session, "engine", owner, LEASE_SECONDS, datetime.now(UTC))
    ):
        if time.monotonic() > deadline:
            raise TidelineError("another engine process is running on this database")
        time.sleep(0.5)


def learner(
    profile: Profile = None,
    model: Model = None,
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Run the learner alone."""
    settings = resolve_settings(
        profile=profile,
        model=model,
        host=host,
        port=port,
        data_dir=data_dir,
        database_url=database_url,
        config=config,
    )
    _prepare_or_fail(settings, warm_start=False)
    # The app package never imports the learner, so this process becomes it.
    os.execv(sys.executable, [sys.executable, "-m", "learner"])


def pretrain_critic(
    file: Annotated[
        Path | None, typer.Option("--from", help="JSONL file of scored trajectories; default: those in the store.")
    ] = None,
    profile: Profile = None,
    model: Model = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Pretrain the critic on scored trajectories of the starting policy, before learning begins."""
    settings = resolve_settings(
        profile=profile, model=model, data_dir=data_dir, database_url=database_url, config=config
    )
    if file is not None and not file.is_file():
        fail(f"from: there is no file {file}", USAGE_ERROR_CODE)
    _prepare_or_fail(settings, warm_start=False)
    arguments = [] if file is None else ["--from", str(file.resolve())]
    os.execv(sys.executable, [sys.executable, "-m", "learner.pretrain_command", *arguments])


def check_address(settings: Settings) -> None:
    """End the command with one sentence unless the HTTP service may and can bind to its address."""
    # There are no keys yet, and without keys anyone who reaches the port may chat and teach.
    if not is_loopback(settings.host):
        fail(
            f"host: {settings.host} is not a loopback address, and without API keys the server binds to nothing else",
            USAGE_ERROR_CODE,
        )
    try:
        with closing(_bound_socket(settings.host, settings.port)):
            pass
    except OSError as error:
        fail(f"port: {settings.host}:{settings.port} cannot be bound: {error.strerror}", USAGE_ERROR_CODE)


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches."""
    if host == LOOPBACK_NAME:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def configure_logging(settings: Settings) -> None:
    """Log lines of `key=value` from the chosen severity up."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LOG_LEVELS[settings.log_level]),
    )


def _bound_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As uvicorn binds: a port whose last connections are still closing is free.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def with_free_port(settings: Settings) -> Settings:
    """The settings with port 0 replaced by a free one, so that the children and the terminal know which."""
    if settings.port != 0 or not is_loopback(settings.host):
        return settings
    with closing(_bound_socket(settings.host, 0)) as bound:
        return resolve_settings(port=bound.getsockname()[1])


def _check_engine(settings: Settings) -> None:
    """End the command with the way to get an engine if the one asked for is not installed."""
    if settings.engine.url is not None:
        return
    try:
        kind = resolve_kind(settings.engine.kind)
    except EngineStartError as error:
        fail(f"{error}; the command is: {INSTALL_ENGINE}", USAGE_ERROR_CODE)
    if kind == "transformers" and settings.engine.kind == "auto":
        note = f"vLLM is not installed, so the small transformers engine serves; vLLM comes with {INSTALL_ENGINE}"
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"tideline: {note}", markup=False)


def _prepare_or_fail(settings: Settings, warm_start: bool) -> None:
    try:
        prepare(settings, warm_start)
    except DatabaseUnavailableError as error:
        fail(str(error))
    except TidelineError as error:
        fail(str(error), USAGE_ERROR_CODE)
    except OSError as error:
        fail(f"{error.filename or settings.data_dir}: {error.strerror}", USAGE_ERROR_CODE)
