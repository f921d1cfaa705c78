"""The critic's frozen attention on dense and mixture-of-experts models, tiny but with the real modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    MambaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from learner.collate import collate
from learner.losses import value_loss
from learner.models import Critic, FreezePatternError, check_logits, trainable
from tests.learner.rollouts import make_samples

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4),
    "glm4-moe": lambda: Glm4MoeConfig(
        **SHAPE, **EXPERTS, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1
    ),
    "deepseek-v3": lambda: DeepseekV3Config(
        **(SHAPE | {"num_key_value_heads": 4}),
        **EXPERTS,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}
IS_MOE = ("qwen3-moe", "glm4-moe", "deepseek-v3")


def make_policy(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_and_embeddings_never_train_and_all_else_does(name: str) -> None:
    critic = Critic(make_policy(name), 2, freeze_attention=True).eval()
    names = dict(critic.named_parameters())
    frozen = {key for key, value in names.items() if not value.requires_grad}
    assert frozen == {key for key in names if "self_attn" in key or "embed_tokens" in key}
    assert len(critic.backbone.layers) == 2
    torch.nn.init.normal_(critic.head.weight)  # a head at zero passes no gradient on
    before = {key: value.detach().clone() for key, value in names.items()}
    optimizer = torch.optim.SGD(trainable(critic), lr=1.0)
    for batch in collate(make_samples(0, 6), 1000):
        value_loss(critic(batch), torch.ones(batch.num_generated), 10).backward()
    optimizer.step()
    moved = {key for key, value in names.items() if not torch.equal(value, before[key])}
    assert not moved & frozen
    assert moved >= {key for key in names if "norm" in key and key not in frozen}
    kinds = ("experts", "gate") if name in IS_MOE else ("mlp",)
    for kind in kinds:
        assert any(kind in key for key in moved), kind


@pytest.mark.parametrize("name", CONFIGS)
def test_unfrozen_attention_trains_and_embeddings_still_do_not(name: str) -> None:
    critic = Critic(make_policy(name), None, freeze_attention=False)
    frozen = {key for key, value in critic.named_parameters() if not value.requires_grad}
    assert frozen == {"backbone.embed_tokens.weight"}
    assert len(critic.backbone.layers) == 3


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_output_layer_on_the_last_hidden_state(name: str) -> None:
    check_logits(make_policy(name))


def test_architecture_without_attention_is_an_error_at_start() -> None:
    mamba = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(FreezePatternError, match="matches no parameter of Mamba"):
        Critic(mamba, None, freeze_attention=True)
