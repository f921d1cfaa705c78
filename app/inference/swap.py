"""The learner's side of the engine protocol: put new weights into serving, then prove that they are the ones served.

    pause(keep) -> start_weight_update -> update_weights(path) -> finish_weight_update(version) -> resume -> probe

Invariant: once the engine has been paused, the only way back is a completed swap whose probe matches. After any
failure the engine is left paused, with SwapError, for the process that owns it to restart on the last good version:
a half-loaded model does not roll back.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx

from app.inference.protocol import EngineRequestError, EngineUnavailableError, Probe, SwapError, SwapReport
from app.inference.wire import (
    CONNECT_TIMEOUT_SECONDS,
    ENGINE_LIMITS,
    engine_address,
    error_from_transport,
    json_object,
    parse_weight_version,
    socket_answers,
)
from store.types import JsonObject


class SwapClient:
    """A WeightPublisher over HTTP.

    clear_cache                             recompute running requests under the new weights (else keep their KV)
    max_probe_mean_difference               nats; |mean(engine - learner)| over the probe's continuation
    max_probe_mean_absolute_difference      nats; mean |engine - learner|
    timeout_seconds                         of each single request, the probe included
    """

    def __init__(
        self,
        base_url: str | None = None,
        socket: Path | None = None,
        *,
        clear_cache: bool = False,
        max_probe_mean_difference: float = 0.1,
        max_probe_mean_absolute_difference: float = 0.25,
        timeout_seconds: float = 300.0,
    ) -> None:
        url, uds = engine_address(base_url, socket)
        self._uds = uds
        self._clear_cache = clear_cache
        self._max_mean = max_probe_mean_difference
        self._max_mean_absolute = max_probe_mean_absolute_difference
        self._http = httpx.Client(
            base_url=url,
            transport=httpx.HTTPTransport(uds=uds, limits=ENGINE_LIMITS),
            timeout=httpx.Timeout(timeout_seconds, connect=CONNECT_TIMEOUT_SECONDS),
        )

    def close(self) -> None:
        """Close every connection."""
        self._http.close()

    def __enter__(self) -> SwapClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def weight_version(self) -> int:
        """The policy version of the weights that sample now. Raises EngineUnavailableError."""
        if self._uds is not None and not socket_answers(self._uds):
            raise EngineUnavailableError(f"no engine answers on {self._uds}")
        try:
            return parse_weight_version(json_object(self._http.get("/weight_info")).get("weight_version"))
        except httpx.HTTPError as error:
            raise error_from_transport(error) from error

    def publish(self, path: Path, version: int, probe: Probe) -> SwapReport:
        """Swap the weights in directory `path` into serving as `version` and probe them.

        Raises EngineUnavailableError when no engine answers (nothing was changed) and SwapError when the engine
        may now hold wrong weights; it is then left paused, or serving weights its owner must replace.
        """
        self.weight_version()  # an engine that is down or not labelled yet must be found before it is paused
        started = time.monotonic()
        try:
            self._post("/pause", params={"mode": "keep", "clear_cache": str(self._clear_cache).lower()})
            self._post("/start_weight_update")
            self._post("/update_weights", {"update_info": {"path": str(path.resolve())}})
            self._post("/finish_weight_update", {"weight_version": str(version)})
            self._post("/resume")
            pause_seconds = time.monotonic() - started
            logprobs = self.score(probe.prompt_ids, probe.continuation_ids)
        except (httpx.HTTPError, EngineRequestError, EngineUnavailableError) as error:
            raise SwapError(f"the swap to policy version {version} failed: {error}") from error
        mean, mean_absolute = probe_differences(logprobs, probe.expected_logprobs)
        # Written so that a NaN fails.
        if not (abs(mean) <= self._max_mean and mean_absolute <= self._max_mean_absolute):
            raise SwapError(
                f"the engine does not serve policy version {version} as the learner has it: its probe "
                f"log-probabilities differ by {mean:+.4f} on average (allowed {self._max_mean}) and by "
                f"{mean_absolute:.4f} in absolute value (allowed {self._max_mean_absolute})"
            )
        return SwapReport(version, pause_seconds, time.monotonic() - started, mean, mean_absolute)

    def score(self, prompt_ids: tuple[int, ...], continuation_ids: tuple[int, ...]) -> tuple[float, ...]:
        """The engine's own log-probability, at temperature 1, of each continuation token after the prompt.

        Raises EngineRequestError, EngineUnavailableError and httpx.HTTPError.
        """
        body = {
            "token_ids": [*prompt_ids, *continuation_ids],
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False},
            "stream": False,
        }
        scored: list[dict[str, Any] | None] = self._post("/inference/v1/generate", body)["prompt_logprobs"]
        logprobs = []
        for token_id, candidates in zip(continuation_ids, scored[len(prompt_ids) :], strict=True):
            if candidates is None or str(token_id) not in candidates:
                raise EngineUnavailableError(f"the engine did not score token {token_id} of the probe")
            logprobs.append(float(candidates[str(token_id)]["logprob"]))
        return tuple(logprobs)

    def _post(self, path: str, body: JsonObject | None = None, params: dict[str, str] | None = None) -> JsonObject:
        return json_object(self._http.post(path, json=body, params=params))


def probe_differences(engine: tuple[float, ...], learner: tuple[float, ...]) -> tuple[float, float]:
    """Return (mean, mean absolute) of engine - learner, in nats per token.

    Raises SwapError when the two do not score the same number of tokens, or none.
    """
    if len(engine) != len(learner) or not learner:
        raise SwapError(f"the engine scored {len(engine)} probe tokens where the learner has {len(learner)}")
    differences = [mine - theirs for mine, theirs in zip(engine, learner, strict=True)]
    return sum(differences) / len(differences), sum(map(abs, differences)) / len(differences)
