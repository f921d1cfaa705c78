"""Named points at which tests kill the process, to prove that a crash there loses and repeats nothing."""

from __future__ import annotations

import os
import signal

FAULT_POINT = "TIDELINE_FAULT_POINT"
"""Environment variable that names the point to die at."""
POINTS = ("claimed", "trained", "checkpointed", "recorded", "published")


def reach(point: str) -> None:
    """Die here, as `kill -9` would have it, if this is the point asked for."""
    if os.environ.get(FAULT_POINT) == point:
        os.kill(os.getpid(), signal.SIGKILL)
