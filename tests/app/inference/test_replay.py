"""The same-version replay check (SAO.md section 5) on both engines, and the mistakes it is there to catch.

Right after a swap to deliberately roughened weights, samples are scored again by transformers in bf16. The engine is
restarted on an untied model first, so that an output head can be left on the previous weights: on a tied one, the
engines refuse such a file.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import PreTrainedModel

from app.inference.client import EngineClient
from app.inference.swap import SwapClient
from learner.replay import ReplayStatistics, replay_statistics
from tests.app.inference.conftest import RunningEngine
from tests.app.inference.models import (
    build_policy,
    load_reference,
    probe_of,
    reference_logprobs,
    roughened,
    with_tensors,
)

NUM_TRAJECTORIES = 64
MAX_TOKENS = 48


@dataclass(frozen=True)
class Sample:
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]


@pytest.fixture(scope="module")
def base_policy(engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The untied policy that the engine has been restarted on, as version 0."""
    directory = build_policy(tmp_path_factory.mktemp("replay") / "base", seed=3, tied=False)
    engine.restart(0, directory)
    return directory


@pytest.fixture(scope="module")
def roughened_policy(base_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return roughened(base_policy, tmp_path_factory.mktemp("replay") / "roughened", noise=0.5, seed=11)


async def sample(engine: RunningEngine, temperature: float) -> list[Sample]:
    async with EngineClient(socket=engine.socket) as client:

        async def one(number: int) -> Sample:
            messages = [{"role": "user", "content": f"Number {number}: what does the tide return to?"}]
            prompt = await client.render_chat(
                {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": temperature, "seed": number}
            )
            chunks = [chunk async for chunk in client.generate(prompt, f"replay-{number}")]
            return Sample(
                prompt.token_ids,
                tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
                tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
            )

        return await asyncio.gather(*(one(number) for number in range(NUM_TRAJECTORIES)))


def replay(samples: list[Sample], model: PreTrainedModel, temperature: float, mask_shift: int = 0) -> ReplayStatistics:
    """Score the samples again. `mask_shift` moves the loss mask that many tokens towards the end: a mutation."""
    policy, behaviour = [], []
    for item in samples:
        scored = reference_logprobs(model, item.prompt_ids, item.token_ids, temperature)
        policy += scored[mask_shift:]
        behaviour += item.behaviour_logprobs[: len(scored) - mask_shift]
    return replay_statistics(np.array(policy), np.array(behaviour))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_replay_right_after_a_swap_agrees_and_every_mutation_is_caught(
    engine: RunningEngine, base_policy: Path, roughened_policy: Path, temperature: float
) -> None:
    with SwapClient(socket=engine.socket) as swap:
        swap.publish(base_policy, 1, probe_of(base_policy))
        swap.publish(roughened_policy, 2, probe_of(roughened_policy))
    samples = await sample(engine, temperature)
    assert len(samples) >= 64
    model = load_reference(roughened_policy)

    agreeing = replay(samples, model, temperature)
    assert agreeing.passes, agreeing
    assert abs(agreeing.mean_log_ratio) < 0.02
    assert agreeing.effective_sample_size_fraction > 0.98

    temperature_ignored = replay(samples, model, temperature=1.0 if temperature != 1.0 else 0.7)
    assert not temperature_ignored.passes, temperature_ignored
    mask_shifted = replay(samples, model, temperature, mask_shift=1)
    assert not mask_shifted.passes, mask_shifted
    engine_left_behind = replay(samples, load_reference(base_policy), temperature)
    assert not engine_left_behind.passes, engine_left_behind


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_replay_catches_an_output_head_left_on_the_previous_weights(
    engine: RunningEngine, base_policy: Path, roughened_policy: Path, tmp_path: Path, temperature: float
) -> None:
    previous_head = load_file(base_policy / "model.safetensors")["lm_head.weight"]
    stale = with_tensors(roughened_policy, tmp_path / "stale", {"lm_head.weight": previous_head})
    with SwapClient(socket=engine.socket) as swap:
        swap.publish(stale, 3, probe_of(stale))
    samples = await sample(engine, temperature)
    assert replay(samples, load_reference(stale), temperature).passes
    caught = replay(samples, load_reference(roughened_policy), temperature)
    assert not caught.passes, caught
