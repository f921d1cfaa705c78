"""The networks: logits at generated positions only, the temperature, and what the critic freezes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from learner.collate import collate
from learner.models import (
    Critic,
    FreezePatternError,
    UnsupportedModelError,
    check_logits,
    freeze,
    load_policy,
    log_softmax,
    target_logprobs,
    trainable,
)
from tests.learner.rollouts import make_samples


@pytest.fixture
def policy(tiny_model_dir: Path) -> Any:
    return load_policy(tiny_model_dir)


def test_target_logprobs_equal_the_whole_models_at_each_temperature(policy: Any) -> None:
    for sample in make_samples(3, 5):
        (batch,) = collate([sample], 1000)
        logprobs = target_logprobs(policy, batch)
        with torch.no_grad():
            logits = policy(input_ids=sample.token_ids_T[None]).logits[0].float() / sample.temperature
        for place, position in enumerate(sample.generated_G.tolist()):
            expected = torch.log_softmax(logits[position - 1], -1)[sample.token_ids_T[position]]
            assert float(logprobs[place]) == pytest.approx(float(expected), abs=1e-4)


def test_log_softmax_is_fp32_even_of_bf16_logits(tiny_model_dir: Path) -> None:
    """The mistake: a bf16 log-softmax, whose probabilities do not add up."""
    policy = load_policy(tiny_model_dir, torch.bfloat16)
    hidden_GD = torch.randn(64, policy.config.hidden_size, dtype=torch.bfloat16)
    result = log_softmax(policy, hidden_GD, torch.ones(64)).detach()
    assert result.dtype == torch.float32
    assert (result.exp().sum(-1) - 1).abs().max() < 1e-5
    in_bf16 = torch.log_softmax(policy.get_output_embeddings()(hidden_GD), -1).detach()
    assert (in_bf16.double().exp().sum(-1) - 1).abs().max() > 1e-4


def test_reference_in_bf16_keeps_its_rotary_frequencies_in_fp32(tiny_model_dir: Path) -> None:
    assert load_policy(tiny_model_dir, torch.bfloat16).base_model.rotary_emb.inv_freq.dtype == torch.float32


def test_critic_begins_at_zero_with_the_policys_first_layers(policy: Any) -> None:
    critic = Critic(policy, 2, freeze_attention=True)
    assert len(critic.backbone.layers) == 2
    assert len(policy.base_model.layers) == 3
    for batch in collate(make_samples(0, 3), 1000):
        assert critic(batch).abs().max() == 0
    assert len(trainable(Critic(policy, None, freeze_attention=False))) > len(trainable(critic))


def test_critic_with_more_layers_than_the_policy_is_refused(policy: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"num_layers is 9, but the model has 3"):
        Critic(policy, 9, freeze_attention=True)


def test_freeze_pattern_without_a_match_is_an_error(policy: Any) -> None:
    with pytest.raises(FreezePatternError, match="no_such_layer"):
        freeze(policy, ["no_such_layer"])


def test_unreadable_model_directory_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        load_policy(tmp_path)


def test_model_that_changes_its_logits_afterwards_is_refused(policy: Any) -> None:
    check_logits(policy)
    head = policy.forward

    def capped(**inputs: Any) -> Any:
        output = head(**inputs)
        output.logits = 5 * torch.tanh(output.logits / 5)
        return output

    policy.forward = capped
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        check_logits(policy)
