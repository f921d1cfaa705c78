"""POST /v1/feedback and GET /v1/feedback/{id}."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.feedback_request import FeedbackRequest, Rating, source_kind
from store import feedback
from store.database import Database

QUESTION = [{"role": "user", "content": "Hello"}]


async def new_answer(http: httpx.AsyncClient, **parameters: Any) -> str:
    response = await http.post("/v1/chat/completions", json={"messages": QUESTION, **parameters})
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


@pytest.mark.parametrize(
    ("judgement", "kind", "reward"),
    [
        ({"reward": 0.8}, "reward", 0.8),
        ({"reward": -1}, "reward", -1.0),
        ({"thumb": "up"}, "thumb", 1.0),
        ({"thumb": "down", "comment": "no"}, "thumb", -1.0),
        ({"rating": {"value": 4, "of": 5}}, "rating", 0.5),
        ({"rating": {"value": 1, "of": 2}}, "rating", -1.0),
    ],
)
async def test_judgement_becomes_one_reward_and_is_queued(
    http: httpx.AsyncClient, judgement: dict[str, Any], kind: str, reward: float
) -> None:
    chat_id = await new_answer(http)
    response = await http.post("/v1/feedback", json={"trajectory_id": chat_id, "tags": {"a": 1}, **judgement})
    assert response.status_code == 201
    receipt = response.json()
    assert receipt["trajectory_id"] == chat_id.removeprefix("chatcmpl-")
    assert receipt["status"] == "queued"
    life = (await http.get(f"/v1/feedback/{receipt['id']}")).json()
    assert life["kind"] == kind
    assert life["reward"] == reward
    assert life["status"] == "queued"
    assert life["version"] is None
    assert life["content"] == {**judgement, "tags": {"a": 1}}
    assert [event["status"] for event in life["history"]][-1] == "queued"
    learning = (await http.get("/v1/learning")).json()
    assert learning["queue"]["num_ready"] == 1


@pytest.mark.parametrize("judgement", [{"comment": "nice"}, {"correction": "better text"}])
async def test_comment_and_correction_are_stored_without_a_reward(
    http: httpx.AsyncClient, judgement: dict[str, Any]
) -> None:
    response = await http.post("/v1/feedback", json={"trajectory_id": await new_answer(http), **judgement})
    assert (response.status_code, response.json()["status"]) == (201, "accepted")
    assert (await http.get("/v1/learning")).json()["queue"]["num_ready"] == 0


async def test_untrainable_answer_says_why_its_feedback_is_dropped(http: httpx.AsyncClient) -> None:
    chat_id = await new_answer(http, top_p=0.5)
    response = await http.post("/v1/feedback", json={"trajectory_id": chat_id, "thumb": "up"})
    assert response.status_code == 201
    assert response.json()["status"] == "dropped"
    assert "top_p" in response.json()["reason"]


async def test_episode_can_be_judged(http: httpx.AsyncClient) -> None:
    chat_id = await new_answer(http, metadata={"episode_id": "run-7"})
    response = await http.post("/v1/feedback", json={"episode_id": "run-7", "reward": 1})
    assert response.status_code == 201
    assert response.json()["trajectory_id"] == chat_id.removeprefix("chatcmpl-")
    unknown = await http.post("/v1/feedback", json={"episode_id": "run-8", "reward": 1})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "trajectory_not_found"


@pytest.mark.parametrize("in_header", [False, True])
async def test_idempotency_key_names_one_feedback(http: httpx.AsyncClient, in_header: bool) -> None:
    judgement = {"trajectory_id": await new_answer(http), "reward": 0.5}
    headers = {"Idempotency-Key": "k1"} if in_header else {}
    keyed = judgement if in_header else {**judgement, "idempotency_key": "k1"}
    first = await http.post("/v1/feedback", json=keyed, headers=headers)
    again = await http.post("/v1/feedback", json=keyed, headers=headers)
    other = await http.post("/v1/feedback", json={**keyed, "reward": 0.4}, headers=headers)
    assert (first.status_code, again.status_code, other.status_code) == (201, 200, 409)
    assert again.json()["id"] == first.json()["id"]
    assert other.json()["error"]["code"] == "idempotency_conflict"


async def test_two_different_idempotency_keys_are_refused(http: httpx.AsyncClient) -> None:
    judgement = {"trajectory_id": await new_answer(http), "reward": 0.5, "idempotency_key": "a"}
    response = await http.post("/v1/feedback", json=judgement, headers={"Idempotency-Key": "b"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "idempotency_key"


async def test_receipt_is_durable_for_another_process(http: httpx.AsyncClient, database: Database) -> None:
    response = await http.post("/v1/feedback", json={"trajectory_id": await new_answer(http), "thumb": "up"})
    life = database.read(lambda session: feedback.get(session, response.json()["id"]))
    assert life is not None
    assert life.reward == 1.0


@pytest.mark.parametrize(
    ("source", "kind"),
    [("user:42", "human"), ("orm:style", "orm"), ("verifier:tests", "verifier"), ("orm", "human"), ("bot:x", "human")],
)
def test_source_tells_its_kind(source: str, kind: str) -> None:
    assert source_kind(source) == kind


@given(st.integers(2, 1000).flatmap(lambda of: st.tuples(st.integers(1, of), st.just(of))))
def test_rating_reward_is_linear_from_worst_to_best(rating: tuple[int, int]) -> None:
    value, of = rating
    reward = Rating(value=value, of=of).reward
    assert -1 <= reward <= 1
    # Mirrored ratings are opposite rewards, and one step up is always the same gain.
    assert reward == pytest.approx(-Rating(value=of + 1 - value, of=of).reward, abs=1e-12)
    if value < of:
        assert Rating(value=value + 1, of=of).reward - reward == pytest.approx(2 / (of - 1), abs=1e-12)


def test_submission_carries_every_field() -> None:
    request = FeedbackRequest(
        trajectory_id="chatcmpl-abc", reward=1, source="orm:x", turn=3, weight=2.5, comment="c", idempotency_key="k"
    )
    submission = request.submission(None)
    assert submission.trajectory_id == "abc"
    assert (submission.source_kind, submission.turn, submission.weight) == ("orm", 3, 2.5)
    assert submission.content == {"reward": 1, "comment": "c"}
    assert submission.idempotency_key == "k"
