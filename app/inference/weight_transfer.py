"""vLLM plugin: registers the weight-transfer backend `safetensors_file`, which loads a policy directory by its path.

It also asks the kernel for AMX, which vLLM's attention uses wherever the processor has it without asking itself.

vLLM imports this module in each of its processes through the `vllm.general_plugins` entry point, long before a
model exists; so it must stay cheap to import and must not import vLLM itself.
"""

from __future__ import annotations

BACKEND = "safetensors_file"


def register() -> None:
    """Register the backend with vLLM, allow AMX; doing it again changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    allow_amx()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "app.inference.safetensors_transfer", "SafetensorsFileEngine"
        )


def allow_amx() -> None:
    """Get this process permission for AMX tiles, or have vLLM do without them.

    Linux kills a process at its first tile instruction (SIGILL) unless it has asked, and vLLM's attention comes first
    where no other library in the process had a use for tiles before it.
    """
    import torch

    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        torch.cpu._is_amx_tile_supported = lambda: False
