"""The weight-transfer engine that runs inside vLLM's workers and loads a policy directory from disk.

Invariant: the model is not touched until the whole file has passed its checks (checkpoint.load_checked_tensors).

Weights go through vLLM's layerwise reload, never through copies in place: on CPU the linear layers keep a packed
snapshot of their weights, which only the reload refreshes. It starts in `receive_weights` rather than in
`start_weight_update`, since it empties every layer and a refused file must leave the model as it was.
Every worker of a tensor-parallel group reads the file; `load_weights` takes its shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from app.inference.checkpoint import load_checked_tensors, read_shapes, with_tied_head

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig


@dataclass
class SafetensorsFileInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing: the file system needs no rendezvous."""


@dataclass
class SafetensorsFileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`path`: a policy directory that holds model.safetensors."""

    path: str


class SafetensorsFileEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads `model.safetensors` of a directory into the running model."""

    init_info_cls = SafetensorsFileInitInfo
    update_info_cls = SafetensorsFileUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        # Read now: the learner may delete the directory the engine started from long before the next swap.
        served = Path(self.model_config.model)
        # vLLM unsets the config's own flag when the checkpoint names a head, and ties the two again if they are equal.
        self._tied = bool(
            self.model_config.word_embeddings_untied_by_checkpoint
            or getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        )
        self._expected = with_tied_head(read_shapes(served), self._tied)
        self._reloading = False

    def init_transfer_engine(self, init_info: SafetensorsFileInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do until the file has been checked."""
        self._reloading = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check and load one directory. The base class synchronizes an accelerator, which a CPU build lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SafetensorsFileUpdateInfo) -> None:
        """Raises WeightsRefusedError, with the model untouched, for a file that must not be served."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        tensors = load_checked_tensors(Path(update_info.path), self._expected, self._tied)
        self._reloading = True
        initialize_layerwise_reload(self.model)
        self.model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors.items())

    def finish_weight_update(self) -> None:
        """Finalize the reload. Raises RuntimeError if no weights arrived: the version label must not move alone."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not self._reloading:
            raise RuntimeError("finish_weight_update without any weights")
        finalize_layerwise_reload(self.model, self.model_config)
        self._reloading = False

    def shutdown(self) -> None:
        """Nothing to release."""
