"""The processes of a server: how each is started, and the order in which they end."""

from __future__ import annotations

import sys

from app.supervisor import ChildSpec
from store.settings import Settings

APP_STREAM_SECONDS = 30
"""How long the app, told to end, waits for the streams it is sending."""


def child_specs(settings: Settings) -> list[ChildSpec]:
    """The children of `tideline serve`. An engine on another host is not ours to run."""
    logs = settings.data_dir.resolve() / "logs"
    command = [sys.executable, "-m", "app.cli"]
    specs = [ChildSpec("app", [*command, "app"], logs / "app.log", drain_seconds=APP_STREAM_SECONDS + 10)]
    if settings.engine.url is None:
        # The engine's own output is in engine.log; this is the process that watches it.
        specs.append(ChildSpec("engine", [*command, "engine"], logs / "engine-process.log", drain_seconds=30))
    specs.append(ChildSpec("learner", [sys.executable, "-m", "learner"], logs / "learner.log", drain_seconds=60))
    return specs


def drain_order(settings: Settings) -> list[str]:
    """The app ends first, so that it finishes its streams; the engine last, for a learner that is publishing."""
    return ["app", "learner", *(["engine"] if settings.engine.url is None else [])]
