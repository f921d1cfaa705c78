"""What was acknowledged survives the death of the process that wrote it."""

from __future__ import annotations

import signal
import subprocess
import sys

from store import feedback, trajectories
from store.database import Database

WRITER = """
import sys
from store.database import Database
from tests.store.records import judge, store_trajectory
database = Database(sys.argv[1])
while True:
    trajectory_id = store_trajectory(database)
    print(trajectory_id, judge(database, trajectory_id).id, flush=True)
"""


def test_everything_acknowledged_before_a_kill_is_there(migrated_url: str) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, migrated_url], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = [next(writer.stdout).split() for _ in range(25)]
    writer.send_signal(signal.SIGKILL)
    acknowledged += [line.split() for line in writer.stdout if line.endswith("\n")]
    writer.wait()
    writer.stdout.close()
    assert writer.returncode == -signal.SIGKILL
    database = Database(migrated_url)
    for trajectory_id, feedback_id in acknowledged:
        assert database.read(lambda session, each=trajectory_id: trajectories.get(session, each)) is not None
        life = database.read(lambda session, each=feedback_id: feedback.get(session, each))
        assert life is not None
        assert life.status == "queued"
    database.close()
