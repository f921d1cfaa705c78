"""Reading a policy directory's weights for a swap: everything is checked before anything is handed out.

Invariant: `load_checked_tensors` returns tensors only if the file holds exactly the expected names, with the
expected shapes, in a floating-point type, all of them finite. Both engines load through it.

Tied embeddings: a served directory names `lm_head.weight` too, and it must equal the token embedding. On CPU, vLLM
keeps a packed snapshot of the output head, and an update that carries only the embedding leaves it on the previous
weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from store.types import TidelineError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEAD = "lm_head.weight"
EMBEDDING_SUFFIX = "embed_tokens.weight"
NUM_NAMES_SHOWN = 3

Shapes = dict[str, tuple[int, ...]]


class WeightsRefusedError(TidelineError, ValueError):
    """A weights file that must not be served; the model has not been touched."""


def read_shapes(directory: Path) -> Shapes:
    """Return name -> shape of every tensor in a model directory, from the headers of its (sharded) safetensors.

    Raises WeightsRefusedError for a missing or unreadable file.
    """
    index = directory / INDEX_FILE
    if (directory / WEIGHTS_FILE).is_file() or not index.is_file():
        files = [directory / WEIGHTS_FILE]
    else:
        try:
            files = sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, OSError) as error:
            raise WeightsRefusedError(f"{index} cannot be read: {error}") from error
    shapes: Shapes = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise WeightsRefusedError(f"{file} cannot be read: {error}") from error
    return shapes


def with_tied_head(shapes: Mapping[str, tuple[int, ...]], tie_word_embeddings: bool) -> Shapes:
    """Return the shapes a swap must carry: those of the model's own files, and the output head of a tied model."""
    expected = dict(shapes)
    if tie_word_embeddings and HEAD not in expected:
        expected[HEAD] = next(shape for name, shape in shapes.items() if name.endswith(EMBEDDING_SUFFIX))
    return expected


def load_checked_tensors(
    directory: Path, expected: Mapping[str, tuple[int, ...]], tie_word_embeddings: bool
) -> dict[str, torch.Tensor]:
    """Return name -> CPU tensor of `model.safetensors` in `directory`, ordered by name.

    Raises WeightsRefusedError naming the first thing wrong: a missing or corrupt file, missing or unknown names,
    a wrong shape, a type that is not floating-point, a value that is not finite, a tied head that differs from its
    embedding.
    """
    path = directory / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            _check_names(path, names, expected)
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise WeightsRefusedError(f"{path} cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(expected[name]):
            raise WeightsRefusedError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, the served model {tuple(expected[name])}"
            )
        if not tensor.is_floating_point():
            raise WeightsRefusedError(f"{path}: {name} holds {tensor.dtype}, not a floating-point type")
        if not torch.isfinite(tensor).all():
            raise WeightsRefusedError(f"{path}: {name} holds a value that is not finite")
    if tie_word_embeddings:
        embedding = next((name for name in tensors if name.endswith(EMBEDDING_SUFFIX)), None)
        if embedding is not None and HEAD in tensors and not torch.equal(tensors[embedding], tensors[HEAD]):
            raise WeightsRefusedError(f"{path}: {HEAD} differs from {embedding}, which the model ties to it")
    return tensors


def _check_names(path: Path, names: list[str], expected: Mapping[str, tuple[int, ...]]) -> None:
    for problem, found in (
        ("lacks", sorted(set(expected) - set(names))),
        ("holds the unknown tensor", sorted(set(names) - set(expected))),
    ):
        if found:
            more = f" and {len(found) - NUM_NAMES_SHOWN} more" if len(found) > NUM_NAMES_SHOWN else ""
            raise WeightsRefusedError(f"{path} {problem} {', '.join(found[:NUM_NAMES_SHOWN])}{more}")
