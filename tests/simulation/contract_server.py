"""A small real HTTP server that speaks the part of the contract simulated users rely on, and learns in a toy way.

It answers in the style it currently favours (or a random one of the pool), counts feedback as its queue, and makes one
"update" per full batch of feedback: the favoured style becomes the one whose answers were rewarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from reward_models.style import dominant_style
from simulation.samples import topics, write_answer


@dataclass
class ToyServer:
    batch_size: int = 16
    learns: bool = True
    favoured: str | None = None
    version: int = 0
    unavailable: int = 0
    """Requests that are still to be answered 503."""
    retry_after: str = "0.01"
    chats: list[dict[str, Any]] = field(default_factory=list)
    feedback: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_posts: int = 0
    texts: dict[str, str] = field(default_factory=dict)
    ready: list[dict[str, Any]] = field(default_factory=list)
    largest_queue: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def step(self) -> None:
        batch, self.ready = self.ready[: self.batch_size], self.ready[self.batch_size :]
        totals: defaultdict[str | None, float] = defaultdict(float)
        for item in batch:
            totals[dominant_style(self.texts[item["trajectory_id"]])] += item["reward"]
        best = max(totals, key=lambda style: totals[style])
        event = None
        if self.favoured is not None and totals[best] < 0.4 * len(batch):
            self.favoured, event = None, "return_to_start"
        elif totals[best] > 0:
            self.favoured = best
        self.version += 1
        self.steps.append(
            {
                "step": len(self.steps),
                "version": self.version,
                "parent_version": self.version - 1,
                "kind": event or "policy",
                "event": event,
                "metrics": {},
            }
        )


def build_app(server: ToyServer) -> FastAPI:
    app = FastAPI()
    rng = random.Random(0)
    subjects = {topic.question: topic for split in ("train", "held_out") for topic in topics(split)}

    @app.middleware("http")
    async def refuse_while_unavailable(request: Request, call_next):
        if server.unavailable > 0:
            server.unavailable -= 1
            error = {"message": "no engine is ready", "type": "server_error", "param": None, "code": None}
            return JSONResponse({"error": error}, 503, {"retry-after": server.retry_after})
        return await call_next(request)

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> dict[str, Any]:
        server.chats.append(body)
        await asyncio.sleep(0.002)
        offered = body["messages"][0]["content"].rstrip(".").split(": ")[1].split(", ")
        style = server.favoured if server.favoured in offered and rng.random() < 0.9 else rng.choice(offered)
        trajectory_id = str(uuid.uuid4())
        text = write_answer(style, subjects[body["messages"][1]["content"]], rng)
        server.texts[trajectory_id] = text
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        if body.get("store", True):
            choice["trajectory_id"] = trajectory_id
        return {
            "id": f"chatcmpl-{trajectory_id}",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
        }

    @app.post("/v1/feedback", status_code=201)
    async def feedback(body: dict[str, Any]) -> Any:
        server.num_posts += 1
        if body["trajectory_id"] not in server.texts:
            return JSONResponse({"error": {"message": "unknown trajectory"}}, 404)
        if body["idempotency_key"] not in server.feedback:
            server.feedback[body["idempotency_key"]] = body
            server.ready.append(body)
            server.largest_queue = max(server.largest_queue, len(server.ready))
        if server.learns and len(server.ready) >= server.batch_size:
            server.step()
        return {"id": str(uuid.uuid4()), "trajectory_id": body["trajectory_id"], "status": "queued"}

    @app.get("/v1/learning")
    async def learning() -> dict[str, Any]:
        return {"version": server.version, "queue": {"num_ready": len(server.ready)}}

    @app.get("/v1/learning/steps")
    async def steps(since: int = -1) -> dict[str, Any]:
        return {"data": [step for step in server.steps if step["step"] > since]}

    return app


@contextlib.asynccontextmanager
async def serving(server: ToyServer) -> AsyncIterator[ToyServer]:
    """Serve over a real socket for as long as the block runs."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    process = uvicorn.Server(uvicorn.Config(build_app(server), log_level="error", lifespan="off"))
    task = asyncio.create_task(process.serve([listener]))
    while not process.started:
        await asyncio.sleep(0.01)
    try:
        yield server
    finally:
        process.should_exit = True
        await task
        listener.close()


def styles_of(server: ToyServer) -> Counter[str | None]:
    return Counter(map(dominant_style, server.texts.values()))
