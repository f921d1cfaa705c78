"""Durable directories: written whole under a temporary name, synced, renamed. A reader sees all of it or nothing."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from store.types import TidelineError


class CheckpointWriteError(TidelineError, OSError):
    """A checkpoint or policy could not be written (disk full, no permission); what was there before is intact."""


class UnreadableFileError(TidelineError, OSError):
    """A file of tensors is missing, torn or not one."""


def read_tensors(path: Path) -> dict[str, Any]:
    """What torch.save wrote to `path`. Raises UnreadableFileError."""
    try:
        # torch takes anything else for its format of old, whose reader raises whatever the bytes make it.
        if not zipfile.is_zipfile(path):
            raise UnreadableFileError(f"{path} is missing, torn or no file of tensors")
        loaded: dict[str, Any] = torch.load(path, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UnreadableFileError(f"{path} cannot be read: {error}") from error
    return loaded


@contextmanager
def durable_directory(destination: Path) -> Iterator[Path]:
    """Yield a temporary directory to fill; on success it becomes `destination` and survives a power cut.

    An earlier `destination` of a step that was never recorded is replaced. Raises CheckpointWriteError.
    """
    partial = destination.with_name(f".{destination.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in [*partial.rglob("*"), partial]:
            _sync(path)
        if destination.exists():
            shutil.rmtree(destination)
        partial.rename(destination)
        _sync(destination.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        # A full disk is a RuntimeError of torch's archive writer, and safetensors has its own kind.
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointWriteError(
            f"{destination} cannot be written: {getattr(error, 'strerror', None) or error}; what was there is intact"
        ) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
