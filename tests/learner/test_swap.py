"""One step served by a real engine: the learner's checkpoint, its swap over the socket and its probe fit together."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.inference.launcher import EngineAddress, start_engine
from app.inference.swap import SwapClient
from learner.loop import Learner
from store import policies
from store.database import Database
from store.settings import EngineSettings, Settings, policy_directory_name
from store.types import PolicyStatus
from tests.learner.rollouts import store_judged

READY_SECONDS = 120


@pytest.mark.slow
def test_step_is_served_by_a_real_engine(settings: Settings, database: Database, tmp_path: Path) -> None:
    engine_settings = EngineSettings(kind="transformers", max_model_len=256, num_threads=1)
    served = settings.policies_dir / policy_directory_name(0)
    address = EngineAddress(socket=settings.engine_socket)
    engine = start_engine("transformers", engine_settings, served, address, tmp_path / "engine.log")
    try:
        engine.wait_until_healthy(READY_SECONDS)
        engine.warm_up()
        engine.label(0)
        with SwapClient(socket=settings.engine_socket) as publisher:
            learner = Learner(settings, database, publisher, "learner", should_stop=lambda: False)
            for version in (1, 2):
                store_judged(database, learner.state.policy, seed=version, count=4, version=version - 1)
                batch = learner.claim_batch()
                assert batch is not None
                learner.step(batch)
                active = database.read(policies.active)
                assert active is not None
                assert (active.version, active.status) == (version, PolicyStatus.ACTIVE)
                assert publisher.weight_version() == version
    finally:
        engine.stop()
