"""The thread that owns a decoder, and the HTTP routes in front of it: the subset of vLLM 0.32's that Tideline uses.

Invariant: only the engine thread touches the decoder. Routes hand it work, which runs between two decode steps, so a
swap never falls inside a step and every token is stamped with the weights that sampled it.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from app.inference.checkpoint import WeightsRefusedError
from app.inference.transformers_engine.decoder import DecodedToken, Decoder
from app.inference.transformers_engine.requests import (
    BadRequestError,
    ChatRequest,
    GenerateRequest,
    check_length,
    parse,
    sampling_of,
)
from app.inference.transformers_engine.sampling import Sampling
from store.types import JsonObject

T = TypeVar("T")
Sink = Callable[[DecodedToken | None], None]
"""Takes each token of a sequence, in order, on the engine thread; None if the engine fails."""


class EngineThread:
    """Runs a decoder: `submit` sequences, `call` anything else that needs it. `failure` is set if it dies."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._thread = threading.Thread(target=self._run, name="transformers-engine", daemon=True)
        self.paused = False
        self.failure: BaseException | None = None
        self._on_failure: Callable[[], None] = lambda: None

    def start(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """Begin to decode; `on_failure` is called if the thread dies."""
        self._on_failure = on_failure
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step it is in."""
        self._calls.put(None)
        self._thread.join()

    def call(self, function: Callable[[Decoder], T]) -> Future[T]:
        """Run `function` on the engine thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function(self.decoder))
            except Exception as error:  # noqa: BLE001 - whatever it is belongs to the caller
                future.set_exception(error)

        self._calls.put(run)
        return future

    def submit(self, sequence_id: str, prompt_ids: list[int], sampling: Sampling, sink: Sink) -> None:
        """Queue a sequence."""

        def add(decoder: Decoder) -> None:
            self._sinks[sequence_id] = sink
            decoder.add(sequence_id, prompt_ids, sampling)

        self.call(add)

    def abort(self, sequence_id: str) -> None:
        """Stop sampling a sequence, if it still runs."""

        def forget(decoder: Decoder) -> None:
            if self._sinks.pop(sequence_id, None) is not None:
                decoder.abort(sequence_id)

        self.call(forget)

    def _run(self) -> None:
        try:
            while self._run_calls():
                for token in self.decoder.step():
                    sink = self._sinks[token.sequence_id]
                    if token.finish_reason is not None:
                        del self._sinks[token.sequence_id]
                    sink(token)
        except BaseException as error:
            self.failure = error
            for sink in self._sinks.values():
                sink(None)
            self._on_failure()
            raise

    def _run_calls(self) -> bool:
        """Run what is queued; wait for more while there is nothing to decode. False when it is time to end."""
        while True:
            idle = self.paused or not (self.decoder.num_running or self.decoder.num_waiting)
            try:
                call = self._calls.get(block=idle)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()


class EngineRoutes:
    """The HTTP routes. A weight update is the state between start_weight_update and finish_weight_update."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._updating = False
        self._weights_arrived = False

    def app(self) -> Starlette:
        """The ASGI application."""
        post = [
            ("/v1/chat/completions/render", self.render),
            ("/v1/chat/completions/derender", self.derender),
            ("/inference/v1/generate", self.generate),
            ("/pause", self.pause),
            ("/resume", self.resume),
            ("/start_weight_update", self.start_weight_update),
            ("/update_weights", self.update_weights),
            ("/finish_weight_update", self.finish_weight_update),
            ("/update_weight_version", self.update_weight_version),
        ]
        get = [
            ("/health", self.health),
            ("/weight_info", self.weight_info),
            ("/is_paused", self.is_paused),
            ("/metrics", self.metrics),
        ]
        routes = [Route(path, _answering_errors(endpoint), methods=["POST"]) for path, endpoint in post]
        routes += [Route(path, _answering_errors(endpoint), methods=["GET"]) for path, endpoint in get]
        return Starlette(routes=routes)

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._engine.failure is None else 503)

    async def weight_info(self, request: Request) -> Response:
        version = await self._call(lambda decoder: decoder.version)
        return JSONResponse({"weight_version": "default" if version is None else str(version)})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self._engine.paused})

    async def metrics(self, request: Request) -> Response:
        running, waiting = await self._call(lambda decoder: (decoder.num_running, decoder.num_waiting))
        lines = [
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running {float(running)}",
            "# TYPE vllm:num_requests_waiting gauge",
            f"vllm:num_requests_waiting {float(waiting)}",
        ]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def pause(self, request: Request) -> Response:
        if (mode := request.query_params.get("mode", "abort")) != "keep":
            raise BadRequestError(f"mode: the transformers engine pauses with mode keep, not {mode}", "mode")
        clear_cache = request.query_params.get("clear_cache", "true") == "true"

        def pause(decoder: Decoder) -> None:
            self._engine.paused = True
            if clear_cache:
                decoder.recompute_running()

        await self._call(pause)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        def resume(decoder: Decoder) -> None:
            self._engine.paused = False

        await self._call(resume)
        return JSONResponse({"status": "resumed"})

    async def start_weight_update(self, request: Request) -> Response:
        if self._updating:
            raise BadRequestError("a weight update is already active")
        self._updating, self._weights_arrived = True, False
        return JSONResponse({"message": "Weight update started"})

    async def update_weights(self, request: Request) -> Response:
        path = _string((await _body(request)).get("update_info", {}), "path")
        if not self._updating:
            raise BadRequestError("start_weight_update must be called before update_weights")
        try:
            await self._call(lambda decoder: decoder.load_weights(Path(path)))
        except WeightsRefusedError as error:
            self._updating = False
            raise BadRequestError(str(error), "path") from error
        self._weights_arrived = True
        return JSONResponse({"message": "Weights updated"})

    async def finish_weight_update(self, request: Request) -> Response:
        version = int(_string(await _body(request), "weight_version"))
        if not self._weights_arrived:
            raise BadRequestError("finish_weight_update without any weights")
        self._updating = self._weights_arrived = False
        await self._set_version(version)
        return JSONResponse({"message": "Weight update finished"})

    async def update_weight_version(self, request: Request) -> Response:
        await self._set_version(int(_string(await _body(request), "new_version")))
        return JSONResponse({"success": True})

    async def render(self, request: Request) -> Response:
        chat = parse(ChatRequest, await _body(request))
        decoder = self._engine.decoder  # the tokenizer and the limits never change, so any thread may read them
        try:
            token_ids = decoder.tokenizer.apply_chat_template(
                chat.conversation(),
                add_generation_prompt=chat.add_generation_prompt,
                return_dict=False,
                **(chat.chat_template_kwargs or {}),
            )
        except Exception as error:  # a template is a program of its own: what it raises is the request's fault
            raise BadRequestError(f"messages: the chat template rejected them: {error}", "messages") from error
        asked = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
        fields = chat.sampling_fields(check_length(len(token_ids), asked, decoder.max_model_len))
        parse(GenerateRequest, {"token_ids": token_ids, "sampling_params": {**fields, "n": 1}})
        return JSONResponse(
            {"request_id": f"chatcmpl-{uuid.uuid4().hex}", "token_ids": token_ids, "sampling_params": fields}
        )

    async def derender(self, request: Request) -> Response:
        body = await _body(request)
        token_ids = body["generate_response"]["choices"][0].get("token_ids") or []
        text = self._engine.decoder.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        message = {"role": "assistant", "content": text, "tool_calls": [], "reasoning": None}
        return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    async def generate(self, request: Request) -> Response:
        generate = parse(GenerateRequest, await _body(request))
        decoder = self._engine.decoder
        beyond = [token_id for token_id in generate.token_ids if token_id >= decoder.vocabulary_size]
        if beyond:
            raise BadRequestError(
                f"token_ids: token id {beyond[0]} is outside the vocabulary of {decoder.vocabulary_size}", "token_ids"
            )
        fields = generate.sampling_params
        sampling = sampling_of(fields, check_length(len(generate.token_ids), fields.max_tokens, decoder.max_model_len))
        sequence_id = f"{generate.request_id or 'request'}-{uuid.uuid4().hex}"
        tokens = self._stream(sequence_id, generate.token_ids, sampling)
        if generate.stream:
            return StreamingResponse(self._events(sequence_id, tokens, fields.logprobs), media_type="text/event-stream")
        choices = [_choice(token, decoder, fields.logprobs) async for token in tokens]
        scored: list[Any] | None = None
        if fields.prompt_logprobs is not None:
            scores = await self._call(lambda decoder: decoder.score(generate.token_ids))
            scored = [None] + [
                {str(token_id): {"logprob": score}}
                for token_id, score in zip(generate.token_ids[1:], scores, strict=True)
            ]
        whole = {
            **choices[-1],
            "text": "".join(choice["text"] for choice in choices),
            "token_ids": [token_id for choice in choices for token_id in choice["token_ids"]],
        }
        return JSONResponse({"request_id": sequence_id, "choices": [whole], "prompt_logprobs": scored})

    async def _stream(self, sequence_id: str, prompt_ids: list[int], sampling: Sampling) -> AsyncIterator[DecodedToken]:
        """Yield the tokens of a sequence. Closing it early, as a disconnect does, aborts the sequence."""
        loop = asyncio.get_running_loop()
        received: asyncio.Queue[DecodedToken | None] = asyncio.Queue()
        self._engine.submit(
            sequence_id, prompt_ids, sampling, lambda token: _call_soon(loop, received.put_nowait, token)
        )
        try:
            while True:
                token = await received.get()
                if token is None:
                    raise RuntimeError(f"the engine failed: {self._engine.failure}")
                yield token
                if token.finish_reason is not None:
                    return
        finally:
            self._engine.abort(sequence_id)

    async def _events(
        self, sequence_id: str, tokens: AsyncIterator[DecodedToken], num_logprobs: int | None
    ) -> AsyncIterator[str]:
        try:
            async for token in tokens:
                choice = _choice(token, self._engine.decoder, num_logprobs)
                yield f"data: {json.dumps({'request_id': sequence_id, 'choices': [choice]})}\n\n"
        except RuntimeError as error:
            yield f"data: {json.dumps({'error': {'message': str(error), 'code': 500}})}\n\n"
        finally:
            await tokens.aclose()  # type: ignore[attr-defined]
        yield "data: [DONE]\n\n"

    async def _set_version(self, version: int) -> None:
        def set_version(decoder: Decoder) -> None:
            decoder.version = version

        await self._call(set_version)

    async def _call(self, function: Callable[[Decoder], T]) -> T:
        return await asyncio.wrap_future(self._engine.call(function))


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, argument)


def _choice(token: DecodedToken, decoder: Decoder, num_logprobs: int | None) -> JsonObject:
    """A streamed choice in vLLM's form for `output_mode: text`."""
    choice: JsonObject = {
        "index": 0,
        "text": token.text,
        "token_ids": [token.token_id],
        "finish_reason": token.finish_reason,
        "stop_reason": token.stop_reason,
        "logprobs": None,
        "weight_versions": None,
    }
    if num_logprobs is not None:
        entry = _logprob_entry(token.token_id, token.logprob, decoder)
        entry["top_logprobs"] = [_logprob_entry(token_id, value, decoder) for token_id, value in token.top_logprobs]
        choice["logprobs"] = {"content": [entry]}
    if token.version_spans is not None:
        choice["weight_versions"] = [
            {"version": "default" if span.version < 0 else str(span.version), "start": span.start, "end": span.end}
            for span in token.version_spans
        ]
    return choice


def _logprob_entry(token_id: int, logprob: float, decoder: Decoder) -> JsonObject:
    text = decoder.tokenizer.decode([token_id])
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


def _answering_errors(
    endpoint: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except BadRequestError as error:
            body = {"message": str(error), "type": "BadRequestError", "param": error.param, "code": 400}
            return JSONResponse({"error": body}, status_code=400)

    return answer


async def _body(request: Request) -> JsonObject:
    try:
        body = await request.json()
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body is not a JSON object")
    return body


def _string(body: Any, name: str) -> str:
    value = body.get(name) if isinstance(body, dict) else None
    if not isinstance(value, str):
        raise BadRequestError(f"{name}: a string is required", name)
    return value
