"""Ragged multi-turn trajectories and a learner on a database, for the learner's tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from store import migrate, policies
from store.database import Database
from store.settings import Settings, policy_directory_name
from store.types import PolicyRecord, PolicyStatus


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tests share their cores with whatever else runs; bit-exactness needs one fixed number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def served_data_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A data directory with a migrated database and policy 0 active, to be copied."""
    data_dir = tmp_path_factory.mktemp("data")
    migrate.upgrade(f"sqlite:///{data_dir / 'tideline.db'}")
    shutil.copytree(tiny_model_dir, data_dir / "policies" / policy_directory_name(0))
    return data_dir


@pytest.fixture
def data_dir(tmp_path: Path, served_data_dir: Path) -> Path:
    """A fresh data directory that a learner can start on."""
    copied = tmp_path / "data"
    shutil.copytree(served_data_dir, copied)
    database = Database(f"sqlite:///{copied / 'tideline.db'}")
    record = PolicyRecord(
        version=0,
        parent_version=None,
        status=PolicyStatus.ACTIVE,
        path=str(copied / "policies" / policy_directory_name(0)),
        created_at=datetime.now(UTC),
    )
    database.write(lambda session: policies.insert(session, record))
    database.close()
    return copied


@pytest.fixture
def settings(data_dir: Path) -> Settings:
    """Batches of four, no critic warm-up, fp32."""
    return Settings(
        data_dir=data_dir,
        learner={
            "batch_size": 4,
            "min_batch_size": 2,
            "max_wait_seconds": 3600,
            "policy_learning_rate": 1e-3,
            "autocast_bfloat16": False,
            "critic": {"warmup_updates": 0, "num_layers": 2, "learning_rate": 5e-3},
        },
    )


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    """The settings' database, open."""
    opened = Database(settings.resolved_database_url)
    yield opened
    opened.close()
