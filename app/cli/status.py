"""What `tideline serve` shows on the terminal: one line for each thing that happens, and what is still missing."""

from __future__ import annotations

import time

import httpx
from rich.console import Console

from store.settings import Settings

READINESS_PERIOD_SECONDS = 1.0
READINESS_TIMEOUT_SECONDS = 2.0


class ServerStatus:
    """Told of the supervisor's events; asks the app itself whether it is ready."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._url = _base_url(settings)
        self._logs = settings.data_dir.resolve() / "logs"
        self._console = console
        self._http = httpx.Client(base_url=self._url, timeout=READINESS_TIMEOUT_SECONDS)
        self._spinner = console.status("starting")
        self._spinner.start()
        self._next_look = 0.0
        self._ready = False

    def on_event(self, name: str, what: str) -> None:
        """Print that something happened to a child."""
        self._console.print(f"{name:>8}  {what}", markup=False, highlight=False)

    def on_poll(self) -> None:
        """Look whether the server is ready, about once a second, and say so when that changes."""
        if time.monotonic() < self._next_look:
            return
        missing = self._missing_parts()
        self._next_look = time.monotonic() + READINESS_PERIOD_SECONDS
        ready = not missing
        if ready and not self._ready:
            self._spinner.stop()
            self.on_event("server", f"ready at {self._url}/v1 (logs: {self._logs})")
        elif not ready:
            if self._ready:
                self.on_event("server", f"not ready: {missing}")
                self._spinner.start()
            self._spinner.update(f"waiting for {missing}")
        self._ready = ready

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._spinner.stop()
        self._http.close()

    def _missing_parts(self) -> str:
        """Names of the parts that are not ready; empty when all are."""
        try:
            response = self._http.get("/readyz")
            parts = response.json()["parts"]
        except (httpx.HTTPError, ValueError, KeyError):
            return "the app"
        return ", ".join(f"the {name}" for name, state in parts.items() if state != "ready")


def _base_url(settings: Settings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}"
