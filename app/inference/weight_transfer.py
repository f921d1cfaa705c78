"""vLLM plugin: registers the weight-transfer backend `safetensors_file`, which loads a policy directory by its path.

vLLM imports this module in each of its processes through the `vllm.general_plugins` entry point, long before a
model exists; so it must stay cheap to import and must not import vLLM itself.
"""

from __future__ import annotations

BACKEND = "safetensors_file"


def register() -> None:
    """Register the backend with vLLM; doing it again changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "app.inference.safetensors_transfer", "SafetensorsFileEngine"
        )
