"""Measure what the served policy writes on held-out topics: the share of each style and the mean reward.

Invariant: answers are asked for with `store: false`, so measuring leaves no trajectory and teaches nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import openai

from reward_models.style import STYLES, StyleReward, dominant_style
from simulation.samples import chat_messages, topics
from simulation.server import Patience, open_clients
from simulation.users import Crowd, ask

NO_STYLE = "none"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Shares of answers by dominant style (every known style and `none`; they sum to 1), and mean reward in [0, 1]."""

    shares: dict[str, float]
    reward: float
    num_samples: int
    texts: tuple[str, ...] = field(default=(), repr=False)


def summarise(texts: Sequence[str], preferred: str) -> Evaluation:
    """The evaluation that `texts` amount to when `preferred` is rewarded. Raises ValueError without any text."""
    if not texts:
        raise ValueError("nothing to evaluate")
    counts = Counter(dominant_style(text) or NO_STYLE for text in texts)
    shares = {style: counts[style] / len(texts) for style in (*STYLES, NO_STYLE)}
    judge = StyleReward(preferred)
    reward = sum(judge.score((), text).reward for text in texts) / len(texts)
    return Evaluation(shares, reward, len(texts), tuple(texts))


async def evaluate_with(
    chat: openai.AsyncOpenAI,
    crowd: Crowd,
    pool: Sequence[str],
    preferred: str,
    *,
    num_samples: int,
    prompts: Sequence[str] | None = None,
    concurrency: int = 16,
    patience: Patience | None = None,
) -> Evaluation:
    """Ask held-out `prompts` in turn (default: the corpus's), `num_samples` in all, `concurrency` at a time."""
    questions = prompts or [topic.question for topic in topics("held_out")]
    patience = patience or Patience()
    gate = asyncio.Semaphore(concurrency)

    async def answer(question: str) -> str:
        async with gate:
            messages = chat_messages(pool, question)
            text, _ = await patience.call(lambda: ask(chat, crowd, messages, store=False))
            return text

    wanted = [questions[index % len(questions)] for index in range(num_samples)]
    return summarise(await asyncio.gather(*map(answer, wanted)), preferred)


async def evaluate(
    base_url: str,
    pool: Sequence[str],
    preferred: str,
    *,
    num_samples: int = 40,
    prompts: Sequence[str] | None = None,
    crowd: Crowd | None = None,
    concurrency: int = 16,
    api_key: str | None = None,
) -> Evaluation:
    """`evaluate_with` over its own connection to the server at `base_url`."""
    chat, http = open_clients(base_url, timeout_seconds=120, num_connections=concurrency, api_key=api_key)
    async with chat, http:
        return await evaluate_with(
            chat,
            crowd or Crowd(),
            pool,
            preferred,
            num_samples=num_samples,
            prompts=prompts,
            concurrency=concurrency,
        )
