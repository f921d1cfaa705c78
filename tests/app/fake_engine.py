"""An InferenceEngine in a few lines, at the only boundary where the app's tests fake anything.

It says a fixed sentence, one token a word, and then the end-of-text token (id 0, no text), which is a generated token
like any other. Versions, the pace, and failures are set by the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from app.inference.protocol import EngineRequestError, EngineUnavailableError, GenerationChunk, RenderedPrompt
from store.types import JsonObject, VersionSpan

SENTENCE = ("The", " tide", " returns", " to", " the", " line", ".")
END_OF_TEXT = 0
FIRST_WORD = 1000
LOGPROB = -0.5
MAX_MODEL_LEN = 400


@dataclass
class FakeEngine:
    """`pace` is taken before each token after the first; `fail_after` tokens the engine is lost; `generated` counts
    the tokens of each stream; `closed` holds the streams that were closed before their end."""

    version: int = 0
    ready: bool = True
    pace_seconds: float = 0.0
    swap_after: int | None = None
    fail_after: int | None = None
    sampling_defaults: JsonObject = field(default_factory=dict)
    requests: list[JsonObject] = field(default_factory=list)
    prompts: list[RenderedPrompt] = field(default_factory=list)
    generated: dict[str, int] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    parsed_message: JsonObject | None = None

    async def is_ready(self) -> bool:
        return self.ready

    async def weight_version(self) -> int:
        self._check_up()
        return self.version

    async def render_chat(self, request: JsonObject) -> RenderedPrompt:
        self._check_up()
        self.requests.append(request)
        token_ids = tuple(ord(character) for message in request["messages"] for character in str(message["content"]))
        limit = request.get("max_completion_tokens") or request.get("max_tokens")
        if len(token_ids) + (limit or 1) > MAX_MODEL_LEN:
            raise EngineRequestError(
                f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, your prompt contains "
                f"{len(token_ids)} input tokens.",
                400,
                "input_tokens",
            )
        if request.get("priority"):
            raise EngineRequestError("Got priority 1 but priority scheduling is off", 400, "priority")
        names = ("temperature", "top_p", "top_k", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias")
        sampling = {name: request[name] for name in names if request.get(name) is not None}
        sampling |= {name: value for name, value in self.sampling_defaults.items() if name not in sampling}
        if limit is not None:
            sampling["max_tokens"] = limit
        if request.get("logprobs"):
            sampling["logprobs"] = request.get("top_logprobs") or 0
        return RenderedPrompt(token_ids, {"token_ids": list(token_ids), "sampling_params": sampling})

    async def generate(self, prompt: RenderedPrompt, request_id: str) -> AsyncGenerator[GenerationChunk, None]:
        self._check_up()
        self.prompts.append(prompt)
        sampling = prompt.generate_request["sampling_params"]
        words = [*enumerate(SENTENCE, FIRST_WORD), (END_OF_TEXT, "")]
        num_tokens = min(len(words), sampling.get("max_tokens", len(words)))
        versions: list[int] = []
        try:
            for position, (token_id, text) in enumerate(words[:num_tokens]):
                if position and self.pace_seconds:
                    await asyncio.sleep(self.pace_seconds)
                if self.fail_after is not None and position >= self.fail_after:
                    raise EngineUnavailableError("the engine closed the stream before its last chunk")
                self._check_up()
                if position == self.swap_after:
                    self.version += 1
                versions.append(self.version)
                self.generated[request_id] = position + 1
                last = position + 1 == num_tokens
                entry = {"token": text, "logprob": LOGPROB, "bytes": list(text.encode()), "top_logprobs": []}
                yield GenerationChunk(
                    token_ids=(token_id,),
                    logprobs=(LOGPROB,),
                    text=text,
                    finish_reason=("stop" if token_id == END_OF_TEXT else "length") if last else None,
                    version_spans=_spans(versions) if last else None,
                    top_logprobs=(entry,) if sampling.get("logprobs") is not None else None,
                )
        except (GeneratorExit, asyncio.CancelledError):
            self.closed.append(request_id)
            raise

    async def derender_chat(
        self, request: JsonObject, prompt: RenderedPrompt, token_ids: tuple[int, ...]
    ) -> JsonObject:
        return self.parsed_message or {"role": "assistant", "content": "".join(SENTENCE), "tool_calls": []}

    def _check_up(self) -> None:
        if not self.ready:
            raise EngineUnavailableError("no engine answers (it is starting)")


def _spans(versions: list[int]) -> tuple[VersionSpan, ...]:
    starts = [index for index, version in enumerate(versions) if index == 0 or versions[index - 1] != version]
    ends = [*starts[1:], len(versions)]
    return tuple(VersionSpan(versions[start], start, end) for start, end in zip(starts, ends, strict=True))
