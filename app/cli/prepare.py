"""What has to be there before any process of a server starts: the database, the model, policy 0.

    database upgraded -> model directory made -> policies/v000000 copied, synced, renamed -> policy 0 recorded, active

Invariant: policy 0 is recorded only once its directory is whole and durable, so a crash anywhere leaves something that
the next call completes. Calls from several processes wait for each other.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from app.supervisor import DIE_WITH_PARENT
from store import migrate, policies
from store.database import Database
from store.settings import Settings, policy_directory_name
from store.types import PolicyRecord, PolicyStatus, TidelineError

STARTING_VERSION = 0


class PreparationError(TidelineError, RuntimeError):
    """The server cannot start; the message is one sentence that says why."""


def prepare(settings: Settings, warm_start: bool = False, starting_model: Path | None = None) -> None:
    """Make everything that a server starts from; what exists is left alone.

    `warm_start` takes the profile's model after its short supervised pass on styles; `starting_model` is a servable
    directory that was made already. Raises PreparationError, and the store's errors about the database; each is one
    sentence.
    """
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    with _alone(settings.data_dir):
        migrate.upgrade(settings.resolved_database_url)
        database = Database(settings.resolved_database_url)
        try:
            newest = database.read(policies.newest)
            if newest is not None:
                if not Path(newest.path).is_dir():
                    raise PreparationError(
                        f"policy {newest.version} is recorded but its directory {newest.path} is gone"
                    )
                return
            model = starting_model or make_model(settings, warm_start)
            directory = install_policy(model, settings.policies_dir, STARTING_VERSION)
            record = PolicyRecord(
                version=STARTING_VERSION,
                parent_version=None,
                status=PolicyStatus.ACTIVE,
                path=str(directory),
                created_at=(now := datetime.now(UTC)),
                activated_at=now,
            )
            database.write(lambda session: policies.insert(session, record))
        finally:
            database.close()


def make_model(settings: Settings, warm_start: bool) -> Path:
    """Return a servable directory of the settings' model, made by a child process that shows its progress.

    A child, because it needs torch and seconds of memory that the server does not. Raises PreparationError.
    """
    command = [sys.executable, "-m", "simulation.prepare", "--data-dir", str(settings.data_dir.resolve())]
    if settings.model is not None:
        command += ["--model", settings.model]
    else:
        command += ["--profile", settings.profile]
    if warm_start:
        command += ["--warm-start"]
    # Its last line on stdout is the directory; progress and errors go to stderr, straight to the terminal.
    # Threads that spin while they wait make training many times slower on cores that are shared.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=DIE_WITH_PARENT)
    if result.returncode != 0:
        what = f"model {settings.model}" if settings.model is not None else f"profile {settings.profile}"
        raise PreparationError(f"the {what} could not be prepared; its error is above")
    *shown, last = [line for line in result.stdout.splitlines() if line.strip()] or [""]
    for line in shown:
        sys.stderr.write(f"{line}\n")
    directory = Path(last)
    if not last or not directory.is_dir():
        raise PreparationError(f"the model's preparation named no directory, but {last!r}")
    return directory


def install_policy(model: Path, policies_dir: Path, version: int) -> Path:
    """Copy `model` to the directory of `version`: whole and durable, or not there at all. Returns it."""
    policies_dir.mkdir(parents=True, exist_ok=True)
    directory = policies_dir / policy_directory_name(version)
    partial = policies_dir / f".{directory.name}.partial"
    for leftover in (partial, directory):  # of a call that was cut off before the record was written
        if leftover.exists():
            shutil.rmtree(leftover)
    try:
        shutil.copytree(model, partial)
        for path in [*partial.rglob("*"), partial]:
            _sync(path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise PreparationError(f"policy {version} cannot be written to {policies_dir}: {error.strerror}") from error
    partial.rename(directory)
    _sync(policies_dir)
    return directory


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _alone(data_dir: Path) -> Iterator[None]:
    with (data_dir / "prepare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
