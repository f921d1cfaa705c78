"""What the rest of the system may ask of an inference engine: tokens in, tokens out, and exact weight swaps.

Both engines (vLLM's API server, and the small transformers engine) speak the same HTTP protocol, a subset of
vLLM 0.32's, so there is one client for generation (`client.EngineClient`, async, used by the app) and one for
weight swaps (`swap.SwapClient`, sync, used by the learner).

Life of a swap:  pause -> start_weight_update -> update_weights -> finish_weight_update(version) -> resume -> probe
A failed swap never resumes: the engine is restarted on the last good version.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from store.types import JsonObject, TidelineError, VersionSpan


class EngineUnavailableError(TidelineError, ConnectionError):
    """No engine answers: it is starting, restarting, or gone."""


class EngineRequestError(TidelineError, ValueError):
    """The engine refused a request; `status_code` is its HTTP status, `param` the field at fault if it named one."""

    def __init__(self, message: str, status_code: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.param = param

    def __reduce__(self) -> tuple[type[EngineRequestError], tuple[str, int, str | None]]:
        return type(self), (str(self), self.status_code, self.param)


class SwapError(TidelineError, RuntimeError):
    """A weight swap failed or its probe did not match; the engine must be restarted on the last good version."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A chat request as prompt token ids and the generate request (sampling parameters included) the engine made."""

    token_ids: tuple[int, ...]
    generate_request: JsonObject


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """Newly generated tokens of one stream.

    `logprobs` is one per token id, under the distribution that was sampled from (after temperature).
    The last chunk, and only it, has `finish_reason` and `version_spans` (over all tokens of the stream).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    version_spans: tuple[VersionSpan, ...] | None = None
    top_logprobs: tuple[JsonObject, ...] | None = None


class InferenceEngine(Protocol):
    """An engine as the app sees it. Every method raises EngineUnavailableError when no engine answers."""

    async def is_ready(self) -> bool:
        """True when the engine answers its health check."""

    async def weight_version(self) -> int:
        """The policy version of the weights that sample now."""

    async def render_chat(self, request: JsonObject) -> RenderedPrompt:
        """Apply the chat template to an OpenAI chat request. Raises EngineRequestError for a bad request."""

    def generate(self, prompt: RenderedPrompt, request_id: str) -> AsyncIterator[GenerationChunk]:
        """Sample a continuation, streamed. Closing the iterator early stops the generation in the engine."""

    async def derender_chat(
        self, request: JsonObject, prompt: RenderedPrompt, token_ids: tuple[int, ...]
    ) -> JsonObject:
        """Parse generated tokens into an OpenAI assistant message (content, tool_calls, reasoning)."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A fixed prompt and continuation with the learner's own log-probability of each continuation token."""

    prompt_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]
    expected_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SwapReport:
    """Durations of a swap in seconds, and how far the engine's probe log-probabilities are from the learner's."""

    version: int
    pause_seconds: float
    total_seconds: float
    probe_mean_difference: float
    probe_mean_absolute_difference: float


class WeightPublisher(Protocol):
    """An engine as the learner sees it."""

    def publish(self, path: Path, version: int, probe: Probe) -> SwapReport:
        """Swap the weights in `path` into serving as `version` and probe them.

        Raises EngineUnavailableError when no engine answers (nothing was changed) and SwapError when the engine
        may now hold wrong weights.
        """
