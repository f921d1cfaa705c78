"""The service behind a real uvicorn on a real socket: streaming, disconnects, draining."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvicorn
from openai import AsyncOpenAI

from app.service import create_app
from store import trajectories
from store.database import Database
from store.settings import Settings
from store.types import Trajectory
from tests.app.fake_engine import SENTENCE, FakeEngine

QUESTION: Any = [{"role": "user", "content": "Tell me about the sea."}]


@pytest.fixture
async def server(settings: Settings, engine: FakeEngine) -> AsyncIterator[uvicorn.Server]:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(settings, engine=engine), log_level="warning", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    async with asyncio.timeout(10):
        while not server.started:
            await asyncio.sleep(0.01)
    yield server
    server.should_exit = True
    await serving
    bound.close()


@pytest.fixture
def url(server: uvicorn.Server) -> str:
    port = server.servers[0].sockets[0].getsockname()[1]
    return f"http://127.0.0.1:{port}"


async def stored(database: Database, trajectory_id: str) -> Trajectory:
    async with asyncio.timeout(5):
        while True:
            trajectory = database.read(lambda session: trajectories.get(session, trajectory_id))
            if trajectory is not None:
                return trajectory
            await asyncio.sleep(0.02)


async def test_stream_arrives_while_it_is_sampled_and_can_be_judged_at_its_end(
    url: str, engine: FakeEngine, database: Database
) -> None:
    engine.pace_seconds = 0.05
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        stream = await client.chat.completions.create(model="tideline", messages=QUESTION, stream=True)
        progress = []
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                progress.append(max(engine.generated.values()))
            if chunk.choices[0].finish_reason:
                key = chunk.id.removeprefix("chatcmpl-")
                assert database.read(lambda session, key=key: trajectories.get(session, key)) is not None
    assert progress == sorted(progress)
    assert progress[0] < len(SENTENCE) // 2, "the first text came only when nearly all was sampled"
    async with httpx.AsyncClient(base_url=url) as http:
        judged = await http.post("/v1/feedback", json={"trajectory_id": key, "thumb": "up"})
    assert judged.status_code == 201


async def test_client_that_leaves_a_stream_stops_the_engine(url: str, engine: FakeEngine, database: Database) -> None:
    engine.pace_seconds = 0.1
    body = {"messages": QUESTION, "stream": True}
    async with (
        httpx.AsyncClient(base_url=url) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        trajectory_id = response.headers["x-trajectory-id"]
        async for line in response.aiter_lines():
            if " tide" in line:
                break
    trajectory = await stored(database, trajectory_id)
    assert engine.closed == [trajectory_id]
    assert not trajectory.trainable
    assert trajectory.untrainable_reason == "the client went away before the end"
    assert trajectory.finish_reason == "abort"
    assert 2 <= trajectory.num_generated < len(SENTENCE)
    assert len(trajectory.behaviour_logprobs) == trajectory.num_generated
    assert [(span.version, span.end) for span in trajectory.version_spans] == [(0, trajectory.num_generated)]


async def test_client_that_leaves_before_the_answer_stops_the_engine(
    url: str, engine: FakeEngine, database: Database
) -> None:
    engine.pace_seconds = 0.2
    async with httpx.AsyncClient(base_url=url, timeout=0.5) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/v1/chat/completions", json={"messages": QUESTION})
    (trajectory_id,) = engine.generated
    assert not (await stored(database, trajectory_id)).trainable
    assert engine.closed == [trajectory_id]


async def test_partial_answer_over_a_swap_admits_that_its_span_is_not_exact(
    url: str, engine: FakeEngine, database: Database
) -> None:
    engine.pace_seconds, engine.swap_after = 0.1, 1
    body = {"messages": QUESTION, "stream": True}
    async with (
        httpx.AsyncClient(base_url=url) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        trajectory_id = response.headers["x-trajectory-id"]
        async for line in response.aiter_lines():
            if " tide" in line:
                break
    reason = (await stored(database, trajectory_id)).untrainable_reason
    assert reason is not None
    assert "version span" in reason


async def test_server_told_to_stop_finishes_the_stream_it_is_sending(
    server: uvicorn.Server, url: str, engine: FakeEngine
) -> None:
    engine.pace_seconds = 0.05
    body = {"messages": QUESTION, "stream": True}
    async with (
        httpx.AsyncClient(base_url=url) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        server.should_exit = True
        rest = [line async for line in lines]
    assert "data: [DONE]" in rest
    await asyncio.sleep(0.2)
    async with httpx.AsyncClient(base_url=url) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get("/healthz")
