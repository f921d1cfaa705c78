"""A weights file is either exactly what the served model needs, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.inference.checkpoint import WeightsRefusedError, load_checked_tensors, read_shapes, with_tied_head

NORM = "model.norm.weight"


@pytest.fixture
def tensors(tiny_model_dir: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(tiny_model_dir / "model.safetensors")
    return loaded


def refusal(tiny_model_dir: Path, directory: Path, tensors: dict[str, torch.Tensor]) -> str:
    save_file(tensors, directory / "model.safetensors")
    expected = with_tied_head(read_shapes(tiny_model_dir), tie_word_embeddings=True)
    with pytest.raises(WeightsRefusedError) as caught:
        load_checked_tensors(directory, expected, tie_word_embeddings=True)
    return str(caught.value)


def test_load_returns_what_was_written(tiny_model_dir: Path, tensors: dict[str, torch.Tensor]) -> None:
    loaded = load_checked_tensors(tiny_model_dir, read_shapes(tiny_model_dir), tie_word_embeddings=True)
    assert list(loaded) == sorted(tensors)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_load_refuses_what_is_missing_unknown_misshapen_or_not_finite(
    tiny_model_dir: Path, tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    norm = tensors[NORM]
    infinite = norm.clone()
    infinite[0] = torch.inf
    for changed, expected in (
        ({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}, "lacks lm_head.weight"),
        ({**tensors, "model.extra": norm.clone()}, "unknown tensor model.extra"),
        ({**tensors, NORM: norm[:3].clone()}, f"{NORM} has shape (3,), the served model (128,)"),
        ({**tensors, NORM: infinite}, f"{NORM} holds a value that is not finite"),
        ({**tensors, NORM: torch.zeros(128, dtype=torch.int32)}, "not a floating-point type"),
        ({**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1}, "lm_head.weight differs from"),
        ({}, "lacks"),
    ):
        assert expected in refusal(tiny_model_dir, tmp_path, changed)


def test_load_refuses_an_unreadable_file(tiny_model_dir: Path, tmp_path: Path) -> None:
    expected = read_shapes(tiny_model_dir)
    with pytest.raises(WeightsRefusedError, match="cannot be read"):
        load_checked_tensors(tmp_path, expected, tie_word_embeddings=True)
    whole = (tiny_model_dir / "model.safetensors").read_bytes()
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        (tmp_path / "model.safetensors").write_bytes(whole[:cut])
        with pytest.raises(WeightsRefusedError, match="cannot be read"):
            load_checked_tensors(tmp_path, expected, tie_word_embeddings=True)


def test_tied_head_is_expected_even_where_the_base_model_does_not_name_it() -> None:
    shapes = {"model.embed_tokens.weight": (10, 4), NORM: (4,)}
    assert with_tied_head(shapes, tie_word_embeddings=True) == {**shapes, "lm_head.weight": (10, 4)}
    assert with_tied_head(shapes, tie_word_embeddings=False) == shapes


def test_read_shapes_follows_the_index_of_a_sharded_model(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "part-1.safetensors")
    save_file({"b": torch.zeros(4)}, tmp_path / "part-2.safetensors")
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_shapes(tmp_path) == {"a": (2, 3), "b": (4,)}
