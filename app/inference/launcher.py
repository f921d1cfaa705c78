"""Starting, watching and stopping one engine as a child process: vLLM's API server, or the transformers engine.

Invariant: the engine never outlives its owner. It runs in a session of its own, so that one signal reaches all of
its processes; it is told to stop when its parent dies (Linux), and its Unix socket is only ever open to its user.

    checked -> started -> healthy -> labelled with its policy version -> ... -> stopped

What makes vLLM start fast on CPU: eager mode with an explicit KV-cache size skips both the compilation and the
warm-up pass. An explicit size also makes it ignore `--gpu-memory-utilization`, whose default refuses to start beside
a learner.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import socket as sockets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx

from app.inference.weight_transfer import BACKEND
from app.inference.wire import SOCKET_BASE_URL, socket_answers
from store.settings import EngineSettings
from store.types import TidelineError

EngineKind = Literal["vllm", "transformers"]

SERVED_MODEL_NAME = "tideline"
GIB = 1 << 30
MAX_SOCKET_PATH_BYTES = 107
MAX_LOG_BYTES = 16 << 20
HEALTH_POLL_SECONDS = 0.2
TERMINATE_SECONDS = 15.0
PR_SET_PDEATHSIG = 1
ERROR_LINE = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
HARMLESS_LINE = re.compile(r"\b(DEBUG|INFO|WARNING)\b")


class EngineStartError(TidelineError, RuntimeError):
    """An engine could not be started; the message is one sentence that says why."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine listens: a Unix socket, or a host and port. Exactly one is set."""

    socket: Path | None = None
    url: str | None = None

    def http_client(self, timeout_seconds: float) -> httpx.Client:
        """A client whose relative URLs reach this engine."""
        transport = httpx.HTTPTransport(uds=None if self.socket is None else str(self.socket))
        return httpx.Client(base_url=self.url or SOCKET_BASE_URL, transport=transport, timeout=timeout_seconds)

    def __str__(self) -> str:
        return str(self.socket) if self.socket is not None else str(self.url)


def resolve_kind(kind: str) -> EngineKind:
    """Return the engine to run: `auto` is vLLM where it is installed, the transformers engine elsewhere.

    Raises EngineStartError when vLLM is asked for by name and is not installed.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if kind == "vllm" and not installed:
        raise EngineStartError(
            "engine.kind is vllm but vLLM is not installed: install tideline[cpu] or tideline[gpu], "
            "or set engine.kind to transformers"
        )
    if kind == "auto":
        return "vllm" if installed else "transformers"
    return "vllm" if kind == "vllm" else "transformers"


def check_model_directory(directory: Path) -> None:
    """Raise EngineStartError, in one sentence, unless `directory` looks like a model that can be served."""
    if not directory.is_dir():
        raise EngineStartError(f"the model directory {directory} does not exist")
    try:
        json.loads((directory / "config.json").read_text())
        weights = sorted(directory.glob("*.safetensors"))
        if not weights:
            raise EngineStartError(f"the model directory {directory} holds no .safetensors file")
        for file in weights:
            with file.open("rb") as opened:
                opened.read(8)
    except OSError as error:
        raise EngineStartError(f"the model directory {directory} cannot be read: {error}") from error
    except ValueError as error:
        raise EngineStartError(f"{directory / 'config.json'} is not valid JSON: {error}") from error
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        raise EngineStartError(f"the model directory {directory} holds no tokenizer")


def check_address_is_free(address: EngineAddress) -> None:
    """Raise EngineStartError if something answers there already; remove a socket file that nobody answers on."""
    if address.socket is not None:
        length = len(os.fsencode(address.socket))
        if length > MAX_SOCKET_PATH_BYTES:
            raise EngineStartError(
                f"the engine socket's path {address.socket} has {length} bytes and the system allows "
                f"{MAX_SOCKET_PATH_BYTES}: choose a shorter data_dir"
            )
        if socket_answers(str(address.socket)):
            raise EngineStartError(f"another engine is already serving on {address.socket}")
        address.socket.unlink(missing_ok=True)
        return
    host, port = host_and_port(address)
    with sockets.socket(sockets.AF_INET6 if ":" in host else sockets.AF_INET, sockets.SOCK_STREAM) as attempt:
        attempt.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        try:
            attempt.bind((host, port))
        except OSError as error:
            raise EngineStartError(f"the engine cannot listen on {host}:{port}: {error.strerror}") from error


def host_and_port(address: EngineAddress) -> tuple[str, int]:
    """Host and port of an address that has a URL. Raises EngineStartError for a URL without a port."""
    parts = urlsplit(address.url or "")
    if parts.hostname is None or parts.port is None:
        raise EngineStartError(f"engine.url {address.url!r} must name a host and a port, as http://127.0.0.1:9000 does")
    return parts.hostname, parts.port


def engine_command(kind: EngineKind, settings: EngineSettings, model: Path, address: EngineAddress) -> list[str]:
    """The command line that serves `model` at `address`."""
    if address.socket is not None:
        where = ["--uds", str(address.socket)]
    else:
        host, port = host_and_port(address)
        where = ["--host", host, "--port", str(port)]
    common = [
        *("--model", str(model), "--dtype", settings.dtype, *where),
        *("--max-model-len", str(settings.max_model_len), "--max-num-seqs", str(settings.max_num_seqs)),
    ]
    if kind == "transformers":
        threads = str(settings.num_threads or len(available_cpus()))
        return [sys.executable, "-m", "app.inference.transformers_engine", *common, "--num-threads", threads]
    return [
        *(sys.executable, "-W", "ignore::DeprecationWarning", "-m", "vllm.entrypoints.openai.api_server"),
        *common,
        *("--served-model-name", SERVED_MODEL_NAME),
        # The policy is sampled as it is: generation_config.json may not quietly set temperature or top_p.
        *("--generation-config", "vllm"),
        *("--kv-cache-memory-bytes", str(int(settings.kv_cache_gib * GIB))),
        "--enable-prefix-caching" if settings.prefix_caching else "--no-enable-prefix-caching",
        "--enable-scale-out",
        *("--logprobs-mode", "processed_logprobs"),
        *("--weight-transfer-config", json.dumps({"backend": BACKEND})),
        *("--disable-uvicorn-access-log", "--no-log-error-stack"),
        *(["--enforce-eager"] if runs_on_cpu() else []),
        *settings.extra_args,
    ]


def engine_environment(kind: EngineKind, settings: EngineSettings, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of the engine's processes: `base` with what it needs; what the user set himself wins."""
    defaults = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if kind == "vllm":
        # The weight-update and version routes exist only in this mode, which is why the socket is private.
        defaults |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1"}
        if runs_on_cpu():
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = omp_threads_bind(settings.num_threads)
            # The learner and the engine share the cores: threads that spin at a barrier starve each other. With the
            # cores contended, waiting passively decoded about twice as fast as spinning.
            defaults["OMP_WAIT_POLICY"] = "PASSIVE"
    environment = {**defaults, **base}
    if kind == "vllm":
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    return environment


def omp_threads_bind(num_threads: int) -> str:
    """VLLM_CPU_OMP_THREADS_BIND for this many threads (0: every core this process may run on): a list of cores.

    The last cores are taken: the first ones are busiest with everything else that runs.
    """
    cpus = available_cpus()
    return ",".join(str(cpu) for cpu in cpus[-num_threads:]) if cpus else "nobind"


def available_cpus() -> list[int]:
    """Cores this process may run on, in order."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def runs_on_cpu() -> bool:
    """True when the installed vLLM is the CPU build."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


class EngineProcess:
    """One running engine. Made by `start_engine`; `stop` ends it and every process it started."""

    def __init__(
        self, process: subprocess.Popen[bytes], kind: EngineKind, address: EngineAddress, log: Path, log_start: int
    ) -> None:
        self._process = process
        self._log_start = log_start
        self.kind = kind
        self.address = address
        self.log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.poll()

    def wait_until_healthy(self, timeout_seconds: float, give_up: Callable[[], bool] = lambda: False) -> None:
        """Return once the engine answers its health check; or at once when `give_up()` is true.

        Raises EngineStartError, quoting the log, if it exits before or takes longer.
        """
        deadline = time.monotonic() + timeout_seconds
        with self.address.http_client(timeout_seconds=5.0) as http:
            while not give_up():
                code = self.exit_code()
                if code is not None:
                    raise EngineStartError(
                        f"the {self.kind} engine stopped with exit code {code} while starting: {self.log_excerpt()} "
                        f"(whole log: {self.log})"
                    )
                if self._is_healthy(http):
                    if self.address.socket is not None:
                        self.address.socket.chmod(0o600)
                    return
                if time.monotonic() > deadline:
                    raise EngineStartError(
                        f"the {self.kind} engine was not healthy after {timeout_seconds:.0f} s: {self.log_excerpt()} "
                        f"(whole log: {self.log})"
                    )
                time.sleep(HEALTH_POLL_SECONDS)

    def _is_healthy(self, http: httpx.Client) -> bool:
        if self.address.socket is not None and not socket_answers(str(self.address.socket)):
            return False
        try:
            return http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def warm_up(self) -> None:
        """Sample a few tokens, so that the first user does not wait for the kernels that are built on first use.

        Raises EngineStartError if the engine is healthy but cannot sample.
        """
        body = {"token_ids": [1, 1], "sampling_params": {"max_tokens": 2, "ignore_eos": True}, "stream": False}
        try:
            with self.address.http_client(timeout_seconds=120.0) as http:
                http.post("/inference/v1/generate", json=body).raise_for_status()
        except httpx.HTTPError as error:
            raise EngineStartError(f"the {self.kind} engine cannot sample: {error} (log: {self.log})") from error

    def label(self, version: int) -> None:
        """Tell the engine which policy version its weights are. Raises EngineStartError if it does not take it."""
        try:
            with self.address.http_client(timeout_seconds=30.0) as http:
                http.post("/update_weight_version", json={"new_version": str(version)}).raise_for_status()
        except httpx.HTTPError as error:
            raise EngineStartError(f"the {self.kind} engine did not take its policy version: {error}") from error

    def log_excerpt(self) -> str:
        """The line of this run's log that says most: its first error, or its last line."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._log_start)
                lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        except OSError:
            return "no log"
        # The root cause comes first; what follows it are the other processes giving up.
        telling = [line for line in lines if ERROR_LINE.search(line) and not HARMLESS_LINE.search(line)]
        return (telling or lines[-1:] or ["nothing in the log"])[0][:500]

    def stop(self, timeout_seconds: float = TERMINATE_SECONDS) -> int:
        """SIGTERM, then SIGKILL, to every process of the engine's session. Returns the exit code."""
        self._signal_group(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the SIGKILL below ends it
            self._process.wait(timeout_seconds)
        self._signal_group(signal.SIGKILL)
        code = self._process.wait()
        if self.address.socket is not None:
            self.address.socket.unlink(missing_ok=True)
        return code

    def _signal_group(self, signal_number: int) -> None:
        try:
            os.killpg(self._process.pid, signal_number)
        except ProcessLookupError:
            pass  # all of them are gone already
        except PermissionError:
            self._process.send_signal(signal_number)  # macOS refuses a group with a zombie in it


def start_engine(
    kind: EngineKind, settings: EngineSettings, model: Path, address: EngineAddress, log: Path
) -> EngineProcess:
    """Start an engine that serves `model`. It is not healthy yet when this returns.

    Raises EngineStartError for an unreadable model directory or an address that is taken.
    """
    check_model_directory(model)
    check_address_is_free(address)
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    with log.open("ab") as output:
        log_start = output.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            engine_command(kind, settings, model, address),
            env=engine_environment(kind, settings, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # The socket is created by the engine itself, so this is what makes it private from the first moment.
            umask=0o077,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
    return EngineProcess(process, kind, address, log, log_start)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
