"""Starting an engine: what is refused in one sentence, and what is left behind when it ends (nothing)."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket as sockets
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from app.inference import launcher
from app.inference.launcher import (
    EngineAddress,
    EngineProcess,
    EngineStartError,
    check_address_is_free,
    check_model_directory,
    engine_command,
    engine_environment,
    omp_threads_bind,
    resolve_kind,
    start_engine,
)
from app.inference.serve import run_engine
from store.settings import EngineSettings, Settings
from store.types import JsonObject

SETTINGS = EngineSettings(kind="transformers", num_threads=1, max_model_len=128, startup_timeout_seconds=120)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_model_directory_that_cannot_be_served_is_refused_in_one_sentence(tiny_model_dir: Path, tmp_path: Path) -> None:
    check_model_directory(tiny_model_dir)
    for spoil, expected in (
        (lambda d: shutil.rmtree(d), "does not exist"),
        (lambda d: (d / "config.json").unlink(), "cannot be read"),
        (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
        (lambda d: (d / "model.safetensors").unlink(), "no .safetensors file"),
        (lambda d: [path.unlink() for path in d.glob("tokenizer*")], "no tokenizer"),
    ):
        directory = tmp_path / "model"
        shutil.copytree(tiny_model_dir, directory, dirs_exist_ok=True)
        spoil(directory)
        with pytest.raises(EngineStartError, match=expected) as caught:
            check_model_directory(directory)
        assert str(directory) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_socket_left_behind_is_removed_and_one_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.sock"
    with sockets.socket(sockets.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(EngineStartError, match="already serving"):
            check_address_is_free(EngineAddress(socket=path))
    assert path.exists()
    check_address_is_free(EngineAddress(socket=path))
    assert not path.exists()
    with pytest.raises(EngineStartError, match="shorter data_dir"):
        check_address_is_free(EngineAddress(socket=tmp_path / ("x" * 120)))


def test_port_in_use_is_refused(tmp_path: Path) -> None:
    with sockets.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(EngineStartError, match=r"cannot listen on 127\.0\.0\.1"):
            check_address_is_free(EngineAddress(url=url))
    check_address_is_free(EngineAddress(url=url))
    with pytest.raises(EngineStartError, match="must name a host and a port"):
        check_address_is_free(EngineAddress(url="engine"))


def test_vllm_command_names_what_the_protocol_needs() -> None:
    settings = EngineSettings(kv_cache_gib=0.5, prefix_caching=False, extra_args=("--seed", "3"))
    command = engine_command("vllm", settings, Path("/policies/v000007"), EngineAddress(socket=Path("/data/e.sock")))
    options = dict(itertools.pairwise(command))
    assert options["--model"] == "/policies/v000007"
    assert options["--uds"] == "/data/e.sock"
    assert options["--logprobs-mode"] == "processed_logprobs"
    assert json.loads(options["--weight-transfer-config"]) == {"backend": "safetensors_file"}
    assert options["--kv-cache-memory-bytes"] == str(1 << 29)
    assert {"--enable-scale-out", "--no-enable-prefix-caching"} <= set(command)
    assert command[-2:] == ["--seed", "3"]
    over_tcp = engine_command("vllm", settings, Path("/m"), EngineAddress(url="http://0.0.0.0:9000"))
    assert dict(itertools.pairwise(over_tcp))["--port"] == "9000"


def test_environment_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "runs_on_cpu", lambda: True)
    given = {"HF_HUB_OFFLINE": "0", "PATH": "/bin", "VLLM_CPU_OMP_THREADS_BIND": "1", "VLLM_SERVER_DEV_MODE": "0"}
    environment = engine_environment("vllm", SETTINGS, given)
    assert environment["HF_HUB_OFFLINE"] == "0"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"  # without it the weight routes do not exist
    assert engine_environment("vllm", SETTINGS, {})["HF_HUB_OFFLINE"] == "1"


def test_threads_are_bound_to_the_last_cores_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "available_cpus", lambda: [2, 3, 6, 7])
    assert omp_threads_bind(0) == "2,3,6,7"
    assert omp_threads_bind(1) == "7"
    assert omp_threads_bind(2) == "6,7"
    assert omp_threads_bind(9) == "2,3,6,7"


def test_kind_falls_back_to_transformers_where_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    assert resolve_kind("auto") == "transformers"
    with pytest.raises(EngineStartError, match=r"tideline\[cpu\]"):
        resolve_kind("vllm")
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: object())
    assert resolve_kind("auto") == "vllm"
    assert resolve_kind("transformers") == "transformers"


def test_engine_that_dies_while_starting_is_explained_by_its_log(tiny_model_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(tiny_model_dir, broken)
    (broken / "model.safetensors").write_bytes(b"not safetensors at all")
    address = EngineAddress(socket=tmp_path / "e.sock")
    engine = start_engine("transformers", SETTINGS, broken, address, tmp_path / "logs" / "engine.log")
    try:
        with pytest.raises(EngineStartError, match=r"exit code 1 while starting: .*Error.*engine\.log") as caught:
            engine.wait_until_healthy(120)
        assert "\n" not in str(caught.value)
    finally:
        engine.stop()


def test_log_excerpt_is_this_runs_first_error_and_not_a_warning(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("ValueError: of an earlier run\n")
    start = log.stat().st_size
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        engine = EngineProcess(process, "vllm", EngineAddress(socket=tmp_path / "e.sock"), log, start)
        assert engine.log_excerpt() == "nothing in the log"
        with log.open("a") as file:
            file.write("WARNING 12-01 ulimit may cause `OSError: too many files`\nloading\n")
            file.flush()
            assert engine.log_excerpt() == "loading"
            file.write("ERROR RuntimeError: the cause\nRuntimeError: a consequence\nbye\n")
        assert engine.log_excerpt() == "ERROR RuntimeError: the cause"


def test_engine_that_never_becomes_healthy_is_given_up(tiny_model_dir: Path, tmp_path: Path) -> None:
    address = EngineAddress(socket=tmp_path / "e.sock")
    engine = start_engine("transformers", SETTINGS, tiny_model_dir, address, tmp_path / "engine.log")
    try:
        with pytest.raises(EngineStartError, match="not healthy after 0 s"):
            engine.wait_until_healthy(0.1)
    finally:
        engine.stop()
    assert not is_running(engine.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent has died")
def test_engine_dies_with_the_process_that_started_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from app.inference.launcher import *\n"
        "from store.settings import EngineSettings\n"
        "engine = start_engine('transformers', EngineSettings(num_threads=1), Path(sys.argv[1]),"
        " EngineAddress(socket=Path(sys.argv[2])), Path(sys.argv[3]))\n"
        "print(engine.pid, flush=True); time.sleep(600)\n"
    )
    arguments = [str(tiny_model_dir), str(tmp_path / "e.sock"), str(tmp_path / "engine.log")]
    with subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert is_running(pid)
        owner.kill()
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_first_start_that_fails_ends_the_engine_process_with_its_reason(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, engine=SETTINGS)
    states: list[JsonObject] = []
    with pytest.raises(EngineStartError, match="does not exist"):
        run_engine(settings, lambda: (0, tmp_path / "missing"), lambda: None, states.append)
    assert states[-1]["state"] == "failed"
    assert "does not exist" in states[-1]["reason"]


def test_sigterm_stops_the_engine_and_returns_zero(tiny_model_dir: Path, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, engine=SETTINGS)
    states: list[JsonObject] = []

    def on_state(state: JsonObject) -> None:
        states.append(state)
        if state["state"] == "ready":
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    assert run_engine(settings, lambda: (5, tiny_model_dir), lambda: None, on_state, threading.Event()) == 0
    names = [state["state"] for state in states]
    assert names[0] == "starting"
    assert names[-2:] == ["ready", "stopped"]
    assert states[-2]["started_version"] == 5
    assert not is_running(states[-2]["pid"])
    assert signal.getsignal(signal.SIGTERM) is before


def test_weight_transfer_backend_registers_once() -> None:
    factory = pytest.importorskip("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    from app.inference.weight_transfer import register

    register()
    register()
    assert factory._registry["safetensors_file"]().__name__ == "SafetensorsFileEngine"


@pytest.mark.parametrize(
    ("supported", "granted", "used"), [(True, True, True), (True, False, False), (False, False, False)]
)
def test_amx_is_used_only_where_the_kernel_grants_it(
    monkeypatch: pytest.MonkeyPatch, supported: bool, granted: bool, used: bool
) -> None:
    import torch

    from app.inference.weight_transfer import allow_amx

    asked = []
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: supported)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True) or granted)
    allow_amx()
    assert torch.cpu._is_amx_tile_supported() is used
    assert bool(asked) is supported
