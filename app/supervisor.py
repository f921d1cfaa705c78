"""Keeps a server's child processes running, and ends them in order.

    started -> running -> (exited) -> waiting -> started -> ...
                   \\-> draining, on SIGTERM or SIGINT, one child after another in the order given -> ended

Invariant: no child outlives the supervisor. Each is in a session of its own, so that a terminal's Ctrl-C reaches only
the supervisor, which then ends them in order; and each is told to stop should the supervisor be killed (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

CONFIGURATION_ERROR_CODE = 2
"""A child that exits with this is set up wrongly; starting it again would not help."""
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
STABLE_SECONDS = 60.0
"""A child that ran this long has recovered: its next crash waits the shortest back-off again."""
POLL_SECONDS = 0.1
MAX_LOG_BYTES = 16 << 20
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to keep running; `drain_seconds` is how long it may take to end after SIGTERM."""

    name: str
    command: Sequence[str]
    log: Path
    drain_seconds: float


class Child:
    """One process of a ChildSpec, and the next one after it should it crash."""

    def __init__(self, spec: ChildSpec, environment: Mapping[str, str]) -> None:
        self.spec = spec
        self.num_restarts = 0
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._backoff_seconds = FIRST_BACKOFF_SECONDS
        self._start_at = 0.0
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process; what it writes is appended to its log."""
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        if self.spec.log.exists() and self.spec.log.stat().st_size > MAX_LOG_BYTES:
            self.spec.log.replace(self.spec.log.with_suffix(".log.1"))
        with self.spec.log.open("ab") as output:
            self._log_start = output.seek(0, os.SEEK_END)
            self._process = subprocess.Popen(
                self.spec.command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=DIE_WITH_PARENT,
            )
        self._started_at = time.monotonic()

    def poll(self) -> int | None:
        """The exit code of a process that has just ended (told once), else None. Schedules its next start."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        _signal_group(self._process, signal.SIGKILL)  # what it left behind in its session
        self._process = None
        now = time.monotonic()
        if now - self._started_at > STABLE_SECONDS:
            self._backoff_seconds = FIRST_BACKOFF_SECONDS
        self._start_at = now + self._backoff_seconds
        self._backoff_seconds = min(2 * self._backoff_seconds, MAX_BACKOFF_SECONDS)
        return code

    def restart_if_due(self) -> bool:
        """Start it again once its back-off is over. True when it did."""
        if self._process is not None or time.monotonic() < self._start_at:
            return False
        self.num_restarts += 1
        self.start()
        return True

    def stop(self, hurry: threading.Event) -> None:
        """SIGTERM and wait; SIGKILL to its whole session after `drain_seconds`, or at once when `hurry` is set."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.spec.drain_seconds
        while self._process.poll() is None and time.monotonic() < deadline and not hurry.is_set():
            time.sleep(POLL_SECONDS)
        _signal_group(self._process, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def last_words(self, num_lines: int = 1) -> str:
        """The last lines that this run of it wrote."""
        with self.spec.log.open("rb") as file:
            file.seek(self._log_start)
            lines = deque((line.strip() for line in file if line.strip()), maxlen=num_lines)
        return b"\n".join(lines).decode("utf-8", "replace")


class Supervisor:
    """Runs children until told to stop. `on_event` is told (child name, what happened) for people to read.

    Children start in the order given and drain in `drain_order` (their names).
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        drain_order: Sequence[str],
        environment: Mapping[str, str],
        on_event: Callable[[str, str], None],
        on_poll: Callable[[], None] = lambda: None,
    ) -> None:
        self.children = {spec.name: Child(spec, environment) for spec in specs}
        self._drain_order = drain_order
        self._on_event = on_event
        self._on_poll = on_poll
        self._stop = threading.Event()
        self._hurry = threading.Event()

    def stop(self) -> None:
        """End the children in order and let `run` return. A second call does not wait for them."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def run(self) -> int:
        """Keep the children running until `stop`, SIGTERM or SIGINT. Returns 0, or 2 for a misconfigured child."""
        code = 0
        with _on_signals(self.stop):
            try:
                for child in self.children.values():
                    child.start()
                    self._on_event(child.spec.name, f"started (process {child.pid})")
                while not self._stop.is_set():
                    for child in self.children.values():
                        if self._watch(child) == CONFIGURATION_ERROR_CODE:
                            code = CONFIGURATION_ERROR_CODE
                            self._stop.set()
                    self._on_poll()
                    self._stop.wait(POLL_SECONDS)
            finally:
                self._drain()
        return code

    def _watch(self, child: Child) -> int | None:
        code = child.poll()
        if code == CONFIGURATION_ERROR_CODE:
            self._on_event(child.spec.name, f"cannot run as configured: {child.last_words()}")
        elif code is not None:
            self._on_event(child.spec.name, f"exited with code {code}: {child.last_words()} (log: {child.spec.log})")
        elif child.restart_if_due():
            self._on_event(child.spec.name, f"restarted (process {child.pid})")
        return code

    def _drain(self) -> None:
        for name in self._drain_order:
            child = self.children[name]
            if child.pid is not None:
                self._on_event(name, "stopping")
                child.stop(self._hurry)
                self._on_event(name, "stopped")


@contextmanager
def _on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM and SIGINT, where this thread may handle signals at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signal_number: int, frame: FrameType | None) -> None:
        stop()

    previous: dict[signal.Signals, Any] = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _signal_group(process: subprocess.Popen[bytes], signal_number: int) -> None:
    try:
        os.killpg(process.pid, signal_number)
    except ProcessLookupError:
        pass  # all of them are gone already
    except PermissionError:
        process.send_signal(signal_number)  # macOS refuses a group with a zombie in it


def die_with_parent() -> None:
    """To run in a child between fork and exec, on Linux: SIGTERM should its parent die."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


DIE_WITH_PARENT: Callable[[], None] | None = die_with_parent if sys.platform == "linux" else None
"""`preexec_fn` of a child that must not outlive its parent; None where the system cannot promise it."""
