"""What the client makes of answers a healthy engine never gives."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import httpx
import pytest

from app.inference.client import EngineClient
from app.inference.protocol import EngineRequestError, EngineUnavailableError, GenerationChunk, RenderedPrompt
from app.inference.wire import engine_address, error_from_status, error_message, parse_weight_version
from store.types import JsonObject

PROMPT = RenderedPrompt((1, 2), {"token_ids": [1, 2], "sampling_params": {"temperature": 0.7}, "cache_salt": None})


def client(answer: Callable[[httpx.Request], httpx.Response], *, prefix_caching: bool = False) -> EngineClient:
    return EngineClient(base_url="http://engine", transport=httpx.MockTransport(answer), prefix_caching=prefix_caching)


def events(*payloads: object) -> httpx.Response:
    lines = "".join(f"data: {p if isinstance(p, str) else json.dumps(p)}\n\n" for p in payloads)
    return httpx.Response(200, text=lines, headers={"content-type": "text/event-stream"})


def choice(**fields: object) -> JsonObject:
    return {"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": None, **fields}]}


async def collect(engine: EngineClient) -> list[GenerationChunk]:
    async with engine:
        return [chunk async for chunk in engine.generate(PROMPT, "id")]


async def test_missing_logprob_is_nan_and_never_a_number() -> None:
    content = [{"token": "a", "logprob": -9999.0}, {"token": "b", "logprob": -0.5}, {"token": "c"}]
    last = {"finish_reason": "length", "weight_versions": [{"version": "4", "start": 0, "end": 3}]}
    answer = choice(token_ids=[7, 8, 9], logprobs={"content": content}, **last)
    (chunk,) = await collect(client(lambda request: events(answer, "[DONE]")))
    assert math.isnan(chunk.logprobs[0])
    assert chunk.logprobs[1] == -0.5
    assert math.isnan(chunk.logprobs[2])


async def test_generate_asks_for_logprobs_and_text_whatever_the_prompt_says() -> None:
    sent: list[JsonObject] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/weight_info":
            return httpx.Response(200, json={"weight_version": "12"})
        sent.append(json.loads(request.content))
        return events(choice(finish_reason="stop", weight_versions=[]), "[DONE]")

    await collect(client(answer))
    await collect(client(answer, prefix_caching=True))
    assert sent[0]["sampling_params"] == {"temperature": 0.7, "logprobs": 0}
    assert (sent[0]["stream"], sent[0]["output_mode"], sent[0]["request_id"]) == (True, "text", "id")
    assert sent[0]["cache_salt"] is None
    assert sent[1]["cache_salt"] == "policy-12"


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: events(choice(text="half")),
        lambda request: events(choice(text="half"), choice(finish_reason="abort"), "[DONE]"),
        lambda request: events({"error": {"message": "EngineCore died", "code": 500}}),
        lambda request: events(choice(finish_reason="stop", weight_versions=[{"version": "default", "start": 0}])),
        lambda request: httpx.Response(503, text="starting"),
    ],
)
async def test_stream_that_does_not_end_properly_is_unavailable(
    answer: Callable[[httpx.Request], httpx.Response],
) -> None:
    with pytest.raises(EngineUnavailableError):
        await collect(client(answer))


async def test_transport_errors_are_unavailable() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("connection reset")

    engine = client(broken)
    assert not await engine.is_ready()
    for call in (engine.weight_version(), engine.render_chat({}), engine.derender_chat({}, PROMPT, (1,))):
        with pytest.raises(EngineUnavailableError, match="connection reset"):
            await call
    with pytest.raises(EngineUnavailableError, match="connection reset"):
        await collect(engine)


async def test_engine_without_a_version_label_is_not_ready() -> None:
    engine = client(lambda request: httpx.Response(200, json={"weight_version": "default"}))
    assert not await engine.is_ready()
    with pytest.raises(EngineUnavailableError, match="not been told its policy version"):
        await engine.weight_version()
    await engine.aclose()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"error": {"message": "too long", "param": "max_tokens"}}, ("too long", "max_tokens")),
        ({"error": "failed to pause"}, ("failed to pause", None)),
        ({"detail": "not here"}, ("not here", None)),
        ({"detail": [{"loc": ["body", "n"], "msg": "bad"}]}, ("bad", "n")),
        (
            {"error": {"message": "1 validation error:\n  {'type': 'x', 'loc': 'body.top_p', 'msg': 'Not a number'}"}},
            ("top_p: Not a number", "top_p"),
        ),
        ([1], ("[1]", None)),
    ],
)
def test_error_message_reads_every_shape_vllm_sends(body: object, expected: tuple[str, str | None]) -> None:
    assert error_message(json.dumps(body).encode()) == expected


def test_error_status_decides_whose_fault_it_is() -> None:
    refused = error_from_status(404, b'{"error": {"message": "no such model"}}')
    assert isinstance(refused, EngineRequestError)
    assert refused.status_code == 404
    assert isinstance(error_from_status(501, b""), EngineRequestError)
    assert isinstance(error_from_status(500, b"oops"), EngineUnavailableError)
    assert parse_weight_version("41") == 41


def test_address_is_a_socket_or_a_url_but_not_both() -> None:
    for arguments in ((None, None), ("http://x", "socket")):
        with pytest.raises(ValueError, match="exactly one"):
            engine_address(*arguments)  # type: ignore[arg-type]
