"""Training states on disk, one directory per learner step: resuming from one equals never having stopped.

Invariant: a step is recorded in the database only after its directory is durable, so the newest recorded step always
has its checkpoint; directories of steps that were never recorded are leftovers of a crash.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from learner.files import UnreadableFileError, durable_directory, read_tensors
from store.types import TidelineError

STATE_FILE = "state.pt"
SETTINGS_FILE = "settings.json"


class CheckpointMissingError(TidelineError, FileNotFoundError):
    """A recorded step has no readable checkpoint on this machine."""


def checkpoint_path(checkpoints_dir: Path, step: int) -> Path:
    """Directory of learner step `step`: s000042."""
    return checkpoints_dir / f"s{step:06d}"


def write(checkpoints_dir: Path, step: int, state: dict[str, Any], settings_json: str) -> None:
    """Write a state durably. Raises CheckpointWriteError, with earlier checkpoints intact."""
    with durable_directory(checkpoint_path(checkpoints_dir, step)) as directory:
        torch.save(state, directory / STATE_FILE)
        (directory / SETTINGS_FILE).write_text(settings_json)


def read(checkpoints_dir: Path, step: int) -> dict[str, Any]:
    """The state of a step. Raises CheckpointMissingError."""
    try:
        return read_tensors(checkpoint_path(checkpoints_dir, step) / STATE_FILE)
    except UnreadableFileError as error:
        raise CheckpointMissingError(f"the checkpoint of step {step} cannot be read: {error}") from error


def prune(parent: Path, keep: Collection[str]) -> None:
    """Delete every directory below `parent` whose name is not kept, leftovers of a crash included."""
    if not parent.is_dir():
        return
    for directory in parent.iterdir():
        if directory.is_dir() and directory.name not in keep:
            shutil.rmtree(directory, ignore_errors=True)
