"""What is there before any process starts: database, model, policy 0."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from app.cli import prepare as preparation
from app.cli.prepare import PreparationError, install_policy, prepare
from store import policies
from store.database import Database
from store.settings import Settings
from store.types import PolicyStatus


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.fixture
def fresh(tmp_path: Path) -> Settings:
    return Settings(profile="micro", data_dir=tmp_path / "data")


def recorded(settings: Settings) -> list[tuple[int, PolicyStatus, str]]:
    database = Database(settings.resolved_database_url)
    records = database.read(policies.list_all)
    database.close()
    return [(record.version, record.status, record.path) for record in records]


def test_policy_0_is_the_model_and_active(fresh: Settings, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "make_model", lambda settings, warm_start: model)
    prepare(fresh)
    directory = fresh.policies_dir / "v000000"
    assert recorded(fresh) == [(0, PolicyStatus.ACTIVE, str(directory))]
    assert (directory / "model.safetensors").read_bytes() == b"weights"
    assert [path.name for path in fresh.policies_dir.iterdir()] == ["v000000"]


def test_second_call_changes_nothing(fresh: Settings, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(preparation, "make_model", lambda settings, warm_start: calls.append(warm_start) or model)
    prepare(fresh, warm_start=True)
    prepare(fresh)
    assert calls == [True]


def test_calls_from_several_processes_make_one_policy(
    fresh: Settings, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "make_model", lambda settings, warm_start: model)
    threads = [threading.Thread(target=prepare, args=(fresh,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorded(fresh)) == 1


def test_call_that_was_cut_off_is_completed_by_the_next(
    fresh: Settings, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("v000000", ".v000000.partial"):
        (fresh.policies_dir / name).mkdir(parents=True)
        (fresh.policies_dir / name / "half.safetensors").write_bytes(b"half")
    monkeypatch.setattr(preparation, "make_model", lambda settings, warm_start: model)
    prepare(fresh)
    names = sorted(path.name for path in (fresh.policies_dir / "v000000").iterdir())
    assert names == ["config.json", "model.safetensors"]


def test_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copytree", no_space)
    with pytest.raises(PreparationError, match="No space left on device"):
        install_policy(model, tmp_path / "policies", 0)
    assert list((tmp_path / "policies").iterdir()) == []


def test_recorded_policy_without_its_directory_is_one_sentence(
    fresh: Settings, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "make_model", lambda settings, warm_start: model)
    prepare(fresh)
    (fresh.policies_dir / "v000000").rename(fresh.policies_dir / "elsewhere")
    with pytest.raises(PreparationError, match="is gone"):
        prepare(fresh)


def test_model_directory_that_cannot_be_read_is_refused(
    fresh: Settings, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PreparationError, match="could not be prepared"):
        prepare(fresh.model_copy(update={"model": str(fresh.data_dir / "nothing")}))
    assert "no such directory" in capfd.readouterr().err
    assert not fresh.policies_dir.exists()


def test_preparation_that_names_no_directory_is_refused(fresh: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(PreparationError, match="named no directory"):
        prepare(fresh)
