"""POST /v1/chat/completions, streaming and not, as OpenAI's clients expect it.

Invariant: the last byte of an answer is sent after its trajectories are durable (services.sampling ends a choice only
then), and the first byte only once the engine has answered, so that what it refuses is an HTTP error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, TypeVar

import structlog
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from app.api.bodies import read_body
from app.api.chat_request import ChatRequest
from app.api.dependencies import services_of
from app.api.errors import ApiError, describe_error, error_body
from app.api.models import check_model_name, policy_name
from app.services.sampling import Admission, ChatEvent, ChoiceEnd, ChoiceText
from store.types import JsonObject

router = APIRouter()
T = TypeVar("T")

MAX_EPISODE_ID_CHARACTERS = 128
CLIENT_CLOSED_REQUEST = 499
"""Status in logs and metrics of a request whose client left (nginx's number); nobody receives it."""


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation. Every answer becomes a trajectory that feedback can judge."""
    services = services_of(request)
    chat, body = await read_body(request, ChatRequest)
    check_model_name(services.settings, chat.model)
    admission = await services.chat.admit(
        body,
        num_choices=chat.n or 1,
        keeps_trajectories=chat.store is not False,
        parses_tools=chat.parses_tools,
        episode_id=_episode_id(chat, request),
    )
    form = AnswerForm(admission, policy_name(services.settings))
    events = services.chat.sample(admission)
    if not chat.stream:
        answer = await _unless_disconnected(request, form.whole(events))
        if answer is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(answer, headers=form.headers())
    first = await _unless_disconnected(request, events.__anext__())
    if first is None:
        await events.aclose()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    include_usage = chat.stream_options is not None and bool(chat.stream_options.include_usage)
    return StreamingResponse(
        form.stream(first, events, include_usage), media_type="text/event-stream", headers=form.headers()
    )


class AnswerForm:
    """Shapes the events of one admitted request into OpenAI's answer."""

    def __init__(self, admission: Admission, model: str) -> None:
        self._admission = admission
        self._model = model

    def headers(self) -> dict[str, str]:
        """Tideline's headers, known before the first token."""
        headers = {"x-policy-version": str(self._admission.admitted_version)}
        if self._admission.keeps_trajectories:
            headers["x-trajectory-id"] = self._admission.trajectory_ids[0]
        return headers

    async def whole(self, events: AsyncGenerator[ChatEvent, None]) -> JsonObject:
        """The answer to a request that does not stream."""
        num_choices = len(self._admission.trajectory_ids)
        texts = [""] * num_choices
        logprobs: list[list[JsonObject] | None] = [None] * num_choices
        ends: list[ChoiceEnd] = []
        async with aclosing(events) as open_events:
            async for event in open_events:
                if isinstance(event, ChoiceEnd):
                    ends.append(event)
                    continue
                texts[event.index] += event.text
                if event.logprobs is not None:
                    logprobs[event.index] = [*(logprobs[event.index] or ()), *event.logprobs]
        ends.sort(key=lambda end: end.index)
        choices = [
            {
                "index": end.index,
                "message": _message(end, texts[end.index]),
                "logprobs": _logprobs(logprobs[end.index]),
                **_ending(end),
            }
            for end in ends
        ]
        return {**self._envelope("chat.completion"), "choices": choices, "usage": self._usage(ends)}

    async def stream(
        self, first: ChatEvent, events: AsyncGenerator[ChatEvent, None], include_usage: bool
    ) -> AsyncGenerator[str, None]:
        """Server-sent events of a request that streams. An error after the first byte is an event of its own."""
        ends: list[ChoiceEnd] = []
        usage = {"usage": None} if include_usage else {}
        try:
            async with aclosing(events) as open_events:
                for index in range(len(self._admission.trajectory_ids)):
                    yield self._chunk([_delta(index, {"role": "assistant", "content": ""})], **usage)
                event: ChatEvent | None = first
                while event is not None:
                    if isinstance(event, ChoiceText):
                        choice = _delta(event.index, {"content": event.text}, logprobs=_logprobs(event.logprobs))
                        yield self._chunk([choice], **usage)
                    else:
                        if event.message is not None:
                            yield self._chunk([_delta(event.index, _message_delta(event.message))], **usage)
                        yield self._chunk([{**_delta(event.index, {}), **_ending(event)}], **usage)
                        ends.append(event)
                    event = await anext(open_events, None)
        except Exception as error:  # noqa: BLE001 - the status line is gone; the error itself is all that can be sent
            structlog.get_logger("tideline.http").warning("stream failed", error=str(error))
            status_code, message, param, code = describe_error(error)
            yield _server_sent(error_body(status_code, message, param, code))
            return
        if include_usage:
            yield self._chunk([], usage=self._usage(ends))
        yield "data: [DONE]\n\n"

    def _envelope(self, kind: str) -> JsonObject:
        return {
            "id": f"chatcmpl-{self._admission.trajectory_ids[0]}",
            "object": kind,
            "created": int(self._admission.created_at.timestamp()),
            "model": self._model,
        }

    def _chunk(self, choices: list[JsonObject], **more: object) -> str:
        return _server_sent({**self._envelope("chat.completion.chunk"), "choices": choices, **more})

    def _usage(self, ends: list[ChoiceEnd]) -> JsonObject:
        prompt_tokens = len(self._admission.prompt.token_ids)
        completion_tokens = sum(end.num_tokens for end in ends)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }


def _episode_id(chat: ChatRequest, request: Request) -> str | None:
    """The episode that a request belongs to, from its metadata or its header. Raises ApiError (400)."""
    named = (chat.metadata or {}).get("episode_id")
    param = "metadata.episode_id"
    if named is None:
        named, param = request.headers.get("x-episode-id"), "x-episode-id"
    if named is None:
        return None
    if not isinstance(named, str) or not 1 <= len(named) <= MAX_EPISODE_ID_CHARACTERS or "\0" in named:
        raise ApiError(400, f"{param}: a string of 1 to {MAX_EPISODE_ID_CHARACTERS} characters is needed", param)
    return named


async def _unless_disconnected(request: Request, answer: Coroutine[Any, Any, T]) -> T | None:
    """The result of `answer`, or None if the client goes away first; `answer` is then cancelled and has ended."""
    answering = asyncio.create_task(answer)
    leaving = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not answering.done():
            answering.cancel()
            await asyncio.wait({answering})
    return None if answering.cancelled() else answering.result()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _server_sent(body: JsonObject) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _delta(index: int, delta: JsonObject, logprobs: JsonObject | None = None) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _logprobs(entries: Sequence[JsonObject] | None) -> JsonObject | None:
    return None if entries is None else {"content": list(entries), "refusal": None}


def _ending(end: ChoiceEnd) -> JsonObject:
    return {
        "finish_reason": end.finish_reason,
        "stop_reason": end.stop_reason,
        "trajectory_id": end.trajectory_id,
        "policy_versions": [asdict(span) for span in end.version_spans],
    }


def _message(end: ChoiceEnd, text: str) -> JsonObject:
    """The assistant message: the engine's parse of it if there are tools, else exactly the text that was sampled."""
    if end.message is None:
        return {"role": "assistant", "content": text, "refusal": None}
    message = {name: value for name, value in end.message.items() if value not in (None, [])}
    return {"role": "assistant", "content": None, "refusal": None, **message}


def _message_delta(message: JsonObject) -> JsonObject:
    """A parsed message as one delta; each tool call needs its position."""
    delta = {name: message[name] for name in ("content", "reasoning") if message.get(name)}
    calls = [{"index": position, **call} for position, call in enumerate(message.get("tool_calls") or ())]
    return {**delta, "tool_calls": calls} if calls else delta
