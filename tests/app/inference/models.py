"""Policies that engine tests serve, and the reference they are held to: a plain transformers forward pass."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from app.inference.protocol import Probe
from tests.tiny_model import build_tiny_model

PROBE_PROMPT = (5, 6, 7, 8, 9, 100, 101, 102)
PROBE_CONTINUATION = tuple(range(40, 104))


def build_policy(directory: Path, *, seed: int, tied: bool) -> Path:
    """A tiny model whose distribution is neither uniform nor stuck on one token."""
    return build_tiny_model(directory, seed=seed, tie_word_embeddings=tied, scale=2.0 if tied else 8.0)


def roughened(source: Path, target: Path, *, noise: float, seed: int = 0) -> Path:
    """Copy a policy with noise of `noise` standard deviations added to every weight, tied heads kept tied."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        scale = noise * (tensor.float().std() if tensor.float().std() > 0 else torch.tensor(1.0))
        tensors[name] = (tensor.float() + scale * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
    if '"tie_word_embeddings": true' in (source / "config.json").read_text():
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def with_tensors(source: Path, target: Path, changed: dict[str, torch.Tensor | None]) -> Path:
    """Copy a policy with some tensors replaced, added or (None) left out."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in changed.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def load_reference(directory: Path) -> PreTrainedModel:
    """The policy as transformers reads it, in bf16."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    return model


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int], continuation_ids: Sequence[int], temperature: float = 1.0
) -> tuple[float, ...]:
    """Log-probability of each continuation token under the temperature-scaled distribution, softmax in float32."""
    ids_1T = torch.tensor([[*prompt_ids, *continuation_ids]])
    logits_GV = model(input_ids=ids_1T).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
    picked_G1 = torch.tensor(list(continuation_ids))[:, None]
    return tuple(logits_GV.log_softmax(-1).gather(1, picked_G1)[:, 0].tolist())


def probe_of(directory: Path) -> Probe:
    """The probe whose expected log-probabilities are those of this policy."""
    expected = reference_logprobs(load_reference(directory), PROBE_PROMPT, PROBE_CONTINUATION)
    return Probe(PROBE_PROMPT, PROBE_CONTINUATION, expected)
