"""Make a profile's model, or convert any model, into the data directory: `python -m simulation.prepare`.

Invariant: the last line on standard output is the path of a complete, servable model directory; progress goes to
standard error. A model that cannot be read ends with one sentence, exit code 2, and nothing half-written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from simulation import warm_start as supervised
from simulation.gguf import convert_gguf
from simulation.micro import MicroModel, build_micro
from simulation.servable import ModelSourceError, is_servable, load_causal_lm, replaced_directory, write_servable

PROFILES = ("smollm2-135m", "micro")


def prepare_model(profile: str, data_dir: Path, warm_start: bool, progress: supervised.Progress | None = None) -> Path:
    """Make `data_dir/models/<profile>` (and `<profile>-styles` when warm-started) if missing; return the one asked for.

    Raises ModelSourceError for an unknown profile or missing weights. `progress` is called as the work goes on.
    """
    report = progress or (lambda what, done, total: None)
    base = data_dir.resolve() / "models" / profile
    styles = base.with_name(f"{profile}-styles")
    if profile == "micro":
        # Built from the corpus alone, the micro model knows nothing else: its base is the warm-started one.
        return build_micro(styles if warm_start else base, MicroModel(), report)
    if profile != "smollm2-135m":
        raise ModelSourceError(f"no profile {profile!r}; there are {', '.join(PROFILES)}")
    if not is_servable(base):
        report("reading SmolLM2-135M-Instruct", 0, 1)
        convert_gguf(base)
        report("reading SmolLM2-135M-Instruct", 1, 1)
    if not warm_start:
        return base
    return supervised.warm_start(base, styles, supervised.SMOLLM2_WARM_START, report)


def model_slug(source: str) -> str:
    """A directory name for a model path or hub id: its last words, and for a path a hash of where it is."""
    path = Path(source)
    name = path.resolve().name if path.is_dir() else source
    words = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "model"
    if not path.is_dir():
        return words
    return f"{words}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"


def convert_model(
    source: str, data_dir: Path, warm_start: bool = False, progress: supervised.Progress | None = None
) -> Path:
    """Convert a local model directory or hub id to `data_dir/models/<slug>` and return that; reuse a finished one.

    With `warm_start` the result is `<slug>-styles`, taught the styles of the corpus with SmolLM2's settings. Raises
    ModelSourceError, in one sentence, when the source cannot be read as a causal language model that chats.
    """
    import torch

    report = progress or (lambda what, done, total: None)
    path = Path(source)
    if path.exists() and not path.is_dir():
        raise ModelSourceError(f"cannot read a model from {source!r}: it is not a directory")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelSourceError(f"cannot read a model from {source!r}: it has no config.json")
    if not path.exists() and (path.is_absolute() or source.startswith(".")):
        raise ModelSourceError(f"cannot read a model from {source!r}: there is no such directory")
    destination = data_dir.resolve() / "models" / model_slug(source)
    stamp = source_stamp(path) if path.is_dir() else {"source": source}
    if not (is_servable(destination) and read_stamp(destination) == stamp):
        report(f"reading {source}", 0, 1)
        model, tokenizer = load_causal_lm(source, torch.bfloat16)
        if not tokenizer.chat_template:
            raise ModelSourceError(f"cannot serve {source!r}: its tokenizer has no chat template")
        with replaced_directory(destination) as directory:
            write_servable(model, tokenizer, directory)
            (directory / "source.json").write_text(json.dumps(stamp) + "\n")
        report(f"reading {source}", 1, 1)
    if not warm_start:
        return destination
    styles = destination.with_name(f"{destination.name}-styles")
    return supervised.warm_start(destination, styles, supervised.SMOLLM2_WARM_START, report)


def source_stamp(directory: Path) -> dict[str, object]:
    """Name, size and modification time of every file of a local model: equal stamps mean an unchanged source."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return {
        "source": str(directory.resolve()),
        "files": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files],
    }


def read_stamp(directory: Path) -> object:
    """The stamp a converted directory was made from, or None."""
    try:
        return json.loads((directory / "source.json").read_text())
    except (OSError, ValueError):
        return None


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m simulation.prepare", description="Make or convert a model.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--profile", choices=PROFILES, help="make this profile's model")
    what.add_argument("--model", help="convert this local model directory or hub id")
    parser.add_argument("--data-dir", type=Path, required=True, help="models are written to DIR/models")
    parser.add_argument("--warm-start", action="store_true", help="teach it the styles of the corpus")
    options = parser.parse_args(arguments)

    # The GGUF reader draws a bar of its own, which transformers' switch does not reach; tqdm reads this when imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("preparing the model", total=None)
        decile = -1

        def report(description: str, done: int, total: int) -> None:
            nonlocal decile
            bar.update(task, description=description, completed=done, total=total)
            # Where no bar can be drawn (a log file), one line per tenth says the same.
            if not console.is_terminal and done * 10 // total != decile:
                decile = done * 10 // total
                console.print(f"{description} {done}/{total}", highlight=False)

        try:
            if options.model:
                path = convert_model(options.model, options.data_dir, options.warm_start, report)
            else:
                path = prepare_model(options.profile, options.data_dir, options.warm_start, report)
        except (ModelSourceError, OSError) as error:
            bar.stop()
            print(error if isinstance(error, ModelSourceError) else f"cannot write the model: {error}", file=sys.stderr)  # noqa: T201
            return 2
    print(path)  # noqa: T201 - the path is this command's result
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
