"""The fake that stands in for an engine in the app's tests keeps what the protocol promises, as a real engine does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest

from app.inference.client import EngineClient
from app.inference.protocol import EngineRequestError, EngineUnavailableError, GenerationChunk, InferenceEngine
from app.inference.transformers_engine.decoder import Decoder
from app.inference.transformers_engine.server import EngineRoutes, EngineThread
from store.types import JsonObject
from tests.app.fake_engine import FakeEngine

MESSAGES = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(params=["fake", "transformers"])
async def engine(request: pytest.FixtureRequest, tiny_model_dir: Path) -> AsyncIterator[InferenceEngine]:
    """The fake, and a real engine in this process."""
    if request.param == "fake":
        yield FakeEngine(version=3)
        return
    thread = EngineThread(Decoder(tiny_model_dir, max_model_len=200, version=3))
    thread.start()
    async with EngineClient("http://engine", transport=httpx.ASGITransport(EngineRoutes(thread).app())) as client:
        yield client
    thread.stop()


async def generate(engine: InferenceEngine, **options: object) -> list[GenerationChunk]:
    request: JsonObject = {"messages": MESSAGES, **options}
    prompt = await engine.render_chat(request)
    assert prompt.token_ids == tuple(prompt.generate_request["token_ids"])
    return [chunk async for chunk in engine.generate(prompt, "request")]


async def test_stream_has_a_logprob_for_each_token_and_ends_once(engine: InferenceEngine) -> None:
    chunks = await generate(engine, max_tokens=6)
    assert all(len(chunk.token_ids) == len(chunk.logprobs) for chunk in chunks)
    assert all(logprob <= 0 for chunk in chunks for logprob in chunk.logprobs)
    assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [chunk.version_spans is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


async def test_version_spans_cover_every_generated_token(engine: InferenceEngine) -> None:
    chunks = await generate(engine, max_tokens=6)
    num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
    assert chunks[-1].version_spans is not None
    assert [(span.version, span.start, span.end) for span in chunks[-1].version_spans] == [(3, 0, num_tokens)]
    assert await engine.weight_version() == 3


async def test_token_limit_ends_a_stream_with_length(engine: InferenceEngine) -> None:
    chunks = await generate(engine, max_tokens=1)
    assert sum(len(chunk.token_ids) for chunk in chunks) == 1
    assert chunks[-1].finish_reason in ("length", "stop")


async def test_over_long_prompt_is_refused_naming_the_limit(engine: InferenceEngine) -> None:
    with pytest.raises(EngineRequestError, match=r"maximum context length is \d+ tokens"):
        await generate(engine, messages=[{"role": "user", "content": "again and " * 200}])


async def test_closing_a_stream_early_is_allowed(engine: InferenceEngine) -> None:
    prompt = await engine.render_chat({"messages": MESSAGES, "max_tokens": 6})
    async with aclosing(engine.generate(prompt, "left")) as chunks:  # type: ignore[type-var]
        first = await anext(chunks)
    assert len(first.token_ids) >= 1
    assert await generate(engine, max_tokens=2)


async def test_swap_in_the_middle_leaves_two_spans_of_the_fake() -> None:
    engine = FakeEngine(version=3, swap_after=2)
    chunks = await generate(engine)
    assert chunks[-1].version_spans is not None
    assert [(span.version, span.start, span.end) for span in chunks[-1].version_spans] == [(3, 0, 2), (4, 2, 8)]


async def test_absent_engine_is_unavailable(tmp_path: Path) -> None:
    async with EngineClient(socket=tmp_path / "nobody.sock") as nobody:
        for engine in (FakeEngine(ready=False), nobody):
            assert not await engine.is_ready()
            with pytest.raises(EngineUnavailableError):
                await engine.weight_version()
            with pytest.raises(EngineUnavailableError):
                await engine.render_chat({"messages": MESSAGES})
