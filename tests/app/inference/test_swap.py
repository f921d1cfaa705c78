"""A swap that goes wrong leaves the engine paused; the numbers of a probe."""

from __future__ import annotations

import json
import math
from pathlib import Path

import httpx
import pytest

from app.inference.protocol import EngineUnavailableError, Probe, SwapError
from app.inference.swap import SwapClient, probe_differences

PROBE = Probe((1, 2), (3, 4), (-1.0, -2.0))
ROUTES = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


def publish(monkeypatch: pytest.MonkeyPatch, fail_at: str | None, scores: list[float]) -> list[str]:
    """Publish against an engine that fails at one route. Returns the routes that were asked, in order."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/weight_info":
            return httpx.Response(200, json={"weight_version": "6"})
        asked.append(path)
        if path == fail_at:
            return httpx.Response(500, json={"error": {"message": "out of memory"}})
        scored = [None, None, *({str(token): {"logprob": score}} for token, score in zip((3, 4), scores, strict=True))]
        return httpx.Response(200, text=json.dumps({"prompt_logprobs": scored}))

    monkeypatch.setattr(httpx, "HTTPTransport", lambda **_: httpx.MockTransport(answer))
    with SwapClient(base_url="http://engine") as swap:
        try:
            report = swap.publish(Path("policy"), 7, PROBE)
        except SwapError as error:
            return [*asked, str(error)]
    assert (report.version, report.probe_mean_difference) == (7, pytest.approx(0.0))
    return asked


def test_publish_goes_through_the_whole_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert publish(monkeypatch, None, [-1.1, -1.9]) == [*ROUTES, "/inference/v1/generate"]


@pytest.mark.parametrize("route", ROUTES)
def test_failure_at_any_step_is_a_swap_error_and_never_resumes(monkeypatch: pytest.MonkeyPatch, route: str) -> None:
    *asked, message = publish(monkeypatch, route, [-1.0, -2.0])
    assert asked == ROUTES[: ROUTES.index(route) + 1]
    assert "version 7 failed" in message
    assert "out of memory" in message


@pytest.mark.parametrize("scores", [[-1.5, -2.5], [-1.4, -1.6], [math.nan, -2.0]])
def test_probe_that_differs_fails_the_swap(monkeypatch: pytest.MonkeyPatch, scores: list[float]) -> None:
    assert "does not serve policy version 7" in publish(monkeypatch, None, scores)[-1]


def test_engine_that_is_not_there_is_unavailable_and_untouched(tmp_path: Path) -> None:
    with SwapClient(socket=tmp_path / "none.sock") as swap, pytest.raises(EngineUnavailableError):
        swap.publish(tmp_path, 7, PROBE)


def test_probe_differences_are_the_mean_and_the_mean_absolute() -> None:
    assert probe_differences((-1.0, -3.0), (-2.0, -2.0)) == (0.0, 1.0)
    with pytest.raises(SwapError, match="scored 1 probe tokens"):
        probe_differences((-1.0,), (-1.0, -2.0))
    with pytest.raises(SwapError, match="scored 0 probe tokens"):
        probe_differences((), ())
