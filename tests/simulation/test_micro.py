"""The micro model: small, loadable, and after its warm start every offered style has a share to learn from."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reward_models.style import STYLES, StyleReward, dominant_style, quality
from simulation.micro import MicroModel, build_tokenizer
from simulation.samples import POOL_A, POOL_B, chat_messages, topics
from simulation.servable import load_causal_lm

NUM_SAMPLES = 120


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(MicroModel())


@given(st.text(max_size=80))
def test_tokenizer_gives_any_text_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_tokenizer_applies_chatml_and_is_compact(tokenizer: Any) -> None:
    question = topics("train")[0].question
    prompt = tokenizer.apply_chat_template(chat_messages(POOL_A, question), add_generation_prompt=True, tokenize=False)
    assert prompt == (
        "<|im_start|>system\nAnswer in one of these styles: academic, cute, chuunibyou.<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(tokenizer(prompt).input_ids) < 50
    assert len(tokenizer) == MicroModel().vocabulary_size
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def sample(model: Any, tokenizer: Any, pool: tuple[str, ...], num_samples: int) -> list[str]:
    """Answers at temperature 1 to held-out topics in turn, as the engine would sample them."""
    questions = itertools.islice(itertools.cycle(topics("held_out")), num_samples)
    prompts = [
        tokenizer.apply_chat_template(chat_messages(pool, topic.question), add_generation_prompt=True, tokenize=False)
        for topic in questions
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    torch.manual_seed(0)
    with torch.no_grad():
        ids = model.generate(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=32, do_sample=True, top_k=0
        )
    return tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("pool", [POOL_A, POOL_B])
def test_micro_model_writes_every_offered_style(micro_model_dir: Path, pool: tuple[str, ...]) -> None:
    model, tokenizer = load_causal_lm(micro_model_dir, torch.float32)
    assert 1_000_000 <= model.num_parameters() <= 2_000_000
    texts = sample(model, tokenizer, pool, NUM_SAMPLES)
    counts = Counter(map(dominant_style, texts))
    for style in pool:
        assert counts[style] / NUM_SAMPLES >= 0.15, counts
    assert (NUM_SAMPLES - counts[None]) / NUM_SAMPLES >= 0.9, counts
    for style in set(STYLES) - set(pool):
        assert counts[style] / NUM_SAMPLES <= 0.1, counts
    assert sum(map(quality, texts)) / NUM_SAMPLES > 0.9
    assert len(set(texts)) > 0.95 * NUM_SAMPLES
    own = [StyleReward(style).score([], text).reward for text in texts if (style := dominant_style(text))]
    assert sum(own) / len(own) > 0.75
