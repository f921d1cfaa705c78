"""Learning and its control on the micro model, in process: true rewards move the style, shuffled ones must not."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from app.inference.transformers_engine.decoder import Decoder
from app.inference.transformers_engine.sampling import Sampling
from learner import publish, sao
from learner.collate import to_sample
from reward_models.style import StyleReward, dominant_style
from simulation.samples import POOL_A, chat_messages, topics
from store.settings import Settings
from store.types import Trajectory, VersionSpan

PREFERRED = "cute"
NUM_UPDATES = 8
BATCH_SIZE = 16
NUM_HELD_OUT = 64
NUM_CONTROLS = 6


def sample_trajectories(decoder: Decoder, questions: list[str], version: int) -> list[Trajectory]:
    """One rollout of each question, exactly as the engine sampled it."""
    prompts: dict[str, list[int]] = {}
    for index, question in enumerate(questions):
        messages = chat_messages(POOL_A, question)
        ids = decoder.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        prompts[str(index)] = list(ids)
        decoder.add(str(index), prompts[str(index)], Sampling(max_tokens=32))
    generated: dict[str, list[tuple[int, float]]] = {name: [] for name in prompts}
    texts = dict.fromkeys(prompts, "")
    while decoder.num_running or decoder.num_waiting:
        for token in decoder.step():
            generated[token.sequence_id].append((token.token_id, token.logprob))
            texts[token.sequence_id] += token.text
    return [
        Trajectory(
            id=name,
            created_at=datetime.now(UTC),
            token_ids=np.array([*prompt, *(token for token, _ in generated[name])], dtype=np.int32),
            loss_mask=np.repeat(np.array([0, 1], dtype=np.uint8), [len(prompt), len(generated[name])]),
            behaviour_logprobs=np.array([logprob for _, logprob in generated[name]], dtype=np.float32),
            version_spans=(VersionSpan(version, 0, len(generated[name])),),
            temperature=1.0,
            finish_reason="stop",
            messages=[],
            text=texts[name],
            admitted_version=version,
            trainable=True,
        )
        for name, prompt in prompts.items()
    ]


def preferred_share(decoder: Decoder) -> float:
    """Share of the preferred style on held-out topics."""
    held_out = [topic.question for topic in topics("held_out")]
    questions = [held_out[index % len(held_out)] for index in range(NUM_HELD_OUT)]
    texts = [trajectory.text for trajectory in sample_trajectories(decoder, questions, version=0)]
    return sum(dominant_style(text) == PREFERRED for text in texts) / len(texts)


def train(model_dir: Path, directory: Path, *, shuffled: bool, seed: int) -> tuple[float, float]:
    """Share of the preferred style before and after some updates."""
    settings = Settings(profile="micro", learner={"seed": seed, "critic": {"warmup_updates": 0}}).learner
    state = sao.SaoState(model_dir, settings)
    decoder = Decoder(model_dir, max_model_len=256, version=0, seed=seed)
    rng = random.Random(seed)
    train_questions = [topic.question for topic in topics("train")]
    judge = StyleReward(PREFERRED)
    before = preferred_share(decoder)
    for version in range(NUM_UPDATES):
        trajectories = sample_trajectories(decoder, rng.choices(train_questions, k=BATCH_SIZE), version)
        rewards = [judge.score((), trajectory.text).reward for trajectory in trajectories]
        if shuffled:
            rng.shuffle(rewards)
        sao.update(state, [to_sample(each, reward) for each, reward in zip(trajectories, rewards, strict=True)])
        publish.write_policy(state.policy, model_dir, directory / "policy")
        decoder.load_weights(directory / "policy")
    return before, preferred_share(decoder)


@pytest.mark.slow
def test_true_rewards_teach_the_preferred_style_and_shuffled_ones_do_not(micro_model_dir: Path, tmp_path: Path) -> None:
    before, after = train(micro_model_dir, tmp_path, shuffled=False, seed=0)
    assert after >= before + 0.35, f"with true rewards the share went from {before:.0%} to {after:.0%}"
    shares = [train(micro_model_dir, tmp_path, shuffled=True, seed=seed) for seed in range(1, 1 + NUM_CONTROLS)]
    mean_rise = sum(after - before for before, after in shares) / NUM_CONTROLS
    # Noise moves the policy too, only in no direction: single runs ended between 27 points lower and 22 higher, with a
    # standard deviation of 0.17 over 15 seeds. 0.2 is three standard errors of the mean of six.
    assert mean_rise <= 0.2, f"with shuffled rewards the shares went {shares}"
