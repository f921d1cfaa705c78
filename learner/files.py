"""Durable directories: written whole under a temporary name, synced, renamed. A reader sees all of it or nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from store.types import TidelineError


class CheckpointWriteError(TidelineError, OSError):
    """A checkpoint or policy could not be written (disk full, no permission); what was there before is intact."""


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
