"""Checkpoints and policy directories appear whole or not at all."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from learner import checkpoint
from learner.files import CheckpointWriteError, durable_directory

MEGABYTE = 1_000_000


@contextmanager
def files_at_most(num_bytes: int) -> Iterator[None]:
    """Writing past this size fails with an OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {"weights": torch.randn(7), "moments": {0: torch.zeros(2)}, "num_updates": 3, "floor": None}
    checkpoint.write(tmp_path, 1, state, '{"batch_size": 16}')
    saved = checkpoint.read(tmp_path, 1)
    assert torch.equal(saved["weights"], state["weights"])
    assert {name: saved[name] for name in ("num_updates", "floor")} == {"num_updates": 3, "floor": None}
    assert (tmp_path / "s000001" / "settings.json").read_text() == '{"batch_size": 16}'


def test_full_disk_is_one_sentence_and_leaves_what_was_there(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 1, {"weights": torch.ones(3)}, "{}")
    with files_at_most(MEGABYTE), pytest.raises(CheckpointWriteError, match="what was there is intact"):
        checkpoint.write(tmp_path, 2, {"weights": torch.zeros(MEGABYTE)}, "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["s000001"]
    assert torch.equal(checkpoint.read(tmp_path, 1)["weights"], torch.ones(3))


def test_full_disk_while_replacing_leaves_the_earlier_one(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 1, {"weights": torch.ones(3)}, "{}")
    with files_at_most(MEGABYTE), pytest.raises(CheckpointWriteError):
        checkpoint.write(tmp_path, 1, {"weights": torch.zeros(MEGABYTE)}, "{}")
    assert torch.equal(checkpoint.read(tmp_path, 1)["weights"], torch.ones(3))


def test_full_disk_under_safetensors_leaves_nothing(tmp_path: Path) -> None:
    with files_at_most(MEGABYTE), pytest.raises(CheckpointWriteError), durable_directory(tmp_path / "v1") as directory:
        save_file({"weights": torch.zeros(MEGABYTE)}, directory / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_directory_is_invisible_until_it_is_whole(tmp_path: Path) -> None:
    with durable_directory(tmp_path / "v1") as directory:
        (directory / "part").write_text("one")
        assert not (tmp_path / "v1").exists()
    assert (tmp_path / "v1" / "part").read_text() == "one"


@pytest.mark.parametrize("damage", ["missing", "cut short", "other bytes", "empty"])
def test_unreadable_checkpoint_is_one_sentence(tmp_path: Path, damage: str) -> None:
    checkpoint.write(tmp_path, 1, {"weights": torch.randn(1000)}, "{}")
    path = tmp_path / "s000001" / "state.pt"
    contents = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes({"cut short": contents[:500], "other bytes": b"not a checkpoint", "empty": b""}[damage])
    with pytest.raises(checkpoint.CheckpointMissingError, match="of step 1 cannot be read"):
        checkpoint.read(tmp_path, 1)


def test_prune_keeps_what_is_named_and_removes_leftovers(tmp_path: Path) -> None:
    for name in ("s000001", "s000002", ".s000003.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "a file").touch()
    checkpoint.prune(tmp_path, {"s000002"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a file", "s000002"]
