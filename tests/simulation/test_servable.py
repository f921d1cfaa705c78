"""Model directories appear whole or not at all, in the layout that engines load."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from simulation.servable import ModelSourceError, is_servable, load_causal_lm, replaced_directory, write_servable


def test_replaced_directory_leaves_the_earlier_one_when_writing_fails(tmp_path: Path) -> None:
    destination = tmp_path / "model"
    destination.mkdir()
    (destination / "kept").touch()

    def fail_half_way() -> None:
        with replaced_directory(destination) as directory:
            (directory / "half").touch()
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_half_way()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in destination.iterdir()] == ["kept"]


def test_replaced_directory_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with replaced_directory(tmp_path / "deep" / "model") as directory:
            (directory / name).touch()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model"]
    assert [path.name for path in (tmp_path / "deep" / "model").iterdir()] == ["second"]


def test_replaced_directory_clears_what_a_killed_run_left(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        (tmp_path / f".model.partial-{os.getpid()}").mkdir()
        os._exit(0)
    os.waitpid(child, 0)
    (tmp_path / ".model.partial-1").mkdir()
    with replaced_directory(tmp_path / "model"):
        pass
    # Process 1 is alive: its work is left alone.
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.partial-1", "model"]


def test_write_servable_names_the_head_of_a_tied_model_in_bf16(tiny_model_dir: Path, tmp_path: Path) -> None:
    model, tokenizer = load_causal_lm(tiny_model_dir, torch.float32)
    assert not is_servable(tmp_path)
    write_servable(model, tokenizer, tmp_path)
    assert is_servable(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    again, tokenizer_again = load_causal_lm(tmp_path, torch.float32)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.allclose(again(ids).logits, model(ids).logits, atol=0.05, rtol=0.05)
    assert tokenizer_again.chat_template == tokenizer.chat_template
    assert tokenizer_again.eos_token == "<|im_end|>"


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "llama"}', '{"model_type": "no-such-architecture"}'])
def test_load_causal_lm_says_what_cannot_be_read_in_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelSourceError) as raised:
        load_causal_lm(tmp_path, torch.float32)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)
