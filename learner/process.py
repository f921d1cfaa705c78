"""The learner process: run the one learner of a server until SIGTERM.

Invariant: only one learner learns. It holds a lease that a thread renews with each sign of life; a second learner
waits for it to run out. SIGTERM lets the step in hand finish; its leases are given back.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from datetime import UTC, datetime
from typing import Any

import structlog
import torch
from sqlalchemy.orm import Session

from app.inference.protocol import WeightPublisher
from app.inference.swap import SwapClient
from learner.loop import Learner
from store import migrate, queue, workers
from store.database import Database
from store.errors import DatabaseUnavailableError, LeaseLostError
from store.ids import new_id
from store.settings import Settings
from store.types import TidelineError

ROLE = "learner"
LEASE_SECONDS = 20.0
HEARTBEAT_SECONDS = 1.0
RETRY_SECONDS = 2.0

log = structlog.get_logger("tideline.learner")


class SignOfLife(threading.Thread):
    """Renews the learner's lease and those of its trajectories, also while a long step runs."""

    def __init__(self, settings: Settings, owner: str, stop: threading.Event) -> None:
        super().__init__(name="sign-of-life", daemon=True)
        self._settings = settings
        self._owner = owner
        self._stop_event = stop
        self._state: dict[str, Any] = {"state": "starting"}
        self._ended = threading.Event()

    def tell(self, state: dict[str, Any]) -> None:
        """Merge what the learner says of itself into what the next sign of life shows."""
        self._state = self._state | state

    def run(self) -> None:
        database = Database(self._settings.resolved_database_url)
        lease_seconds = self._settings.learner.lease_seconds
        try:
            while not self._ended.wait(HEARTBEAT_SECONDS):
                now, state = datetime.now(UTC), self._state
                try:
                    database.write(
                        lambda session, now=now, state=state: workers.heartbeat(  # type: ignore[misc]
                            session, ROLE, self._owner, state, LEASE_SECONDS, now
                        )
                    )
                    database.write(
                        lambda session, now=now: queue.renew(session, self._owner, lease_seconds, now)  # type: ignore[misc]
                    )
                except DatabaseUnavailableError as error:
                    log.warning("cannot show a sign of life", error=str(error))
                except LeaseLostError as error:
                    log.error("another learner took over", error=str(error))
                    self._stop_event.set()
        finally:
            database.close()

    def end(self) -> None:
        """Stop renewing and wait for the thread."""
        self._ended.set()
        self.join()


def main() -> None:
    """Run until SIGTERM or SIGINT. Exit codes: 0 stopped, 1 failed (the supervisor then starts it again)."""
    settings = Settings()
    levels = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(levels[settings.log_level]))
    torch.set_num_threads(settings.learner.num_threads or os.cpu_count() or 1)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    socket_path = None if settings.engine.url else settings.engine_socket
    try:
        with SwapClient(settings.engine.url, socket_path, clear_cache=settings.engine.clear_cache_on_swap) as publisher:
            run(settings, publisher, stop)
    except TidelineError as error:
        log.error("learner failed", error=str(error))
        raise SystemExit(1) from error


def run(settings: Settings, publisher: WeightPublisher, stop: threading.Event) -> None:
    """Wait for the role and learn until `stop`. Raises TidelineError for what a restart alone does not mend."""
    owner = f"{socket.gethostname()}:{os.getpid()}:{new_id()}"
    database = Database(settings.resolved_database_url)
    try:
        migrate.check(settings.resolved_database_url)
        if wait_for_role(database, owner, stop):
            learn(settings, database, publisher, owner, stop)
    finally:
        database.close()


def wait_for_role(database: Database, owner: str, stop: threading.Event) -> bool:
    """Become the learner; False if told to stop before another learner's lease ran out."""
    told = False
    while not stop.is_set():
        try:
            if database.write(lambda session: take_role(session, owner, datetime.now(UTC))):
                return True
        except DatabaseUnavailableError as error:
            log.warning("waiting for the database", error=str(error))
        if not told:
            log.info("waiting for another learner's lease to end")
            told = True
        time.sleep(0.5)
    return False


def take_role(session: Session, owner: str, now: datetime) -> bool:
    """Become the learner if nobody is, and give back what the one before still held when it died."""
    before = workers.get(session, ROLE)
    if not workers.acquire(session, ROLE, owner, LEASE_SECONDS, now):
        return False
    if before is not None and before.owner != owner:
        queue.release(session, before.owner, now=now)
    return True


def learn(
    settings: Settings, database: Database, publisher: WeightPublisher, owner: str, stop: threading.Event
) -> None:
    """Run the loop, starting it anew from the last recorded step when the database was away for a while."""
    life = SignOfLife(settings, owner, stop)
    life.start()
    try:
        while not stop.is_set():
            try:
                Learner(settings, database, publisher, owner, stop.is_set, life.tell).run()
            except (DatabaseUnavailableError, LeaseLostError) as error:
                log.warning("starting again from the last recorded step", error=str(error))
                stop.wait(RETRY_SECONDS)
    finally:
        life.end()
        database.write(lambda session: workers.release(session, ROLE, owner))
