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

from learner.collate import MicroBatch
from store.types import TidelineError

FROZEN_PATTERNS = (r"(^|\.)(self_attn|attention|attn|linear_attn)\.", r"(^|\.)(embed_tokens|wte|embeddings)\.")
"""Parameters of the critic that never train: attention (SAO.md section 4) and token embeddings."""


class FreezePatternError(TidelineError, ValueError):
    """A freeze pattern matches no parameter of this architecture, so it would silently freeze nothing."""


def load_policy(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a causal language model in evaluation mode: dropout is never on, in training neither.

    Raises OSError or ValueError for an unreadable directory.
    """
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def autocast(enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """bf16 matrix products on the CPU, or plain fp32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def log_softmax_at_generated(model: Any, batch: MicroBatch) -> Tensor:
    """log pi(. | s_t) at each generated token, at the temperature it was sampled with; fp32 [G, V]."""
    hidden_BTD = model.base_model(input_ids=batch.token_ids_BT, use_cache=False).last_hidden_state
    logits_GV = model.get_output_embeddings()(hidden_BTD.flatten(0, 1)[batch.predictors_G]).float()
    return torch.log_softmax(logits_GV / batch.temperatures_G[:, None], dim=-1)


def logprobs_of_targets(log_softmax_GV: Tensor, batch: MicroBatch) -> Tensor:
    """log pi(a_t | s_t) of the generated tokens; [G]."""
    return log_softmax_GV.gather(-1, batch.targets_G[:, None]).squeeze(-1)


class Critic(nn.Module):
    """V(s): the first layers of the starting policy, attention and embeddings frozen, and a scalar head at zero."""

    def __init__(self, policy: Any, num_layers: int | None, freeze_attention: bool) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(policy.base_model)
        if num_layers is not None:
            if num_layers > len(self.backbone.layers):
                raise ValueError(
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
        hidden_BTD = self.backbone(input_ids=batch.token_ids_BT, use_cache=False).last_hidden_state
        hidden_GD = hidden_BTD.flatten(0, 1)[batch.predictors_G].float()
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
