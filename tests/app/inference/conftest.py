"""Real engines for the contract and replay tests: each kind is started once per test run, by `run_engine` itself."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from app.inference.serve import run_engine
from store.settings import EngineSettings, Settings
from store.types import JsonObject
from tests.app.inference.models import build_policy

READY_SECONDS = 240.0
MAX_MODEL_LEN = 256


@dataclass
class RunningEngine:
    """An engine kept running by `run_engine`, and the part of the database that it talks to."""

    settings: Settings
    policy: tuple[int, Path]
    restart_requests: list[str] = field(default_factory=list)
    state: JsonObject = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    @property
    def kind(self) -> str:
        return self.settings.engine.kind

    @property
    def socket(self) -> Path:
        return self.settings.engine_socket

    def start(self) -> None:
        self.thread = threading.Thread(
            target=run_engine,
            args=(
                self.settings,
                lambda: self.policy,
                lambda: self.restart_requests.pop(0) if self.restart_requests else None,
                lambda state: setattr(self, "state", state),
                self.stop,
            ),
        )
        self.thread.start()
        self.wait_for_restart(-1)

    def restart(self, version: int, directory: Path) -> None:
        """Have it restarted on another policy, as the learner does after a failed swap."""
        num_restarts = self.state["num_restarts"]
        self.policy = (version, directory)
        self.restart_requests.append("the test asked for it")
        self.wait_for_restart(num_restarts)

    def wait_for_restart(self, num_restarts_before: int) -> None:
        """Return once an engine is ready that was started after that many restarts."""
        deadline = time.monotonic() + READY_SECONDS
        while not (self.state.get("state") == "ready" and self.state["num_restarts"] > num_restarts_before):
            assert self.thread is not None
            assert self.thread.is_alive(), self.state
            assert time.monotonic() < deadline, self.state
            time.sleep(0.1)


@pytest.fixture(scope="session", autouse=True)
def _single_threaded_reference() -> Iterator[None]:
    """The reference model is tiny: more threads only take the cores from the engine under test."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def tied_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policies") / "tied", seed=0, tied=True)


@pytest.fixture(
    scope="session",
    params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)],
)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tied_policy: Path
) -> Iterator[RunningEngine]:
    """A running engine of each kind, on the tied policy as version 0. Tests may restart it and must say on what."""
    kind = request.param
    if kind == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    settings = Settings(
        data_dir=tmp_path_factory.mktemp(kind),
        engine=EngineSettings(kind=kind, max_model_len=MAX_MODEL_LEN, kv_cache_gib=0.1, num_threads=1),
    )
    running = RunningEngine(settings, (0, tied_policy))
    running.start()
    yield running
    running.stop.set()
    assert running.thread is not None
    running.thread.join(60)
    assert not running.thread.is_alive()
    assert running.state["state"] == "stopped"
    assert not running.socket.exists()
