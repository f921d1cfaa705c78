"""A learner process on a fake engine, for tests that kill it: settings from the environment, publications to a file."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import torch

from learner import process
from store.settings import Settings
from tests.learner.publishers import CheckingPublisher

if __name__ == "__main__":
    torch.set_num_threads(1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    process.LEASE_SECONDS = 2.0
    process.HEARTBEAT_SECONDS = 0.2
    process.run(Settings(), CheckingPublisher(log_path=Path(sys.argv[1])), stop)
