"""GET /v1/models, /v1/learning, /v1/learning/steps, /v1/policies, /healthz, /readyz, /metrics."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from app.api.models import policy_name
from app.service import expire_unjudged
from store import policies, queue, steps, trajectories, workers
from store.database import AsyncDatabase, Database
from store.settings import Settings
from store.types import PolicyRecord, PolicyStatus, StepRecord, TrajectoryStatus
from tests.app.fake_engine import FakeEngine

QUESTION = [{"role": "user", "content": "Hello"}]


def learner_lives(database: Database, state: dict[str, Any], lease_seconds: float = 60) -> None:
    now = datetime.now(UTC)
    database.write(lambda session: workers.acquire(session, "learner", "me", lease_seconds, now))
    database.write(lambda session: workers.heartbeat(session, "learner", "me", state, lease_seconds, now))


def learn_one_step(database: Database) -> None:
    """What the learner does with everything that is ready, without the learning."""
    now = datetime.now(UTC)
    claimed = database.write(lambda session: queue.claim(session, "me", 16, 60, now))
    metrics = {"reward_mean": 0.25, "explained_variance": 0.5, "kept_fraction": 0.99}
    step = StepRecord(1, 1, 0, "policy", now, now, metrics, event="return_to_start")
    policy = PolicyRecord(1, 0, PolicyStatus.STAGED, "v000001", now, metrics={"feedback_to_serving_seconds": 3.5})
    database.write(lambda session: steps.record(session, step, policy, "me", claimed, [], now))
    database.write(lambda session: policies.activate(session, 1, now))


async def test_models_are_the_policy_and_its_aliases(openai_client: AsyncOpenAI) -> None:
    models: Any = await openai_client.models.list()
    assert [model.id for model in models.data] == ["micro", "tideline"]
    assert models.data[0].version == 0
    assert models.data[0].aliases == ["tideline"]
    assert models.data[0].max_model_len == 256
    one = await openai_client.models.retrieve("tideline")
    assert one.owned_by == "tideline"


@pytest.mark.parametrize(("model", "name"), [(None, "micro"), ("/models/my-llama", "my-llama"), ("org/llama", "llama")])
def test_policy_is_named_after_what_it_started_from(settings: Settings, model: str | None, name: str) -> None:
    assert policy_name(settings.model_copy(update={"model": model})) == name


async def test_learning_before_anything_happened(http: httpx.AsyncClient) -> None:
    learning = (await http.get("/v1/learning")).json()
    assert learning["state"] == "stopped"
    assert learning["version"] == 0
    assert learning["num_updates"] == 0
    assert learning["queue"] == {"num_ready": 0, "num_leased": 0, "oldest_age_seconds": None}
    assert learning["last_update"] is None
    assert learning["explained_variance"] is None
    assert learning["engine"]["state"] == "stopped"


async def test_learning_after_one_step(http: httpx.AsyncClient, database: Database) -> None:
    answer = (await http.post("/v1/chat/completions", json={"messages": QUESTION})).json()
    judged = (await http.post("/v1/feedback", json={"trajectory_id": answer["id"], "reward": 0.25})).json()
    learner_lives(database, {"state": "waiting", "swap_pause_seconds": 0.4})
    learn_one_step(database)
    learning = (await http.get("/v1/learning")).json()
    assert learning["state"] == "waiting"
    assert learning["learner"]["swap_pause_seconds"] == 0.4
    assert 0 <= learning["learner"]["heartbeat_age_seconds"] < 30
    assert (learning["version"], learning["num_updates"], learning["num_steps"]) == (1, 1, 1)
    assert learning["last_update"]["metrics"]["reward_mean"] == 0.25
    assert learning["explained_variance"] == 0.5
    assert learning["kept_fraction"] == 0.99
    assert learning["drift"]["event"] == "return_to_start"
    assert learning["feedback_to_serving_seconds"] == 3.5
    life = (await http.get(f"/v1/feedback/{judged['id']}")).json()
    assert (life["status"], life["version"]) == ("trained", 1)

    all_steps = (await http.get("/v1/learning/steps")).json()["data"]
    assert [(step["step"], step["version"], step["kind"]) for step in all_steps] == [(1, 1, "policy")]
    assert (await http.get("/v1/learning/steps?since=1")).json()["data"] == []
    versions = (await http.get("/v1/policies")).json()["data"]
    assert [(policy["version"], policy["status"]) for policy in versions] == [(1, "active"), (0, "retired")]
    assert (await http.get("/v1/policies/1")).json()["parent_version"] == 0
    assert (await http.get("/v1/models")).json()["data"][0]["version"] == 1


async def test_readiness_says_which_part_is_missing(
    http: httpx.AsyncClient, database: Database, engine: FakeEngine
) -> None:
    engine.ready = False
    response = await http.get("/readyz")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    parts = response.json()["parts"]
    assert parts["database"] == "ready"
    assert "engine" in parts["engine"]
    assert "no learner" in parts["learner"]

    learner_lives(database, {"state": "waiting"})
    engine.ready = True
    response = await http.get("/readyz")
    assert response.status_code == 200
    assert response.json() == {
        "status": "ready",
        "parts": {"database": "ready", "engine": "ready", "learner": "ready"},
    }


async def test_learner_without_a_sign_of_life_is_not_ready(http: httpx.AsyncClient, database: Database) -> None:
    learner_lives(database, {"state": "training"}, lease_seconds=-1)
    response = await http.get("/readyz")
    assert response.status_code == 503
    assert "sign of life" in response.json()["parts"]["learner"]
    assert (await http.get("/v1/learning")).json()["state"] == "stopped"


async def test_database_that_is_gone_is_not_ready_but_alive(http: httpx.AsyncClient, settings: Settings) -> None:
    (settings.data_dir / "tideline.db").rename(settings.data_dir / "elsewhere.db")
    response = await http.get("/readyz")
    assert response.status_code == 503
    assert "tideline db upgrade" in response.json()["parts"]["database"]
    assert (await http.get("/healthz")).status_code == 200


async def test_metrics_count_and_gauge(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/chat/completions", json={"messages": QUESTION})).json()
    await http.post("/v1/feedback", json={"trajectory_id": answer["id"], "thumb": "up"})
    text = (await http.get("/metrics")).text
    assert 'tideline_trajectories_total{trainable="true"} 1.0' in text
    assert 'tideline_feedback_total{kind="thumb",status="queued"} 1.0' in text
    assert "tideline_queue_ready 1.0" in text
    assert "tideline_generated_tokens_total 8.0" in text
    assert 'route="/v1/chat/completions",status="200"' in text


async def test_scheduled_expiry_expires_what_nobody_judged(
    http: httpx.AsyncClient, settings: Settings, database: Database
) -> None:
    answer = (await http.post("/v1/chat/completions", json={"messages": QUESTION})).json()
    trajectory_id = answer["choices"][0]["trajectory_id"]
    asynchronous = AsyncDatabase(settings.resolved_database_url)
    await expire_unjudged(asynchronous, timedelta(hours=1).total_seconds())
    assert database.read(lambda session: trajectories.status(session, trajectory_id)) == (
        TrajectoryStatus.SAMPLED,
        None,
    )
    await expire_unjudged(asynchronous, -1)
    await asynchronous.close()
    status = database.read(lambda session: trajectories.status(session, trajectory_id))
    assert status is not None
    assert status[0] is TrajectoryStatus.EXPIRED
