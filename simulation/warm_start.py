"""A short supervised pass after which a policy answers in every style the system prompt offers.

    corpus -> (pool offered in the system prompt, topic, an answer in each of its styles) -> cross-entropy on answers

Invariant: the pass sees training topics only, and its result depends on nothing but the base weights, the corpus and
the `WarmStart` values (their hash, kept beside the weights, is the cache key). Why it exists: a policy learns from
rewards only what it samples now and then, so each style must have mass before live learning starts.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from simulation.samples import POOL_A, POOL_B, chat_messages, topics, write_answer
from simulation.servable import load_causal_lm, replaced_directory, write_servable

CACHE_FILE = "warm_start.json"
CODE_VERSION = 1
"""Raised whenever this pass or the model code changes what it produces, so that cached results are not reused."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, steps done, and steps in all."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """How long and how fast the supervised pass trains."""

    num_steps: int
    num_prompts_per_step: int
    learning_rate: float
    num_trained_layers: int | None = None
    """Train only the last layers; None trains all. Token embeddings (and a tied head) stay frozen unless asked."""
    train_embeddings: bool = False
    weight_decay: float = 0.0
    seed: int = 0


SMOLLM2_WARM_START = WarmStart(num_steps=45, num_prompts_per_step=8, learning_rate=5e-4)


def content_hash(config: Any, *sources: Path) -> str:
    """SHA-256 over the corpus, the configuration, the code version and the bytes of `sources`."""
    digest = hashlib.sha256(f"{CODE_VERSION} {json.dumps(asdict(config), sort_keys=True)}".encode())
    corpus = resources.files("simulation") / "corpus"
    for entry in sorted(corpus.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".toml"):
            digest.update(entry.read_bytes())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def is_cached(destination: Path, key: str) -> bool:
    """True when `destination` was produced under the same key."""
    try:
        return bool(json.loads((destination / CACHE_FILE).read_text())["key"] == key)
    except (OSError, ValueError, KeyError):
        return False


def write_cache_key(directory: Path, key: str, config: Any) -> None:
    """Record what `directory` was produced from."""
    (directory / CACHE_FILE).write_text(json.dumps({"key": key, "config": asdict(config)}, indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt and an answer to it in each offered style, as token ids; answers end with the end-of-turn token."""

    prompt_ids: tuple[int, ...]
    answers_ids: tuple[tuple[int, ...], ...]


def sample_examples(tokenizer: Any, seed: int) -> Iterator[Example]:
    """Endless examples over training topics, the two pools in turn: every style of the pool once per prompt."""
    rng = random.Random(seed)
    subjects = topics("train")
    while True:
        for pool in (POOL_A, POOL_B):
            topic = rng.choice(subjects)
            prompt = tokenizer.apply_chat_template(
                chat_messages(pool, topic.question), add_generation_prompt=True, tokenize=False
            )
            answers = [write_answer(style, topic, rng) + tokenizer.eos_token for style in pool]
            encode = [tuple(ids) for ids in tokenizer([prompt, *answers], add_special_tokens=False).input_ids]
            yield Example(encode[0], tuple(encode[1:]))


def collate(examples: Sequence[Example], pad_id: int) -> tuple[Any, Any, Any, Any, Any]:
    """Pack each prompt with all its answers into one row, so that the prompt is computed once.

    Returns ids [B, T], positions [B, T] (every answer starts where its prompt ends), the attention mask
    [B, 1, T, T] (True: query row may see key column; an answer sees its prompt and itself), and for each of the A
    answer tokens the flat index into B * T of the position that predicts it, and its id.
    """
    import torch

    longest = max(len(example.prompt_ids) + sum(map(len, example.answers_ids)) for example in examples)
    ids_BT = torch.full((len(examples), longest), pad_id)
    positions_BT = torch.zeros_like(ids_BT)
    # Padding sees itself alone: a row of the softmax with nothing to see would be NaN.
    visible_BTT = torch.eye(longest, dtype=torch.bool).repeat(len(examples), 1, 1)
    predictors: list[int] = []
    targets: list[int] = []
    for row, example in enumerate(examples):
        prompt_length = start = len(example.prompt_ids)
        ids_BT[row, :prompt_length] = torch.tensor(example.prompt_ids)
        positions_BT[row, :prompt_length] = torch.arange(prompt_length)
        visible_BTT[row, :prompt_length, :prompt_length] = torch.ones(prompt_length, prompt_length).tril().bool()
        for answer in example.answers_ids:
            end = start + len(answer)
            ids_BT[row, start:end] = torch.tensor(answer)
            positions_BT[row, start:end] = torch.arange(prompt_length, prompt_length + len(answer))
            visible_BTT[row, start:end, :prompt_length] = True
            visible_BTT[row, start:end, start:end] = torch.ones(len(answer), len(answer)).tril().bool()
            predictors += [row * longest + index for index in (prompt_length - 1, *range(start, end - 1))]
            targets += answer
            start = end
    return ids_BT, positions_BT, visible_BTT[:, None], torch.tensor(predictors), torch.tensor(targets)


def answer_loss(model: Any, examples: Sequence[Example], pad_id: int) -> Any:
    """Mean cross-entropy over all answer tokens of a batch (a scalar, fp32); logits at answer positions only."""
    import torch

    ids_BT, positions_BT, visible_B1TT, predictors_A, targets_A = collate(examples, pad_id)
    hidden_BTD = model.model(
        input_ids=ids_BT, position_ids=positions_BT, attention_mask=visible_B1TT, use_cache=False
    ).last_hidden_state
    logits_AV = model.lm_head(hidden_BTD.flatten(0, 1)[predictors_A]).float()
    return torch.nn.functional.cross_entropy(logits_AV, targets_A)


def trainable_parameters(model: Any, config: WarmStart) -> list[Any]:
    """Freeze what the pass leaves alone and return the rest."""
    model.requires_grad_(False)
    layers = model.model.layers
    count = len(layers) if config.num_trained_layers is None else config.num_trained_layers
    for module in (*layers[len(layers) - count :], model.model.norm):
        module.requires_grad_(True)
    if config.train_embeddings:
        model.get_input_embeddings().requires_grad_(True)
        model.get_output_embeddings().requires_grad_(True)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train(model: Any, tokenizer: Any, config: WarmStart, progress: Progress, *, autocast: bool) -> float:
    """Run the pass in place; returns the mean loss of its last tenth, in nats per answer token."""
    import torch

    parameters = trainable_parameters(model, config)
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=config.weight_decay
    )
    warmup = max(1, config.num_steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        # Linear to a tenth: the samples' spread settles once steps get small.
        lambda step: min((step + 1) / warmup, max(0.1, 1 - step / config.num_steps)),
    )
    stream = sample_examples(tokenizer, config.seed)
    model.train()
    losses: list[float] = []
    for step in range(config.num_steps):
        batch = [next(stream) for _ in range(config.num_prompts_per_step)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = answer_loss(model, batch, tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        progress(f"warm start, loss {losses[-1]:.2f}", step + 1, config.num_steps)
    model.eval()
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def warm_start(source: Path, destination: Path, config: WarmStart, progress: Progress) -> Path:
    """Train the model in `source` on the corpus and write it to `destination`, unless that is already the result.

    Raises ModelSourceError when `source` cannot be read.
    """
    import torch

    key = content_hash(config, source / "model.safetensors", source / "tokenizer.json")
    if is_cached(destination, key):
        return destination
    model, tokenizer = load_causal_lm(source, torch.float32)
    torch.manual_seed(config.seed)
    with replaced_directory(destination) as directory:
        train(model, tokenizer, config, progress, autocast=True)
        write_servable(model, tokenizer, directory)
        write_cache_key(directory, key, config)
    return destination
