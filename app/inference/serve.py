"""The engine process: keeps one engine running on the newest active policy until it is told to end.

    starting -> ready -> (died | restart requested) -> waiting -> starting -> ...
                  \\-> stopped on SIGTERM or SIGINT

Invariant: an engine is only ever reported `ready` once its weights carry the policy version they are. The database is
the caller's: it is reached through the three functions handed in.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from app.inference.launcher import (
    EngineAddress,
    EngineKind,
    EngineProcess,
    EngineStartError,
    resolve_kind,
    start_engine,
)
from store.settings import Settings
from store.types import JsonObject

POLL_SECONDS = 1.0
FIRST_BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 30.0
STABLE_SECONDS = 60.0
"""An engine that ran this long has recovered: the next crash waits the shortest back-off again."""


def engine_address(settings: Settings) -> EngineAddress:
    """Where the engine of these settings listens."""
    if settings.engine.url is not None:
        return EngineAddress(url=settings.engine.url)
    return EngineAddress(socket=settings.engine_socket)


def engine_log(settings: Settings) -> Path:
    """The file that the engine's output is appended to."""
    return settings.data_dir.resolve() / "logs" / "engine.log"


def run_engine(
    settings: Settings,
    active_policy: Callable[[], tuple[int, Path]],
    take_restart_request: Callable[[], str | None],
    on_state: Callable[[JsonObject], None],
    stop: threading.Event | None = None,
) -> int:
    """Run an engine until SIGTERM, SIGINT or `stop`. Returns the process exit code.

    active_policy          (version, directory) of the newest active policy; asked before each start
    take_restart_request   the reason of a pending restart request, taken off; None if there is none
    on_state               told the engine's state at each change and about every second: `state`, `kind`, `pid`,
                           `started_version`, `num_restarts`, `reason` and, while it waits, `backoff_seconds`

    Raises EngineStartError if the very first start fails: then the settings are wrong, and trying again is no help.
    """
    kind = resolve_kind(settings.engine.kind)
    stop = stop or threading.Event()
    with _stopping_on_signals(stop):
        return _keep_running(settings, kind, active_policy, take_restart_request, on_state, stop)


def _keep_running(
    settings: Settings,
    kind: EngineKind,
    active_policy: Callable[[], tuple[int, Path]],
    take_restart_request: Callable[[], str | None],
    on_state: Callable[[JsonObject], None],
    stop: threading.Event,
) -> int:
    backoff_seconds = FIRST_BACKOFF_SECONDS
    num_restarts = 0
    reason: str | None = None
    while not stop.is_set():
        take_restart_request()  # a request made before this start is answered by it
        version, directory = active_policy()
        state: JsonObject = {
            "kind": kind,
            "pid": None,
            "started_version": version,
            "num_restarts": num_restarts,
            "reason": reason,
        }
        ready_at: float | None = None
        engine: EngineProcess | None = None
        try:
            engine = start_engine(kind, settings.engine, directory, engine_address(settings), engine_log(settings))
            state["pid"] = engine.pid
            _wait_until_ready(engine, settings, version, state, on_state, stop)
            if not stop.is_set():
                ready_at = time.monotonic()
                reason, requested = _watch(engine, state, take_restart_request, on_state, stop)
        except EngineStartError as error:
            if num_restarts == 0 and ready_at is None:
                on_state({**state, "state": "failed", "reason": str(error)})
                raise
            reason, requested = str(error), False
        finally:
            if engine is not None:
                engine.stop()
        if stop.is_set():
            break
        num_restarts += 1
        if requested or (ready_at is not None and time.monotonic() - ready_at > STABLE_SECONDS):
            backoff_seconds = FIRST_BACKOFF_SECONDS
        if not requested:
            on_state({**state, "state": "waiting", "pid": None, "reason": reason, "backoff_seconds": backoff_seconds})
            stop.wait(backoff_seconds)
            backoff_seconds = min(2 * backoff_seconds, MAX_BACKOFF_SECONDS)
    on_state({"state": "stopped", "kind": kind, "pid": None, "num_restarts": num_restarts, "reason": reason})
    return 0


def _wait_until_ready(
    engine: EngineProcess,
    settings: Settings,
    version: int,
    state: JsonObject,
    on_state: Callable[[JsonObject], None],
    stop: threading.Event,
) -> None:
    told_at = -POLL_SECONDS

    def give_up() -> bool:
        nonlocal told_at
        if time.monotonic() - told_at >= POLL_SECONDS:
            on_state({**state, "state": "starting"})
            told_at = time.monotonic()
        return stop.is_set()

    engine.wait_until_healthy(settings.engine.startup_timeout_seconds, give_up)
    if not stop.is_set():
        engine.warm_up()
        engine.label(version)


def _watch(
    engine: EngineProcess,
    state: JsonObject,
    take_restart_request: Callable[[], str | None],
    on_state: Callable[[JsonObject], None],
    stop: threading.Event,
) -> tuple[str | None, bool]:
    """Return why the engine has to be replaced, and whether someone asked for it; (None, False) when told to stop."""
    while not stop.is_set():
        if (code := engine.exit_code()) is not None:
            return f"the {engine.kind} engine exited with code {code}: {engine.log_excerpt()}", False
        if (requested := take_restart_request()) is not None:
            return requested, True
        on_state({**state, "state": "ready"})
        stop.wait(POLL_SECONDS)
    return None, False


@contextmanager
def _stopping_on_signals(stop: threading.Event) -> Iterator[None]:
    """Set `stop` on SIGTERM and SIGINT, where this thread may handle signals at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signal_number: int, frame: FrameType | None) -> None:
        stop.set()

    previous: dict[signal.Signals, Any] = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
