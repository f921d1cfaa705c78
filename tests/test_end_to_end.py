"""The whole loop on a real model: `tideline serve` with vLLM, the official `openai` client, feedback, update, swap."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BATCH_SIZE = 8
QUESTION = [{"role": "user", "content": "Tell me about the sea."}]


@dataclass(frozen=True)
class Server:
    url: str
    data_dir: Path
    process: subprocess.Popen[bytes]

    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=120)

    def get(self, path: str) -> dict[str, Any]:
        response = httpx.get(f"{self.url}{path}", timeout=30)
        response.raise_for_status()
        return response.json()

    def judge(self, trajectory_id: str, **judgement: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/feedback", json={"trajectory_id": trajectory_id, **judgement}, timeout=30)


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], timeout_seconds: float, what: str) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_seconds} s"
        time.sleep(0.25)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, micro_model_dir: Path) -> Iterator[Server]:
    data_dir = tmp_path_factory.mktemp("e2e")
    port = free_port()
    environment = os.environ | {
        "TIDELINE_ENGINE__KIND": "vllm",
        "TIDELINE_LEARNER__BATCH_SIZE": str(BATCH_SIZE),
        "TIDELINE_LEARNER__MIN_BATCH_SIZE": str(BATCH_SIZE),
        "TIDELINE_LEARNER__CRITIC__WARMUP_UPDATES": "0",
    }
    command = [sys.executable, "-m", "app.cli", "serve", "--profile", "micro", "--model", str(micro_model_dir)]
    command += ["--data-dir", str(data_dir), "--port", str(port)]
    output = (data_dir / "serve.log").open("wb")
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_ready(url) or process.poll() is not None, 240, "the server's readiness")
        assert process.poll() is None, (data_dir / "serve.log").read_text()
        yield Server(url, data_dir, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, "the server did not stop cleanly"
    finally:
        process.kill()
        output.close()


def chat(server: Server, **options: Any) -> Any:
    return server.openai().chat.completions.create(
        model="tideline", messages=QUESTION, max_tokens=24, temperature=1.0, **options
    )


def test_chat_answers_with_trajectory_and_version(server: Server) -> None:
    raw = server.openai().chat.completions.with_raw_response.create(
        model="tideline", messages=QUESTION, max_tokens=24, temperature=1.0
    )
    answer = raw.parse()
    choice = answer.choices[0]
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.id == f"chatcmpl-{choice.trajectory_id}"
    assert raw.headers["x-trajectory-id"] == choice.trajectory_id
    assert choice.policy_versions == [
        {"version": int(raw.headers["x-policy-version"]), "start": 0, "end": answer.usage.completion_tokens}
    ]


def test_stream_ends_with_usage_and_can_be_judged_at_once(server: Server) -> None:
    chunks = list(chat(server, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    trajectory_id = chunks[0].id.removeprefix("chatcmpl-")
    response = server.judge(trajectory_id, thumb="up", source="user:stream")
    assert response.status_code == 201, response.text


def version(server: Server) -> int:
    return int(server.get("/v1/learning")["version"])


def judge_one_batch(server: Server) -> list[str]:
    """Chat and judge until one more update is due; returns the feedback ids."""
    feedback_ids = []
    for index in range(BATCH_SIZE):
        answer = chat(server)
        response = server.judge(answer.id, reward=index / BATCH_SIZE, source="user:batch")
        assert response.status_code == 201, response.text
        feedback_ids.append(response.json()["id"])
    return feedback_ids


def test_feedback_trains_a_version_that_then_serves(server: Server) -> None:
    before = version(server)
    feedback_ids = judge_one_batch(server)
    wait_until(lambda: version(server) > before, 60, "an update")
    life = server.get(f"/v1/feedback/{feedback_ids[0]}")
    assert life["status"] == "trained"
    served = chat(server).choices[0].policy_versions
    assert served[0]["version"] >= life["version"] > before


def test_swap_in_the_middle_of_a_stream_leaves_two_exact_spans(server: Server) -> None:
    before = version(server)
    stop = threading.Event()
    straddling: list[tuple[list[dict[str, int]], int]] = []
    failures: list[Exception] = []

    def stream_until_stopped() -> None:
        while not stop.is_set():
            try:
                chunks = list(
                    server.openai().chat.completions.create(
                        model="tideline",
                        messages=QUESTION,
                        max_tokens=200,
                        temperature=1.0,
                        stream=True,
                        stream_options={"include_usage": True},
                        extra_body={"ignore_eos": True},
                    )
                )
            except Exception as error:  # noqa: BLE001 - the test looks at it
                failures.append(error)
                return
            spans = chunks[-2].choices[0].policy_versions
            if len(spans) > 1:
                straddling.append((spans, chunks[-1].usage.completion_tokens))
                stop.set()

    threads = [threading.Thread(target=stream_until_stopped) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 120
    while not stop.is_set() and not failures and time.monotonic() < deadline:
        judge_one_batch(server)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert straddling, "no stream was running during a swap"
    for spans, num_tokens in straddling:
        assert num_tokens == 200
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == num_tokens
        assert before <= spans[0]["version"] < spans[1]["version"] <= version(server)


def engine_processes(server: Server) -> list[int]:
    """Process ids of this server's vLLM API server."""
    result = subprocess.run(["pgrep", "-f", f"api_server.*{server.data_dir}"], capture_output=True, text=True)
    return [int(line) for line in result.stdout.split()]


def test_killed_engine_comes_back_on_the_same_version_and_feedback_is_still_taken(server: Server) -> None:
    answer = chat(server)
    wait_until(lambda: server.get("/v1/learning")["queue"]["num_ready"] < BATCH_SIZE, 60, "the learner catching up")
    time.sleep(2)
    before = version(server)
    pids = engine_processes(server)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    response = server.judge(answer.id, thumb="down", source="user:late")
    assert response.status_code == 201
    wait_until(lambda: not is_ready(server.url), 30, "noticing the loss of the engine")
    refused = httpx.post(f"{server.url}/v1/chat/completions", json={"model": "tideline", "messages": QUESTION})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    wait_until(lambda: is_ready(server.url), 180, "the engine's return")
    assert chat(server).choices[0].policy_versions[0]["version"] == before
