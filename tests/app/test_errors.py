"""The one error shape, for every way to go wrong."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.app.fake_engine import FakeEngine

QUESTION = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
FEEDBACK = "/v1/feedback"
SOME_ID = "01890000-0000-7000-8000-000000000000"


def chat(**parameters: Any) -> dict[str, Any]:
    return {"messages": QUESTION, **parameters}


def judge(**parameters: Any) -> dict[str, Any]:
    return {"trajectory_id": SOME_ID, **parameters}


@pytest.mark.parametrize(
    ("path", "body", "status_code", "param"),
    [
        (CHAT, {}, 400, "messages"),
        (CHAT, chat(messages=[]), 400, "messages"),
        (CHAT, chat(messages="hi"), 400, "messages"),
        (CHAT, chat(messages=[{"role": "wizard", "content": "x"}]), 400, "messages[0].role"),
        (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0]"),
        (CHAT, chat(messages=[{"role": "user", "content": 7}]), 400, "messages[0].content"),
        (
            CHAT,
            chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            400,
            "messages[0].content[0].type",
        ),
        (CHAT, chat(temperature=-1), 400, "temperature"),
        (CHAT, chat(temperature=True), 400, "temperature"),
        (CHAT, chat(temperature="hot"), 400, "temperature"),
        (CHAT, chat(top_p=0), 400, "top_p"),
        (CHAT, chat(max_tokens=0), 400, "max_tokens"),
        (CHAT, chat(max_tokens=1.5), 400, "max_tokens"),
        (CHAT, chat(n=0), 400, "n"),
        (CHAT, chat(stop=[""]), 400, "stop[0]"),
        (CHAT, chat(logit_bias={"5": 101}), 400, "logit_bias.5"),
        (CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
        (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
        (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options"),
        (CHAT, chat(stream=True, stream_options={"include_all": True}), 400, "stream_options.include_all"),
        (CHAT, chat(tool_choice="auto"), 400, "tool_choice"),
        (CHAT, chat(metadata={"episode_id": "x" * 129}), 400, "metadata.episode_id"),
        (CHAT, chat(metadata={"episode_id": 5}), 400, "metadata.episode_id"),
        (CHAT, chat(functions=[]), 400, "functions"),
        (CHAT, chat(prompt_logprobs=1), 400, "prompt_logprobs"),
        (CHAT, chat(priority=1), 400, "priority"),
        (CHAT, chat(messages=[{"role": "user", "content": "x" * 500}]), 400, "messages"),
        (CHAT, chat(model="gpt-5"), 404, "model"),
        (FEEDBACK, {"reward": 1}, 400, "trajectory_id"),
        (FEEDBACK, judge(reward=1, episode_id="e"), 400, "trajectory_id"),
        (FEEDBACK, judge(), 400, "reward"),
        (FEEDBACK, judge(reward=1, thumb="up"), 400, "thumb"),
        (FEEDBACK, judge(reward=True), 400, "reward"),
        (FEEDBACK, judge(reward="1"), 400, "reward"),
        (FEEDBACK, judge(reward=1.01), 400, "reward"),
        (FEEDBACK, judge(thumb="sideways"), 400, "thumb"),
        (FEEDBACK, judge(rating={"value": 6, "of": 5}), 400, "rating"),
        (FEEDBACK, judge(rating={"value": 1, "of": 1}), 400, "rating.of"),
        (FEEDBACK, judge(rating={"value": True, "of": 5}), 400, "rating.value"),
        (FEEDBACK, judge(reward=1, weight=0), 400, "weight"),
        (FEEDBACK, judge(reward=1, turn=-1), 400, "turn"),
        (FEEDBACK, judge(reward=1, source=""), 400, "source"),
        (FEEDBACK, judge(reward=1, source="a\0"), 400, "source"),
        (FEEDBACK, judge(reward=1, tag="x"), 400, "tag"),
        (FEEDBACK, judge(reward=1), 404, None),
    ],
)
async def test_bad_request_names_the_field(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status_code: int, param: str | None
) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == status_code, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b'"x"', b"\xff", b'{"messages": NaN}', b'{"x": 1e999}', b'{"x": "\\ud800"}', b"[" * 100_000],
)
@pytest.mark.parametrize("path", [CHAT, FEEDBACK])
async def test_body_that_is_no_json_object_is_refused(http: httpx.AsyncClient, path: str, raw: bytes) -> None:
    response = await http.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("method", "path", "status_code"),
    [
        ("GET", "/nowhere", 404),
        ("DELETE", "/v1/chat/completions", 405),
        ("GET", f"/v1/feedback/{SOME_ID}", 404),
        ("GET", "/v1/feedback/a%00b", 404),
        ("GET", "/v1/models/gpt-5", 404),
        ("GET", "/v1/policies/99999999999999999999", 404),
        ("GET", "/v1/policies/x", 400),
        ("GET", "/v1/learning/steps?since=x", 400),
    ],
)
async def test_path_that_leads_nowhere_has_the_same_shape(
    http: httpx.AsyncClient, method: str, path: str, status_code: int
) -> None:
    response = await http.request(method, path)
    assert response.status_code == status_code
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_over_long_prompt_names_both_lengths(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json=chat(messages=[{"role": "user", "content": "x" * 500}]))
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "400 tokens" in error["message"]
    assert "500 input tokens" in error["message"]


async def test_no_engine_is_503_with_retry_after_and_feedback_still_works(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    answer = await http.post(CHAT, json=chat())
    engine.ready = False
    refused = await http.post(CHAT, json=chat())
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["type"] == "server_error"
    judged = await http.post(FEEDBACK, json={"trajectory_id": answer.json()["id"], "thumb": "up"})
    assert judged.status_code == 201


async def test_unforeseen_failure_is_500_without_a_traceback(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.sampling_defaults = {"temperature": "not a number"}
    response = await http.post(CHAT, json=chat())
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "not a number" not in response.text
    assert response.headers["x-request-id"]
