"""How fast one SAO update is, and what share of this machine's matrix-product peak it reaches.

    python -m benchmarks.learner_step                      # a model of SmolLM2-135M's shape, random weights
    python -m benchmarks.learner_step --shape micro

The peak is measured in the same run: the best of several large bf16 products on the same threads. Operations count
parameters: 2 per parameter and token forward, 2 for the gradient that is passed on, 2 for a gradient of a trained
weight; the output head at generated positions only. Attention's own products and everything pointwise count as nothing,
so the share is a lower bound.
"""

from __future__ import annotations

import os

# OpenMP reads this once, when torch is imported; see learner/__main__.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from learner import sao
from learner.advantages import terminal_rewards
from learner.collate import Sample, collate
from store.settings import PROFILES, LearnerSettings

SHAPES: dict[str, dict[str, int]] = {
    "smollm2-135m": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "micro": {
        "vocab_size": 2048,
        "hidden_size": 160,
        "intermediate_size": 448,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
    },
}


def make_model(shape: str, directory: Path) -> None:
    """Write a Llama of that shape with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPES[shape], tie_word_embeddings=True)).save_pretrained(directory)


def make_batch(policy: Any, num_trajectories: int, prompt_tokens: int, generated_tokens: int) -> list[Sample]:
    """Fresh trajectories: ragged lengths up to those given, log-probabilities of the policy's own."""
    generator = torch.Generator().manual_seed(0)
    settings = LearnerSettings()
    samples = []
    for _ in range(num_trajectories):
        prompt, generated = (
            int(torch.randint(longest // 2, longest + 1, (), generator=generator))
            for longest in (prompt_tokens, generated_tokens)
        )
        samples.append(
            Sample(
                token_ids_T=torch.randint(0, policy.config.vocab_size, (prompt + generated,), generator=generator),
                generated_G=torch.arange(prompt, prompt + generated),
                behaviour_logprobs_G=torch.zeros(generated),
                rewards_G=terminal_rewards(generated, float(torch.rand((), generator=generator))),
                temperature=1.0,
            )
        )
    batches = collate(samples, settings.micro_batch_tokens)
    logprobs = sao.logprobs_of(policy, batches, samples, settings)
    return [
        Sample(each.token_ids_T, each.generated_G, logprobs_G, each.rewards_G, each.temperature)
        for each, logprobs_G in zip(samples, logprobs, strict=True)
    ]


def count_operations(state: sao.SaoState, samples: list[Sample]) -> dict[str, float]:
    """Floating-point operations of each part of an update over `samples` (padding not counted)."""
    num_tokens = sum(len(sample.token_ids_T) for sample in samples)
    num_generated = sum(sample.num_generated for sample in samples)
    backbone = sum(value.numel() for name, value in state.policy.base_model.named_parameters() if "embed" not in name)
    head = state.policy.get_output_embeddings().weight.numel()
    critic = {name: value for name, value in state.critic.backbone.named_parameters() if "embed" not in name}
    all_critic = sum(value.numel() for value in critic.values())
    trained_critic = sum(value.numel() for value in critic.values() if value.requires_grad)
    forward = 2 * (backbone * num_tokens + head * num_generated)
    return {
        "reference": forward,
        "policy": 3 * forward,
        "critic": state.settings.critic.updates_per_step * (4 * all_critic + 2 * trained_critic) * num_tokens
        + 2 * all_critic * num_tokens,
    }


def measure_peak(size: int = 2048, repetitions: int = 8) -> float:
    """Floating-point operations per second of the fastest of several bf16 products of two square matrices."""
    left, right = (torch.randn(size, size).bfloat16() for _ in range(2))
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def main(
    shape: Annotated[str, typer.Option(help=f"Whose shape: {', '.join(SHAPES)}.")] = "smollm2-135m",
    trajectories: Annotated[int, typer.Option(help="Trajectories in the batch.", min=1)] = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Longest prompt; the shortest is half of it.", min=2)] = 64,
    generated_tokens: Annotated[int, typer.Option(help="Longest answer; the shortest is half of it.", min=2)] = 64,
    updates: Annotated[int, typer.Option(help="Updates that are timed, after one that is not.", min=1)] = 5,
) -> None:
    """Time SAO updates and compare them with the machine's matrix-product peak."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"there is no {shape!r}; there are {', '.join(SHAPES)}", param_hint="--shape")
    console = Console(highlight=False)
    settings = LearnerSettings.model_validate(
        PROFILES[shape]["learner"]
        | {"critic": PROFILES[shape]["learner"]["critic"] | {"warmup_updates": 0}}
        | {"plasticity": {"return_to_start": False}}
    )
    torch.set_num_threads(settings.num_threads or os.cpu_count() or 1)
    with console.status("building the model") as status, tempfile.TemporaryDirectory() as directory:
        make_model(shape, Path(directory))
        state = sao.SaoState(Path(directory), settings)
        samples = make_batch(state.policy, trajectories, prompt_tokens, generated_tokens)
        status.update("measuring the peak")
        peak = measure_peak()
        sao.update(state, samples)
        seconds: dict[str, list[float]] = {"critic": [], "policy and reference": [], "whole update": []}
        for number in range(updates):
            status.update(f"update {number + 1} of {updates}")
            began = time.perf_counter()
            metrics = sao.update(state, samples).metrics
            seconds["whole update"].append(time.perf_counter() - began)
            seconds["critic"].append(metrics["critic_seconds"])
            seconds["policy and reference"].append(metrics["policy_seconds"])
    operations = count_operations(state, samples)
    by_part = {
        "critic": operations["critic"],
        "policy and reference": operations["policy"] + operations["reference"],
        "whole update": sum(operations.values()),
    }
    num_tokens = sum(len(sample.token_ids_T) for sample in samples)
    table = Table(box=box.SIMPLE_HEAD, title=f"{shape}: {trajectories} trajectories, {num_tokens} tokens, K = 2")
    for header in ("part", "median s", "tokens/s", "Gop/s", "share of peak"):
        table.add_column(header, justify="left" if header == "part" else "right")
    for part, times in seconds.items():
        median = statistics.median(times)
        rate = by_part[part] / median
        table.add_row(part, f"{median:.2f}", f"{num_tokens / median:.0f}", f"{rate / 1e9:.0f}", f"{rate / peak:.0%}")
    console.print(table)
    console.print(
        f"peak: {peak / 1e9:.0f} Gop/s in bf16 on {torch.get_num_threads()} threads; median of {updates} updates"
    )


if __name__ == "__main__":
    typer.run(main)
