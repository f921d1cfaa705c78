"""The networks: policy, frozen reference and critic, and their outputs at generated positions.

Weights are fp32 masters, matrix products may run in bf16 autocast, log-softmax and values are fp32.
Shape legend: G generated tokens of a micro-batch, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from learner.collate import MicroBatch
from store.types import TidelineError

FROZEN_PATTERNS = (r"(^|\.)(self_attn|attention|attn|linear_attn)\.", r"(^|\.)(embed_tokens|wte|embeddings)\.")
"""Parameters of the critic that never train: attention (SAO.md section 4) and token embeddings."""


HEAD_CHUNK_TOKENS = 512
"""Generated tokens whose logits are held at once: 100 MB in fp32 at a vocabulary of 49,152."""


class FreezePatternError(TidelineError, ValueError):
    """A freeze pattern matches no parameter of this architecture, so it would silently freeze nothing."""


class UnsupportedModelError(TidelineError, ValueError):
    """The model cannot be read, or this learner would not compute what it computes."""


def load_policy(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a causal language model in evaluation mode: dropout is never on, in training neither.

    Raises UnsupportedModelError for an unreadable directory.
    """
    disable_progress_bar()  # it would draw one into the learner's log for every load
    try:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    except Exception as error:  # loaders raise anything from KeyError to a Rust exception on a bad file
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedModelError(f"the policy in {directory} cannot be read: {first_line}") from error


@torch.no_grad()
def check_logits(model: Any) -> None:
    """Raise UnsupportedModelError unless the logits are the output layer on the last hidden state.

    Some architectures scale or cap logits in between; at generated positions only, that would be left out.
    """
    token_ids_BT = torch.arange(min(8, model.config.vocab_size))[None]
    hidden_BTD = model.base_model(input_ids=token_ids_BT, use_cache=False).last_hidden_state
    expected_BTV = model(input_ids=token_ids_BT, use_cache=False).logits
    if not torch.allclose(model.get_output_embeddings()(hidden_BTD), expected_BTV, rtol=1e-3, atol=1e-3):
        raise UnsupportedModelError(f"{type(model).__name__} changes its logits after the output layer")


def checkpoint_activations(model: Any) -> None:
    """Recompute each layer in the backward pass instead of keeping its activations: less memory, a third more time.

    `model` has `layers` itself or in its base model, and is in evaluation mode. Layers recompute in training mode only,
    so they alone are put into it; their parts, dropout among them, stay in evaluation mode.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.base_model.layers:
        layer.training = True


def autocast(enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """bf16 matrix products on the CPU, or plain fp32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def hidden_at_generated(backbone: Any, batch: MicroBatch) -> Tensor:
    """Last hidden state at the position that predicts each generated token; [G, D]."""
    hidden_BTD = backbone(input_ids=batch.token_ids_BT, use_cache=False).last_hidden_state
    hidden_GD: Tensor = hidden_BTD.flatten(0, 1)[batch.predictors_G]
    return hidden_GD


def log_softmax(model: Any, hidden_GD: Tensor, temperatures_G: Tensor) -> Tensor:
    """log pi(. | s_t) at the temperature each token was sampled with; fp32 [G, V] whatever the model's dtype."""
    logits_GV = model.get_output_embeddings()(hidden_GD).float()
    return torch.log_softmax(logits_GV / temperatures_G[:, None], dim=-1)


def gather_targets(log_softmax_GV: Tensor, targets_G: Tensor) -> Tensor:
    """log pi(a_t | s_t) of the generated tokens; [G]."""
    return log_softmax_GV.gather(-1, targets_G[:, None]).squeeze(-1)


def chunks(num_tokens: int) -> list[slice]:
    """Consecutive parts of the generated tokens, so that no [G, V] tensor of a whole batch is ever held."""
    return [slice(start, start + HEAD_CHUNK_TOKENS) for start in range(0, num_tokens, HEAD_CHUNK_TOKENS)]


@torch.no_grad()
def target_logprobs(model: Any, batch: MicroBatch) -> Tensor:
    """log pi(a_t | s_t) of the generated tokens of a micro-batch, at their temperature, without gradient; fp32 [G]."""
    hidden_GD = hidden_at_generated(model.base_model, batch)
    parts = [
        gather_targets(log_softmax(model, hidden_GD[part], batch.temperatures_G[part]), batch.targets_G[part])
        for part in chunks(batch.num_generated)
    ]
    return torch.cat(parts)


class Critic(nn.Module):
    """V(s): the first layers of the starting policy, attention and embeddings frozen, and a scalar head at zero."""

    def __init__(self, policy: Any, num_layers: int | None, freeze_attention: bool) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(policy.base_model)
        if num_layers is not None:
            if num_layers > len(self.backbone.layers):
                raise UnsupportedModelError(
                    f"learner.critic.num_layers is {num_layers}, but the model has {len(self.backbone.layers)} layers"
                )
            self.backbone.layers = self.backbone.layers[:num_layers]
            self.backbone.config.num_hidden_layers = num_layers
        self.head = nn.Linear(self.backbone.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        freeze(self.backbone, FROZEN_PATTERNS if freeze_attention else FROZEN_PATTERNS[1:])

    def forward(self, batch: MicroBatch) -> Tensor:
        """Value of the state before each generated token (the output at position t - 1); fp32 [G]."""
        hidden_GD = hidden_at_generated(self.backbone, batch).float()
        with torch.autocast("cpu", enabled=False):
            values_G: Tensor = self.head(hidden_GD).squeeze(-1)
        return values_G


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Stop training every parameter whose name matches. Raises FreezePatternError for a pattern without a match."""
    for pattern in patterns:
        matched = [parameter for name, parameter in module.named_parameters() if re.search(pattern, name)]
        if not matched:
            raise FreezePatternError(f"the freeze pattern {pattern!r} matches no parameter of {type(module).__name__}")
        for parameter in matched:
            parameter.requires_grad_(False)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that train, in a fixed order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
