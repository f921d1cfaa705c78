"""Simulated users over real HTTP: what they post, how often they err, and how they wait."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_models.style import StyleReward
from simulation.samples import POOL_A, topics
from simulation.schedule import Phase
from simulation.server import Patience, ServerRefusedError, ServerUnreachableError, open_clients
from simulation.users import Crowd, Judgement, ask, be_user, noisy_reward
from tests.simulation.contract_server import ToyServer, serving

PHASE = Phase("cute", POOL_A, 10)


async def run_users(server: ToyServer, crowd: Crowd, num_judgements: int, phase: Phase = PHASE) -> list[Judgement]:
    """Let users loose until they have made enough judgements."""
    judgements: list[Judgement] = []
    enough = asyncio.Event()

    def on_judgement(judgement: Judgement) -> None:
        judgements.append(judgement)
        if len(judgements) >= num_judgements:
            enough.set()

    gate = asyncio.Event()
    gate.set()
    chat, http = open_clients(server.url, timeout_seconds=10, num_connections=crowd.num_users)
    async with chat, http:
        users = [
            asyncio.create_task(be_user(n, crowd, (chat, http), lambda: phase, gate, Patience(20), on_judgement))
            for n in range(crowd.num_users)
        ]
        waiting = asyncio.create_task(enough.wait())
        done, _ = await asyncio.wait([waiting, *users], return_when=asyncio.FIRST_COMPLETED, timeout=30)
        for task in (waiting, *users):
            task.cancel()
        await asyncio.gather(waiting, *users, return_exceptions=True)
        for task in done:
            task.result()
    return judgements


async def test_users_post_the_graded_reward_of_what_they_were_sent() -> None:
    async with serving(ToyServer(learns=False)) as server:
        judgements = await run_users(server, Crowd(num_users=4, max_tokens=20), 40)
        posted = {body["trajectory_id"]: body for body in server.feedback.values()}
        for judgement in judgements:
            assert judgement.text == server.texts[judgement.trajectory_id]
            assert posted[judgement.trajectory_id]["reward"] == StyleReward("cute").score([], judgement.text).reward
            assert posted[judgement.trajectory_id]["source"] == f"user:{judgement.user}"
        assert {judgement.user for judgement in judgements} == {0, 1, 2, 3}
        training_questions = {topic.question for topic in topics("train")}
        for body in server.chats:
            assert body["max_tokens"] == 20
            assert body["temperature"] == 1.0
            assert body["messages"][1]["content"] in training_questions


async def test_users_invert_and_leave_out_judgements_at_the_configured_rates() -> None:
    async with serving(ToyServer(learns=False)) as server:
        crowd = Crowd(num_users=8, wrong_share=0.25, missing_share=0.4)
        judgements = await run_users(server, crowd, 600)
        outcome = Counter(
            "missing" if j.posted_reward is None else "right" if j.posted_reward == j.reward else "wrong"
            for j in judgements
        )
        assert outcome["missing"] / len(judgements) == pytest.approx(0.4, abs=0.08)
        assert outcome["wrong"] / (outcome["wrong"] + outcome["right"]) == pytest.approx(0.25, abs=0.08)
        posted = {body["trajectory_id"] for body in server.feedback.values()}
        assert not posted & {j.trajectory_id for j in judgements if j.posted_reward is None}


async def test_users_wait_out_a_restarting_server_without_judging_twice() -> None:
    async with serving(ToyServer(learns=False, unavailable=25)) as server:
        judgements = await run_users(server, Crowd(num_users=3), 20)
        assert server.unavailable == 0
        per_trajectory = Counter(body["trajectory_id"] for body in server.feedback.values())
        assert set(per_trajectory.values()) == {1}
        assert len(per_trajectory) >= len(judgements)


async def test_patience_honours_retry_after_and_gives_up_in_one_sentence() -> None:
    async with serving(ToyServer(unavailable=10**6, retry_after="3")) as server:
        chat, http = open_clients(server.url, timeout_seconds=10, num_connections=1)
        async with chat, http:
            patience = Patience(give_up_after_seconds=2)
            with pytest.raises(ServerUnreachableError, match="did not answer for 2 s"):
                await patience.call(lambda: ask(chat, Crowd(), [{"role": "user", "content": "?"}], store=True))
            # A wait of 3 s would pass the limit, so no second request was worth making.
            assert server.unavailable == 10**6 - 1


async def test_patience_outlasts_a_server_that_is_not_there_yet() -> None:
    chat, http = open_clients("http://127.0.0.1:1", timeout_seconds=1, num_connections=1)
    async with chat, http:
        patience = Patience(give_up_after_seconds=1.2)
        with pytest.raises(ServerUnreachableError):
            await patience.call(lambda: ask(chat, Crowd(), [{"role": "user", "content": "?"}], store=True))
        assert patience.num_retries >= 1


async def test_patience_does_not_repeat_what_is_refused_for_good() -> None:
    async with serving(ToyServer()) as server:
        chat, http = open_clients(server.url, timeout_seconds=10, num_connections=1)
        async with chat, http:
            patience = Patience(10)

            async def post() -> None:
                await chat.post("/feedback", body={"trajectory_id": "x", "idempotency_key": "k"}, cast_to=object)

            with pytest.raises(ServerRefusedError, match=r"POST /v1/feedback \(404\): unknown trajectory") as raised:
                await patience.call(post)
            assert raised.value.status_code == 404
            assert patience.num_retries == 0
            assert server.num_posts == 1


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32))
def test_noisy_reward_is_the_reward_its_inverse_or_nothing(
    reward: float, wrong: float, missing: float, seed: int
) -> None:
    posted = noisy_reward(reward, Crowd(wrong_share=wrong, missing_share=missing), random.Random(seed))
    assert posted in (None, reward, 1 - reward)
    assert noisy_reward(reward, Crowd(), random.Random(seed)) == reward


@pytest.mark.parametrize("field", ["num_users", "max_tokens", "max_queue"])
def test_crowd_refuses_what_cannot_be(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Crowd(**{field: 0})
    with pytest.raises(ValueError, match="wrong_share"):
        Crowd(wrong_share=1.1)
