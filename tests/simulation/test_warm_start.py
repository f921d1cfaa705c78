"""The supervised pass: packed rows equal separate ones, only answers are learned, results are cached by content."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulation.samples import STYLES, topics
from simulation.servable import load_causal_lm
from simulation.warm_start import (
    Example,
    WarmStart,
    answer_loss,
    content_hash,
    sample_examples,
    train,
    trainable_parameters,
    warm_start,
)

SHORT = WarmStart(num_steps=3, num_prompts_per_step=2, learning_rate=1e-3)


def ignore_progress(what: str, done: int, total: int) -> None:
    del what, done, total


@pytest.fixture(scope="module")
def tiny(tiny_model_dir: Path) -> tuple[Any, Any]:
    return load_causal_lm(tiny_model_dir, torch.float32)


TOKENS = st.lists(st.integers(3, 200), min_size=1, max_size=9).map(tuple)
EXAMPLES = st.lists(
    st.builds(Example, TOKENS, st.lists(TOKENS, min_size=1, max_size=3).map(tuple)), min_size=1, max_size=3
)


@given(EXAMPLES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answer_loss_of_packed_rows_equals_a_loop_over_single_answers(
    tiny: tuple[Any, Any], examples: list[Example]
) -> None:
    model, tokenizer = tiny
    total, count = 0.0, 0
    with torch.no_grad():
        for example in examples:
            for answer in example.answers_ids:
                logits = model(torch.tensor([example.prompt_ids + answer])).logits[0].log_softmax(-1)
                for offset, token in enumerate(answer):
                    total -= float(logits[len(example.prompt_ids) + offset - 1, token])
                    count += 1
        packed = float(answer_loss(model, examples, tokenizer.pad_token_id))
    assert packed == pytest.approx(total / count, abs=1e-4)


def test_sample_examples_offer_every_style_of_both_pools_on_training_topics(tiny: tuple[Any, Any]) -> None:
    _, tokenizer = tiny
    examples = list(itertools.islice(sample_examples(tokenizer, 0), 40))
    prompts = [tokenizer.decode(example.prompt_ids) for example in examples]
    assert all(len(example.answers_ids) == 3 for example in examples)
    assert all(answer[-1] == tokenizer.eos_token_id for example in examples for answer in example.answers_ids)
    assert {style for style in STYLES if any(style in prompt for prompt in prompts)} == set(STYLES)
    assert sum("academic" in prompt for prompt in prompts) == 20
    held_out = [topic.question for topic in topics("held_out")]
    assert not any(question in prompt for question in held_out for prompt in prompts)


def test_train_lowers_the_loss_and_leaves_frozen_weights_alone(tiny_model_dir: Path) -> None:
    model, tokenizer = load_causal_lm(tiny_model_dir, torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses: list[str] = []
    config = WarmStart(num_steps=12, num_prompts_per_step=2, learning_rate=3e-3, num_trained_layers=1)
    train(model, tokenizer, config, lambda what, done, total: losses.append(what), autocast=False)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(name.startswith(("model.layers.2.", "model.norm.")) for name in changed)
    numbers = [float(loss.rsplit(" ", 1)[1]) for loss in losses]
    assert len(numbers) == 12
    assert sum(numbers[-3:]) < sum(numbers[:3])


def test_trainable_parameters_include_tied_embeddings_only_when_asked(tiny_model_dir: Path) -> None:
    model, _ = load_causal_lm(tiny_model_dir, torch.float32)
    frozen = {id(parameter) for parameter in trainable_parameters(model, SHORT)}
    assert id(model.get_input_embeddings().weight) not in frozen
    free = {id(p) for p in trainable_parameters(model, dataclasses.replace(SHORT, train_embeddings=True))}
    assert free == {id(parameter) for parameter in model.parameters()}


def test_warm_start_is_cached_by_what_it_depends_on(tiny_model_dir: Path, tmp_path: Path) -> None:
    ran: list[str] = []

    def note(what: str, done: int, total: int) -> None:
        ran.append(what)

    destination = tmp_path / "styles"
    assert warm_start(tiny_model_dir, destination, SHORT, note) == destination
    assert len(ran) == SHORT.num_steps
    weights = (destination / "model.safetensors").read_bytes()
    warm_start(tiny_model_dir, destination, SHORT, note)
    assert len(ran) == SHORT.num_steps
    warm_start(tiny_model_dir, destination, dataclasses.replace(SHORT, learning_rate=2e-3), note)
    assert len(ran) == 2 * SHORT.num_steps
    assert (destination / "model.safetensors").read_bytes() != weights
    warm_start(tiny_model_dir, destination, SHORT, ignore_progress)
    assert (destination / "model.safetensors").read_bytes() == weights, "the pass is not reproducible"


def test_content_hash_depends_on_configuration_and_source(tmp_path: Path) -> None:
    source = tmp_path / "weights"
    source.write_bytes(b"one")
    first = content_hash(SHORT, source)
    assert content_hash(SHORT, source) == first
    assert content_hash(dataclasses.replace(SHORT, seed=1), source) != first
    source.write_bytes(b"two")
    assert content_hash(SHORT, source) != first
