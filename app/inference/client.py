"""The app's side of the engine protocol: render, generate and derender over HTTP, tokens in and tokens out.

Invariant: the token ids, log-probabilities and version spans handed out are exactly those the engine sampled.
Nothing is re-tokenised, and a log-probability the engine could not give is NaN, never a made-up number.

vLLM 0.32 sends -9999.0 both for a missing log-probability and for minus infinity; neither can be a sampled
token's log-probability, so both become NaN here and the store quarantines the trajectory.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from app.inference.protocol import (
    EngineRequestError,
    EngineUnavailableError,
    GenerationChunk,
    RenderedPrompt,
)
from app.inference.wire import (
    CONNECT_TIMEOUT_SECONDS,
    ENGINE_LIMITS,
    engine_address,
    error_from_status,
    error_from_transport,
    json_object,
    parse_weight_version,
)
from store.types import JsonObject, VersionSpan

MISSING_LOGPROB = -9999.0


class EngineClient:
    """An InferenceEngine over HTTP, on a Unix socket or at a URL.

    `prefix_caching` says that the engine reuses KV blocks: requests are then salted with the policy version, so
    that none reads blocks that other weights computed. `transport` replaces the network (httpx.ASGITransport).
    """

    def __init__(
        self,
        base_url: str | None = None,
        socket: Path | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        prefix_caching: bool = False,
    ) -> None:
        url, uds = engine_address(base_url, socket)
        self._prefix_caching = prefix_caching
        # No pool limit: the engine queues, and a queue here would be invisible. No read timeout: a request
        # waits its turn in the engine, however long, and a dead engine closes the connection.
        self._http = httpx.AsyncClient(
            base_url=url,
            transport=transport or httpx.AsyncHTTPTransport(uds=uds, limits=ENGINE_LIMITS),
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_SECONDS),
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def is_ready(self) -> bool:
        """True when the engine is healthy and its weights carry a policy version."""
        try:
            response = await self._http.get("/health", timeout=CONNECT_TIMEOUT_SECONDS)
            if response.status_code != 200:
                return False
            await self.weight_version()
        except (httpx.HTTPError, EngineUnavailableError, EngineRequestError):
            return False
        return True

    async def weight_version(self) -> int:
        """The policy version of the weights that sample now. Raises EngineUnavailableError."""
        try:
            response = await self._http.get("/weight_info", timeout=CONNECT_TIMEOUT_SECONDS)
        except httpx.HTTPError as error:
            raise error_from_transport(error) from error
        return parse_weight_version(json_object(response).get("weight_version"))

    async def render_chat(self, request: JsonObject) -> RenderedPrompt:
        """Apply the chat template to an OpenAI chat request.

        `model` is left out: which name the policy goes by is the app's business, not the engine's.
        Raises EngineRequestError with the engine's message and the field at fault, EngineUnavailableError.
        """
        body = {name: value for name, value in request.items() if name not in ("model", "stream", "stream_options")}
        generate_request = await self._post("/v1/chat/completions/render", body)
        return RenderedPrompt(tuple(generate_request["token_ids"]), generate_request)

    async def generate(self, prompt: RenderedPrompt, request_id: str) -> AsyncIterator[GenerationChunk]:
        """Sample a continuation, streamed. Closing the iterator closes the connection, which aborts in the engine.

        Raises EngineRequestError if the engine refuses the request and EngineUnavailableError if it goes away
        before the last chunk, or ends the request itself because it is being stopped.
        """
        body, wants_logprobs = await self._generate_body(prompt, request_id)
        finished = False
        try:
            async with self._http.stream("POST", "/inference/v1/generate", json=body) as response:
                if response.status_code != 200:
                    raise error_from_status(response.status_code, await response.aread())
                async for event in _server_sent_events(response):
                    for choice in _choices(event):
                        chunk = _generation_chunk(choice, wants_logprobs)
                        if chunk.finish_reason == "abort":
                            raise EngineUnavailableError("the engine was stopped in the middle of the stream")
                        finished = chunk.finish_reason is not None
                        yield chunk
        except httpx.HTTPError as error:
            raise error_from_transport(error) from error
        if not finished:
            raise EngineUnavailableError("the engine closed the stream before its last chunk")

    async def derender_chat(
        self, request: JsonObject, prompt: RenderedPrompt, token_ids: tuple[int, ...]
    ) -> JsonObject:
        """Parse generated tokens into an OpenAI assistant message (content, tool_calls, reasoning).

        The content is decoded from the tokens again, so it keeps a matched stop string that the streamed text
        leaves out. Raises EngineRequestError, EngineUnavailableError.
        """
        body = {
            "generate_response": {
                "request_id": str(prompt.generate_request.get("request_id", "derender")),
                "choices": [{"index": 0, "token_ids": list(token_ids), "finish_reason": "stop"}],
            },
            "prompt_token_ids": list(prompt.token_ids),
            "prompt_tokens": len(prompt.token_ids),
            "chat_request": {name: value for name, value in request.items() if name not in ("model", "stream_options")},
        }
        response = await self._post("/v1/chat/completions/derender", body)
        message: JsonObject = response["choices"][0]["message"]
        return message

    async def _generate_body(self, prompt: RenderedPrompt, request_id: str) -> tuple[JsonObject, bool]:
        """Return the generate request, and whether its author asked for log-probabilities."""
        sampling = dict(prompt.generate_request.get("sampling_params") or {})
        wants_logprobs = sampling.get("logprobs") is not None
        if not wants_logprobs:
            sampling["logprobs"] = 0
        body = {
            **prompt.generate_request,
            "request_id": request_id,
            "token_ids": list(prompt.token_ids),
            "sampling_params": sampling,
            "stream": True,
            "stream_options": None,
            "output_mode": "text",
        }
        body.pop("model", None)
        if self._prefix_caching:
            salt = body.get("cache_salt")
            body["cache_salt"] = f"policy-{await self.weight_version()}" + (f"-{salt}" if salt else "")
        return body, wants_logprobs

    async def _post(self, path: str, body: JsonObject) -> JsonObject:
        try:
            response = await self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise error_from_transport(error) from error
        return json_object(response)


async def _server_sent_events(response: httpx.Response) -> AsyncIterator[JsonObject]:
    """Yield the JSON object of every `data:` line up to `[DONE]`. Raises the protocol's error for an error event."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        payload = line[len("data:") :].strip()
        if payload == "[DONE]":
            return
        event = json.loads(payload)
        if "error" in event:
            error = event["error"]
            code = error.get("code") if isinstance(error, dict) else None
            raise error_from_status(code if isinstance(code, int) else 500, payload.encode())
        yield event


def _choices(event: JsonObject) -> list[JsonObject]:
    choices: list[JsonObject] = event.get("choices", [])
    return choices


def _generation_chunk(choice: JsonObject, wants_logprobs: bool) -> GenerationChunk:
    entries: list[JsonObject] = (choice.get("logprobs") or {}).get("content") or []
    spans: list[Any] | None = choice.get("weight_versions")
    finish_reason = choice.get("finish_reason")
    return GenerationChunk(
        token_ids=tuple(choice.get("token_ids") or ()),
        logprobs=tuple(_logprob(entry) for entry in entries),
        text=choice.get("text") or "",
        finish_reason=finish_reason,
        stop_reason=choice.get("stop_reason"),
        version_spans=_version_spans(spans or []) if finish_reason is not None else None,
        top_logprobs=tuple(entries) if wants_logprobs else None,
    )


def _logprob(entry: JsonObject) -> float:
    value = float(entry.get("logprob", MISSING_LOGPROB))
    return value if value > MISSING_LOGPROB else math.nan


def _version_spans(spans: list[Any]) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(parse_weight_version(span["version"]), int(span["start"]), int(span["end"])) for span in spans
    )
