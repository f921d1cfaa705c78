"""The `micro` profile: a Llama of about 1.3M parameters with its own small tokenizer, made here from the corpus alone.

Invariant: nothing is read but the corpus, so the model can be built anywhere in under a minute, and the same corpus and
configuration give the same tokenizer. It exists for tests and for benchmarks of the algorithm, not for its prose.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulation.samples import POOL_A, POOL_B, STYLES, system_prompt, topics, write_answer
from simulation.servable import replaced_directory, write_servable
from simulation.warm_start import Progress, WarmStart, content_hash, is_cached, train, write_cache_key

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
NUM_TOKENIZER_SAMPLES = 1500
"""Answers per style that the tokenizer's merges are counted on."""


@dataclass(frozen=True, slots=True)
class MicroModel:
    """Shape of the micro model and how it is trained."""

    vocabulary_size: int = 2048
    hidden_size: int = 160
    intermediate_size: int = 448
    num_layers: int = 3
    num_heads: int = 5
    num_kv_heads: int = 5
    max_length: int = 256
    warm_start: WarmStart = WarmStart(  # noqa: RUF009
        num_steps=600, num_prompts_per_step=8, learning_rate=4e-3, train_embeddings=True, weight_decay=0.01
    )


def build_tokenizer(config: MicroModel) -> Any:
    """A byte-level BPE tokenizer (any text can be encoded) with ChatML turns, its merges learned from the corpus."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    subjects = topics("train")
    texts = [write_answer(style, rng.choice(subjects), rng) for style in STYLES for _ in range(NUM_TOKENIZER_SAMPLES)]
    prompts = [*(topic.question for topic in subjects), *map(system_prompt, (POOL_A, POOL_B)), "user", "assistant"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n| ?\p{L}+(?:['’]\p{L}+)?| ?[^\s\p{L}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocabulary_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *prompts * 200], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        model_max_length=config.max_length,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(config: MicroModel, tokenizer: Any) -> Any:
    """A freshly initialised fp32 Llama for `tokenizer`, with tied embeddings."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(config.warm_start.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocabulary_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.hidden_size // config.num_heads,
            max_position_embeddings=config.max_length,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def build_micro(destination: Path, config: MicroModel, progress: Progress) -> Path:
    """Build and warm-start the micro model in `destination`, unless that is already the result."""
    key = content_hash(config)
    if is_cached(destination, key):
        return destination
    with replaced_directory(destination) as directory:
        progress("tokenizer", 0, 1)
        tokenizer = build_tokenizer(config)
        progress("tokenizer", 1, 1)
        model = build_model(config, tokenizer)
        train(model, tokenizer, config.warm_start, progress, autocast=False)
        write_servable(model, tokenizer, directory)
        write_cache_key(directory, key, config)
    return destination
