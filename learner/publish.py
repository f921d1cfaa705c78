"""The servable form of a policy, and the probe that proves that the engine serves it.

A policy directory can be loaded by transformers and by vLLM: configuration and tokenizer of the starting policy, and
`model.safetensors` in bf16. It names `lm_head.weight` even when that is tied to the embeddings, because a swap that
leaves the head out keeps the previous one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.func import functional_call
from transformers import AutoTokenizer

from app.inference.protocol import Probe
from learner.files import durable_directory

WEIGHTS_FILE = "model.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
PROBE_QUESTION = "What does the tide leave behind?"
PROBE_ANSWER = "It leaves shells, kelp and the slow line that the water drew upon the sand."


def write_policy(policy: Any, start_directory: Path, destination: Path) -> None:
    """Write a policy directory durably. Raises CheckpointWriteError."""
    weights = {
        name: value.detach().to(torch.bfloat16).contiguous().clone() for name, value in policy.state_dict().items()
    }
    weights["lm_head.weight"] = policy.get_output_embeddings().weight.detach().to(torch.bfloat16).contiguous().clone()
    with durable_directory(destination) as directory:
        for source in start_directory.iterdir():
            is_index = source.name.endswith(".index.json")
            if source.is_file() and source.suffix not in WEIGHT_SUFFIXES and not is_index:
                shutil.copyfile(source, directory / source.name)
        save_file(weights, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        # safetensors makes a file for its owner alone; the engine may be another user.
        (directory / WEIGHTS_FILE).chmod(0o644)


def probe_tokens(start_directory: Path, max_tokens: int = 64) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A fixed (prompt, continuation) in the policy's own tokens, at most `max_tokens` together."""
    tokenizer = AutoTokenizer.from_pretrained(start_directory)
    prompt = tokenizer(f"{PROBE_QUESTION}\n", add_special_tokens=False)["input_ids"][: max_tokens // 2]
    continuation = tokenizer(PROBE_ANSWER, add_special_tokens=False)["input_ids"][: max_tokens // 2]
    return tuple(prompt), tuple(continuation)


@torch.no_grad()
def make_probe(
    policy: Any, prompt_ids: tuple[int, ...], continuation_ids: tuple[int, ...], dtype: torch.dtype
) -> Probe:
    """The learner's own log-probabilities, at temperature 1, of the continuation.

    They are those of the *published* weights, rounded to bf16, computed in the `dtype` that the engine serves in.
    """
    # Parameters only: positions must not be rounded with the weights.
    published = {name: value.to(torch.bfloat16).to(dtype) for name, value in policy.named_parameters()}
    token_ids_BT = torch.tensor([[*prompt_ids, *continuation_ids]])
    logits_BTV = functional_call(policy, published, kwargs={"input_ids": token_ids_BT, "use_cache": False}).logits
    log_softmax_TV = torch.log_softmax(logits_BTV[0, len(prompt_ids) - 1 : -1].float(), dim=-1)
    logprobs = log_softmax_TV.gather(-1, torch.tensor(continuation_ids)[:, None]).squeeze(-1).tolist()
    return Probe(prompt_ids, continuation_ids, tuple(logprobs))
