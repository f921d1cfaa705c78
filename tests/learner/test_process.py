"""The learner's process: killed at every boundary of a step, told to stop, and in the presence of a second one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from learner import process
from learner.faults import FAULT_POINT, POINTS
from learner.models import load_policy
from store import policies, queue, steps, trajectories, workers
from store.database import Database
from store.settings import Settings
from store.types import PolicyStatus, TrajectoryStatus
from tests.learner.killable import start_learner
from tests.learner.rollouts import store_judged


@pytest.fixture
def start(data_dir: Path, tmp_path: Path) -> Iterator[Callable[..., BaseProcess]]:
    started: list[BaseProcess] = []

    def start_one(fault_point: str = "") -> BaseProcess:
        environment = {
            FAULT_POINT: fault_point,
            "TIDELINE_DATA_DIR": str(data_dir),
            "TIDELINE_LEARNER__BATCH_SIZE": "4",
            "TIDELINE_LEARNER__MAX_WAIT_SECONDS": "3600",
            "TIDELINE_LEARNER__AUTOCAST_BFLOAT16": "false",
            "TIDELINE_LEARNER__POLICY_LEARNING_RATE": "0.001",
            "TIDELINE_LEARNER__CRITIC__WARMUP_UPDATES": "0",
            "TIDELINE_LEARNER__CRITIC__NUM_LAYERS": "1",
        }
        started.append(start_learner(environment, tmp_path / "published", tmp_path / "learner.log"))
        return started[-1]

    yield start_one
    for each in started:
        each.kill()
        each.join()
        each.close()


def exit_code(learner: BaseProcess) -> int | None:
    learner.join(120)
    return learner.exitcode


def wait_until(condition: Callable[[], Any], learner: BaseProcess, log: Path) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert learner.is_alive(), log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def test_killed_at_every_boundary_nothing_is_trained_twice_and_nothing_is_lost(
    start: Callable[..., BaseProcess], database: Database, tiny_model_dir: Path, tmp_path: Path
) -> None:
    num_batches = 3
    ids = store_judged(database, load_policy(tiny_model_dir), seed=0, count=4 * num_batches)
    recorded = []
    for point in POINTS:
        assert exit_code(start(point)) == -signal.SIGKILL, (tmp_path / "learner.log").read_text()
        recorded.append(database.read(steps.count))
    # A step counts from its record on: killed before, it never was; killed after, the next learner goes on from it.
    # The last one finds that step's policy not yet served, and dies between serving it and saying so.
    assert recorded == [0, 0, 0, 1, 1]
    last = start()
    wait_until(lambda: database.read(steps.count) == num_batches, last, tmp_path / "learner.log")
    wait_until(lambda: active_version(database) == num_batches, last, tmp_path / "learner.log")
    last.terminate()
    assert exit_code(last) == 0, (tmp_path / "learner.log").read_text()
    trained = [
        trajectory_id
        for step in range(1, num_batches + 1)
        for trajectory_id in database.read(lambda session, step=step: steps.trajectory_ids(session, step))
    ]
    assert sorted(trained) == sorted(ids)
    for trajectory_id in ids:
        status = database.read(lambda session, id=trajectory_id: trajectories.status(session, id))
        assert status is not None
        assert status[0] is TrajectoryStatus.TRAINED
    records = database.read(policies.list_all)
    assert [each.version for each in records] == list(range(num_batches, -1, -1))
    assert [each.status for each in records] == [PolicyStatus.ACTIVE, *[PolicyStatus.RETIRED] * num_batches]
    published = [int(line) for line in (tmp_path / "published").read_text().split()]
    assert published == sorted(published)
    assert set(published) == set(range(1, num_batches + 1))
    stats = database.read(lambda session: queue.stats(session, datetime.now(UTC)))
    assert (stats.num_ready, stats.num_leased) == (0, 0)


def active_version(database: Database) -> int | None:
    active = database.read(policies.active)
    return None if active is None else active.version


def test_second_learner_waits_and_a_dead_ones_trajectories_are_free_at_once(
    database: Database, tiny_model_dir: Path
) -> None:
    store_judged(database, load_policy(tiny_model_dir), seed=0, count=3)
    now = datetime.now(UTC)
    assert database.write(lambda session: process.take_role(session, "first", now))
    claimed = database.write(lambda session: queue.claim(session, "first", 3, 10_000, now))
    assert len(claimed) == 3
    assert not database.write(lambda session: process.take_role(session, "second", now))
    assert database.read(lambda session: queue.stats(session, now)).num_ready == 0
    database.write(lambda session: workers.release(session, process.ROLE, "first"))
    assert database.write(lambda session: process.take_role(session, "second", datetime.now(UTC)))
    assert database.read(lambda session: queue.stats(session, now)).num_ready == 3


def test_python_m_learner_says_in_one_sentence_that_there_is_no_database(tmp_path: Path) -> None:
    environment = os.environ | {"TIDELINE_DATA_DIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-m", "learner"], env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert "there is no database" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_settings_of_the_environment_reach_the_learner(settings: Settings) -> None:
    assert settings.learner.batch_size == 4
    assert settings.learner.critic.warmup_updates == 0
