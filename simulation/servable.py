"""Write models in the layout every part of Tideline loads: one bf16 model.safetensors that names the output head.

Invariant: a directory at its final name is complete. It is written under a temporary name, fsynced and renamed, and a
failure leaves nothing behind. `lm_head.weight` is present even when embeddings are tied, because a weight swap that
carries only the embeddings leaves the engine's head on its previous weights.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class ModelSourceError(ValueError):
    """A model could not be read; the message is one sentence for the user."""


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replaced_directory(destination: Path) -> Iterator[Path]:
    """Yield an empty directory that takes the place of `destination` when the block ends without an error."""
    parent = destination.parent
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob(f".{destination.name}.partial-*"):
        # A killed run cannot clean up after itself, the next one can.
        if not _is_running(int(leftover.name.rsplit("-", 1)[1])):
            shutil.rmtree(leftover, ignore_errors=True)
    partial = parent / f".{destination.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for path in [*partial.rglob("*"), partial]:
            _sync(path)
        previous = parent / f".{destination.name}.partial-replaced-{os.getpid()}"
        if destination.exists():
            destination.rename(previous)
        partial.rename(destination)
        _sync(parent)
        shutil.rmtree(previous, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def is_servable(directory: Path) -> bool:
    """True when a finished model is there (its final name says that it is complete)."""
    return (directory / "model.safetensors").is_file() and (directory / "config.json").is_file()


def write_servable(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write config, generation config, tokenizer and bf16 weights (head included) of a causal LM to `directory`."""
    import torch
    from safetensors.torch import save_file

    model.config.dtype = torch.bfloat16
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # Each tensor gets its own storage: safetensors refuses the shared one of tied embeddings.
    tensors = {
        name: tensor.detach().to(torch.bfloat16, copy=True).contiguous() for name, tensor in model.state_dict().items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    # safetensors creates the file for its owner alone; an engine may run as another user.
    (directory / "model.safetensors").chmod(0o644)


def load_causal_lm(source: str | Path, dtype: Any) -> tuple[Any, Any]:
    """The model and tokenizer at a local directory or hub id. Raises ModelSourceError naming what is wrong."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source))
        model = AutoModelForCausalLM.from_pretrained(str(source), dtype=dtype)
    except Exception as error:
        # Loaders raise anything from KeyError to a Rust exception on a bad file.
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelSourceError(f"cannot read a model from {str(source)!r}: {first_line}") from error
    return model, tokenizer
