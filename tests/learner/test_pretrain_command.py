"""The command that pretrains the critic: what it says, its exit codes, and that it writes all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from learner import pretrain, pretrain_command, sao
from learner.collate import Sample
from learner.loop import Learner
from learner.models import load_policy
from learner.scored import pretrained_directory, read_store
from store import queue, workers
from store.database import Database
from store.settings import Settings
from store.types import TrajectoryStatus
from tests.learner.publishers import CheckingPublisher
from tests.learner.rollouts import store_judged
from tests.learner.test_loop import one_step, statuses
from tests.learner.test_pretrain import predictable, rewarded
from tests.learner.test_scored import write_lines


@pytest.fixture
def command(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setenv("TIDELINE_DATA_DIR", str(settings.data_dir))
    monkeypatch.setenv("TIDELINE_LEARNER__CRITIC__NUM_LAYERS", "2")
    monkeypatch.setenv("TIDELINE_LEARNER__NUM_THREADS", "1")
    return lambda *arguments: pretrain_command.main(list(arguments))


def write_scored(directory: Path, samples: list[Sample]) -> Path:
    lines = [
        {"token_ids": sample.token_ids_T.tolist(), "loss_mask": [0] * 5 + [1] * 4, "reward": sample.total_reward}
        for sample in samples
    ]
    return write_lines(directory / "scored.jsonl", *lines)


def test_command_trains_from_a_file_and_says_what_it_came_to(
    command: Any, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--from", str(write_scored(tmp_path, predictable(40)))) == 0
    shown = capsys.readouterr().out
    assert "held-out explained variance after" in shown
    assert (pretrained_directory(settings) / pretrain.FILE).is_file()


def test_command_does_not_write_a_critic_that_learned_nothing(
    command: Any, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Taken up, it would spare the learner the warm-up that it needs."""
    nothing_to_learn = rewarded(predictable(40), [0.0] * 40)
    assert command("--from", str(write_scored(tmp_path, nothing_to_learn))) == 2
    assert "no better than an untrained one, so nothing was written" in capsys.readouterr().err
    assert not pretrained_directory(settings).exists()


def test_interrupted_command_writes_nothing(
    command: Any,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sao, "critic_step", interrupt)
    assert command("--from", str(write_scored(tmp_path, predictable(40)))) == 130
    assert capsys.readouterr().err == "tideline: interrupted, so nothing was written\n"
    assert not pretrained_directory(settings).exists()


def test_command_reads_the_store_without_claiming(
    command: Any, database: Database, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command() == 2
    assert "there are 0 scored trajectories; pretraining the critic needs at least 20" in capsys.readouterr().err
    ids = store_judged(database, load_policy(tiny_model_dir), seed=0, count=22)
    assert len(read_store(database)) == 22
    assert command() == 0
    assert set(statuses(database, ids)) == {TrajectoryStatus.READY}


def test_command_refuses_once_learning_has_begun_or_may_at_any_time(
    command: Any,
    settings: Settings,
    database: Database,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = datetime.now(UTC)
    assert database.write(lambda session: workers.acquire(session, "learner", "another", 60, now))
    assert command() == 1
    assert "a learner is running on this database" in capsys.readouterr().err
    database.write(lambda session: workers.release(session, "learner", "another"))
    store_judged(database, load_policy(tiny_model_dir), seed=0, count=4)
    one_step(Learner(settings, database, CheckingPublisher(), "me", lambda: False))
    assert command() == 1
    assert "1 updates have been made" in capsys.readouterr().err
    assert database.read(lambda session: queue.count_judged_by_version(session, 0)) == 0
