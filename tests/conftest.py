"""Fixtures that several suites share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Engines, learners and tests share the cores: a thread that spins while it waits takes them from the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tied-embedding Llama, built once per test run."""
    from tests.tiny_model import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def micro_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warm-started micro model. TIDELINE_TEST_CACHE names a directory that keeps it between test runs."""
    from simulation.prepare import prepare_model

    cache = os.environ.get("TIDELINE_TEST_CACHE")
    directory = Path(cache) if cache else tmp_path_factory.mktemp("micro")
    return prepare_model("micro", directory, warm_start=True)
