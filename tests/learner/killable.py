"""A learner process on a fake engine, for tests that kill it: settings from the environment, publications to a file.

Started by a fork server that has imported everything already: importing takes longer than learning does here.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from learner import process
from store.settings import Settings
from tests.learner.publishers import CheckingPublisher


def start_learner(environment: dict[str, str], published: Path, log: Path) -> BaseProcess:
    """Start a learner with these variables on top of the environment; it runs until SIGTERM."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    learner = context.Process(target=run, args=(environment, published, log))
    learner.start()
    return learner


def run(environment: dict[str, str], published: Path, log: Path) -> None:
    """What the process does."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    process.LEASE_SECONDS = 2.0
    process.HEARTBEAT_SECONDS = 0.2
    process.run(Settings(), CheckingPublisher(log_path=published), stop)
