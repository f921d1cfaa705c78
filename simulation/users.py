"""Simulated users: ask, read, judge, ask again; each a plain HTTP client with a taste that can change under it.

    ask (POST /v1/chat/completions) -> judge by what is preferred now -> POST /v1/feedback -> wait if the queue is full

Invariant: a user judges by what is preferred when it judges, and knows nothing of the server but its answers and the
length of its queue. Judgements are wrong or missing at the configured rates, by a seeded draw of each user.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import openai

from reward_models.style import StyleReward
from simulation.samples import Topic, chat_messages, topics
from simulation.schedule import Phase
from simulation.server import Patience


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many users there are and how they behave. Shares are in [0, 1]."""

    num_users: int = 16
    max_tokens: int = 32
    temperature: float = 1.0
    wrong_share: float = 0.0
    """Judgements that are inverted: 1 - reward."""
    missing_share: float = 0.0
    """Answers that nobody judges."""
    max_queue: int = 32
    """Users pause while this many judged trajectories wait for the learner."""
    model: str = "tideline"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("wrong_share", "missing_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, not in [0, 1]")
        for name in ("num_users", "max_tokens", "max_queue"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, not at least 1")


@dataclass(frozen=True, slots=True)
class Judgement:
    """One answer and what its user made of it; `posted_reward` is None where the user did not judge."""

    user: int
    question: str
    text: str
    trajectory_id: str
    preferred: str
    reward: float
    posted_reward: float | None


def noisy_reward(reward: float, crowd: Crowd, rng: random.Random) -> float | None:
    """What a user posts instead of `reward` in [0, 1]: itself, 1 - itself, or nothing."""
    # Two draws every time, so that changing one rate does not shift the other's sequence.
    is_missing, is_wrong = rng.random() < crowd.missing_share, rng.random() < crowd.wrong_share
    if is_missing:
        return None
    return 1.0 - reward if is_wrong else reward


async def ask(
    chat: openai.AsyncOpenAI, crowd: Crowd, messages: Sequence[Mapping[str, str]], *, store: bool
) -> tuple[str, str | None]:
    """One chat request: the answer's text and its trajectory id (None when it was not to be stored)."""
    answer = await chat.chat.completions.create(
        model=crowd.model,
        messages=list(messages),  # type: ignore[arg-type]
        max_tokens=crowd.max_tokens,
        temperature=crowd.temperature,
        store=store,
    )
    choice = answer.choices[0]
    return choice.message.content or "", getattr(choice, "trajectory_id", None)


async def post_feedback(http: httpx.AsyncClient, patience: Patience, body: Mapping[str, Any]) -> None:
    """Post one judgement until it is durable; the idempotency key in `body` makes repeating it harmless."""

    async def post() -> None:
        (await http.post("/v1/feedback", json=body)).raise_for_status()

    await patience.call(post)


async def be_user(
    number: int,
    crowd: Crowd,
    clients: tuple[openai.AsyncOpenAI, httpx.AsyncClient],
    current_phase: Callable[[], Phase],
    may_ask: asyncio.Event,
    patience: Patience,
    on_judgement: Callable[[Judgement], None],
) -> None:
    """Ask and judge until cancelled. Raises ServerUnreachableError (ServerRefusedError for a refusal)."""
    chat, http = clients
    rng = random.Random(f"{crowd.seed}:{number}")
    subjects: tuple[Topic, ...] = topics("train")
    while True:
        await may_ask.wait()
        question = rng.choice(subjects).question
        messages = chat_messages(current_phase().pool, question)
        text, trajectory_id = await patience.call(partial(ask, chat, crowd, messages, store=True))
        if trajectory_id is None:
            raise ValueError("the server's answers carry no trajectory_id: it is not a Tideline server")
        preferred = current_phase().preferred
        reward = StyleReward(preferred).score(messages, text).reward
        posted = noisy_reward(reward, crowd, rng)
        if posted is not None:
            await post_feedback(
                http,
                patience,
                {
                    "trajectory_id": trajectory_id,
                    "reward": posted,
                    "source": f"user:{number}",
                    "idempotency_key": str(uuid.uuid4()),
                },
            )
        on_judgement(Judgement(number, question, text, trajectory_id, preferred, reward, posted))
