"""POST /v1/chat/completions, judged by the official client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from store import trajectories
from store.database import Database
from store.types import Trajectory, TrajectoryStatus, VersionSpan
from tests.app.fake_engine import END_OF_TEXT, FIRST_WORD, SENTENCE, FakeEngine

TEXT = "".join(SENTENCE)
NUM_TOKENS = len(SENTENCE) + 1
QUESTION: Any = [{"role": "user", "content": "Tell me about the sea."}]


def stored(database: Database, trajectory_id: str) -> Trajectory:
    trajectory = database.read(lambda session: trajectories.get(session, trajectory_id))
    assert trajectory is not None
    return trajectory


def status_of(database: Database, trajectory_id: str) -> tuple[TrajectoryStatus, str | None]:
    status = database.read(lambda session: trajectories.status(session, trajectory_id))
    assert status is not None
    return status


async def test_answer_has_openais_shape_and_tidelines_additions(openai_client: AsyncOpenAI, engine: FakeEngine) -> None:
    engine.version = 7
    raw = await openai_client.chat.completions.with_raw_response.create(model="tideline", messages=QUESTION)
    answer = raw.parse()
    choice: Any = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.model == "micro"
    assert choice.message.role == "assistant"
    assert choice.message.content == TEXT
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.id == f"chatcmpl-{choice.trajectory_id}"
    assert choice.policy_versions == [{"version": 7, "start": 0, "end": NUM_TOKENS}]
    assert raw.headers["x-trajectory-id"] == choice.trajectory_id
    assert raw.headers["x-policy-version"] == "7"
    assert raw.headers["x-request-id"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(QUESTION[0]["content"])
    assert answer.usage.completion_tokens == NUM_TOKENS
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + NUM_TOKENS


async def test_trajectory_holds_exactly_what_the_engine_returned(
    openai_client: AsyncOpenAI, engine: FakeEngine, database: Database
) -> None:
    engine.swap_after = 3
    answer = await openai_client.chat.completions.create(
        model="micro",
        messages=QUESTION,
        temperature=0.7,
        max_tokens=50,
        user="u1",
        metadata={"episode_id": "episode-9", "topic": "sea"},
    )
    trajectory = stored(database, answer.id.removeprefix("chatcmpl-"))
    prompt_ids = [ord(character) for character in QUESTION[0]["content"]]
    generated = [*range(FIRST_WORD, FIRST_WORD + len(SENTENCE)), END_OF_TEXT]
    assert trajectory.token_ids.tolist() == prompt_ids + generated
    assert trajectory.loss_mask.tolist() == [0] * len(prompt_ids) + [1] * NUM_TOKENS
    assert trajectory.behaviour_logprobs.tolist() == [-0.5] * NUM_TOKENS
    assert trajectory.version_spans == (VersionSpan(0, 0, 3), VersionSpan(1, 3, NUM_TOKENS))
    assert trajectory.admitted_version == 0
    assert trajectory.temperature == 0.7
    assert trajectory.text == TEXT
    assert trajectory.messages == QUESTION
    assert trajectory.metadata == {"episode_id": "episode-9", "topic": "sea"}
    assert trajectory.episode_id == "episode-9"
    assert trajectory.user == "u1"
    assert trajectory.finish_reason == "stop"
    assert trajectory.sampling["max_tokens"] == 50
    assert trajectory.trainable
    assert status_of(database, trajectory.id) == (TrajectoryStatus.SAMPLED, None)


async def test_stream_ends_with_the_additions_usage_and_done(
    openai_client: AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    body = {"model": "tideline", "messages": QUESTION, "stream": True, "stream_options": {"include_usage": True}}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-trajectory-id"]
    assert response.headers["x-policy-version"] == "0"
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == TEXT
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == NUM_TOKENS
    last = chunks[-2]["choices"][0]
    assert last["finish_reason"] == "stop"
    assert last["trajectory_id"] == response.headers["x-trajectory-id"]
    assert last["policy_versions"] == [{"version": 0, "start": 0, "end": NUM_TOKENS}]
    assert {chunk["id"] for chunk in chunks} == {f"chatcmpl-{last['trajectory_id']}"}


async def test_stream_without_usage_never_mentions_it(openai_client: AsyncOpenAI) -> None:
    stream = await openai_client.chat.completions.create(model="tideline", messages=QUESTION, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_trajectory_is_durable_when_the_last_chunk_arrives(
    openai_client: AsyncOpenAI, database: Database, engine: FakeEngine
) -> None:
    engine.pace_seconds = 0.01
    stream = await openai_client.chat.completions.create(model="tideline", messages=QUESTION, stream=True)
    seen = []
    async for chunk in stream:
        trajectory_id = chunk.id.removeprefix("chatcmpl-")
        exists = database.read(lambda session, key=trajectory_id: trajectories.get(session, key)) is not None
        seen.append((chunk.choices[0].finish_reason is not None, exists))
    assert seen[-1] == (True, True)
    # httpx hands over what has arrived, so an earlier chunk may be looked at late; never the other way round.
    assert all(exists for finished, exists in seen if finished)


@pytest.mark.parametrize("stream", [False, True])
async def test_store_false_keeps_nothing(
    http: httpx.AsyncClient, openai_client: AsyncOpenAI, database: Database, stream: bool
) -> None:
    body = {"messages": QUESTION, "store": False, "stream": stream}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert "x-trajectory-id" not in response.headers
    text = response.text
    payload = json.loads(text.split("\n\n")[-3].removeprefix("data: ")) if stream else response.json()
    assert payload["choices"][0]["trajectory_id"] is None
    kept = database.read(lambda session: trajectories.get(session, payload["id"].removeprefix("chatcmpl-")))
    assert kept is None


async def test_choices_are_trajectories_of_their_own(
    openai_client: AsyncOpenAI, database: Database, engine: FakeEngine
) -> None:
    answer: Any = await openai_client.chat.completions.create(model="tideline", messages=QUESTION, n=3, seed=10)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    ids = [choice.trajectory_id for choice in answer.choices]
    assert len(set(ids)) == 3
    assert sorted(stored(database, key).sampling["seed"] for key in ids) == [10, 11, 12]
    assert answer.usage.completion_tokens == 3 * NUM_TOKENS
    assert "n" not in engine.requests[0]


async def test_streamed_choices_each_end_once(openai_client: AsyncOpenAI) -> None:
    stream = await openai_client.chat.completions.create(model="tideline", messages=QUESTION, n=2, stream=True)
    texts = {0: "", 1: ""}
    ends = []
    async for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends.append(choice.index)
    assert texts == {0: TEXT, 1: TEXT}
    assert sorted(ends) == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_the_engines(openai_client: AsyncOpenAI, stream: bool) -> None:
    answer: Any = await openai_client.chat.completions.create(
        model="tideline", messages=QUESTION, logprobs=True, top_logprobs=2, stream=stream
    )
    choices = [chunk.choices[0] async for chunk in answer] if stream else [answer.choices[0]]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.token for entry in entries] == [*SENTENCE, ""]
    assert {entry.logprob for entry in entries} == {-0.5}


async def test_parameters_reach_the_engine_as_they_were_sent(openai_client: AsyncOpenAI, engine: FakeEngine) -> None:
    await openai_client.chat.completions.create(
        model="tideline",
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
        ],
        max_completion_tokens=5,
        temperature=0,
        stop=["x"],
        seed=3,
        user="u",
        metadata={"a": "b"},
        extra_body={"top_k": 4, "ignore_eos": True},
    )
    (request,) = engine.requests
    assert request == {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
        ],
        "max_completion_tokens": 5,
        "temperature": 0,
        "stop": ["x"],
        "seed": 3,
        "top_k": 4,
        "ignore_eos": True,
    }


async def test_tool_calls_are_the_engines_parse(
    openai_client: AsyncOpenAI, engine: FakeEngine, database: Database
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": "{}"}}
    engine.parsed_message = {"role": "assistant", "content": None, "tool_calls": [call]}
    tools: Any = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]
    answer: Any = await openai_client.chat.completions.create(model="tideline", messages=QUESTION, tools=tools)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.tool_calls[0].function.name == "tide"
    trajectory = stored(database, answer.choices[0].trajectory_id)
    assert trajectory.trainable
    assert trajectory.text == TEXT
    assert trajectory.sampling["tools"] == tools

    stream = await openai_client.chat.completions.create(model="tideline", messages=QUESTION, tools=tools, stream=True)
    deltas = [chunk.choices[0] async for chunk in stream]
    assert [delta.delta.tool_calls[0].function.name for delta in deltas if delta.delta.tool_calls] == ["tide"]
    assert not any(delta.delta.content for delta in deltas)
    assert deltas[-1].finish_reason == "tool_calls"


async def test_episode_header_names_the_episode(http: httpx.AsyncClient, database: Database) -> None:
    headers = {"x-episode-id": "run-1", "x-request-id": "mine"}
    response = await http.post("/v1/chat/completions", json={"messages": QUESTION}, headers=headers)
    assert response.headers["x-request-id"] == "mine"
    assert stored(database, response.headers["x-trajectory-id"]).episode_id == "run-1"


async def test_models_name_original_cut_distributions(
    openai_client: AsyncOpenAI, engine: FakeEngine, database: Database
) -> None:
    """A top_p that nobody asked for, from the model's own generation config, is as untrainable as any."""
    engine.sampling_defaults = {"top_p": 0.9}
    answer = await openai_client.chat.completions.create(model="tideline", messages=QUESTION)
    status, reason = status_of(database, answer.id.removeprefix("chatcmpl-"))
    assert status is TrajectoryStatus.UNTRAINABLE
    assert reason is not None
    assert "top_p" in reason


async def wait_for(condition: Any, timeout_seconds: float = 5) -> None:
    async with asyncio.timeout(timeout_seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_engine_lost_before_the_first_token_is_503(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after = 0
    for stream in (False, True):
        response = await http.post("/v1/chat/completions", json={"messages": QUESTION, "stream": stream})
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert response.json()["error"]["code"] == "engine_unavailable"


async def test_engine_lost_in_a_stream_is_an_error_event_and_an_untrainable_trajectory(
    openai_client: AsyncOpenAI, engine: FakeEngine, database: Database
) -> None:
    engine.fail_after = 3
    stream = await openai_client.chat.completions.create(model="tideline", messages=QUESTION, stream=True)
    chunks: list[Any] = []

    async def read() -> None:
        async for chunk in stream:
            chunks.append(chunk)

    with pytest.raises(openai.APIError, match="engine"):
        await read()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "".join(SENTENCE[:3])
    trajectory = stored(database, chunks[0].id.removeprefix("chatcmpl-"))
    assert not trajectory.trainable
    assert trajectory.num_generated == 3
    assert trajectory.untrainable_reason is not None
    assert "engine" in trajectory.untrainable_reason


async def test_failure_of_one_choice_stops_the_others(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after = 2
    engine.pace_seconds = 0.01
    response = await http.post("/v1/chat/completions", json={"messages": QUESTION, "n": 2})
    assert response.status_code == 503
