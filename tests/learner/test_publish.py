"""The servable directory, and a probe that is made of exactly those weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.models import load_policy
from learner.publish import make_probe, probe_tokens, write_policy
from tests.tiny_model import build_tiny_model


@pytest.fixture
def trained(tiny_model_dir: Path) -> Any:
    """A policy whose weights are not bf16 numbers any more."""
    policy = load_policy(tiny_model_dir)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-2)
    return policy


@pytest.mark.parametrize("tied", [True, False])
def test_policy_directory_is_servable_and_names_the_output_head(tmp_path: Path, tied: bool) -> None:
    start = build_tiny_model(tmp_path / "start", tie_word_embeddings=tied)
    policy = load_policy(start)
    write_policy(policy, start, tmp_path / "v1")
    tensors = load_file(tmp_path / "v1" / "model.safetensors")
    assert "lm_head.weight" in tensors
    assert set(tensors) == set(load_file(start / "model.safetensors"))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    names = {path.name for path in start.iterdir()}
    assert {path.name for path in (tmp_path / "v1").iterdir()} == names
    assert AutoTokenizer.from_pretrained(tmp_path / "v1").chat_template


def test_weights_file_can_be_read_by_an_engine_of_another_user(tmp_path: Path, tiny_model_dir: Path) -> None:
    write_policy(load_policy(tiny_model_dir), tiny_model_dir, tmp_path / "v1")
    assert (tmp_path / "v1" / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_probe_is_what_the_published_weights_say(tmp_path: Path, tiny_model_dir: Path, trained: Any) -> None:
    prompt_ids, continuation_ids = probe_tokens(tiny_model_dir)
    assert len(continuation_ids) >= 16
    probe = make_probe(trained, prompt_ids, continuation_ids, torch.bfloat16)
    write_policy(trained, tiny_model_dir, tmp_path / "v1")
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "v1", dtype=torch.bfloat16)
    with torch.no_grad():
        logits = served(input_ids=torch.tensor([[*prompt_ids, *continuation_ids]])).logits[0].float()
    log_softmax = torch.log_softmax(logits[len(prompt_ids) - 1 : -1], -1)
    expected = [float(log_softmax[place, token]) for place, token in enumerate(continuation_ids)]
    assert list(probe.expected_logprobs) == pytest.approx(expected, abs=1e-5)


def test_probe_tokens_fit_a_short_context(tiny_model_dir: Path) -> None:
    prompt_ids, continuation_ids = probe_tokens(tiny_model_dir, 20)
    assert 0 < len(prompt_ids) <= 10
    assert 0 < len(continuation_ids) <= 10
