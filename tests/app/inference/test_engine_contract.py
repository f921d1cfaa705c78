"""What every engine must do, held against both of them over the real wire."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import stat
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from app.inference.client import EngineClient
from app.inference.protocol import (
    EngineRequestError,
    EngineUnavailableError,
    GenerationChunk,
    Probe,
    SwapError,
)
from app.inference.swap import SwapClient
from store.types import JsonObject, VersionSpan
from tests.app.inference.conftest import MAX_MODEL_LEN, RunningEngine
from tests.app.inference.models import (
    load_reference,
    probe_of,
    reference_logprobs,
    roughened,
    with_tensors,
)

MESSAGES = [{"role": "user", "content": "Hello! How are you today?"}]
NUM_STREAMS = 16


@pytest.fixture
async def client(engine: RunningEngine) -> AsyncIterator[EngineClient]:
    async with EngineClient(socket=engine.socket) as opened:
        yield opened


@pytest.fixture
def swap(engine: RunningEngine) -> Iterator[SwapClient]:
    with SwapClient(socket=engine.socket) as opened:
        yield opened


@pytest.fixture(scope="module")
def served(engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """(version, directory) of a freshly swapped-in policy, so that no test depends on what others left behind."""
    directory = roughened(engine.policy[1], tmp_path_factory.mktemp("served") / "policy", noise=0.5)
    with SwapClient(socket=engine.socket) as swap:
        swap.publish(directory, 1, probe_of(directory))
    return 1, directory


@pytest.fixture(scope="module")
def versions() -> Iterator[int]:
    return itertools.count(2)


async def collect(client: EngineClient, request: JsonObject) -> tuple[tuple[int, ...], list[GenerationChunk]]:
    """Return (prompt ids, chunks) of a chat request."""
    prompt = await client.render_chat(request)
    return prompt.token_ids, [chunk async for chunk in client.generate(prompt, "test")]


def generated(chunks: list[GenerationChunk]) -> tuple[int, ...]:
    return tuple(token_id for chunk in chunks for token_id in chunk.token_ids)


def sampled_logprobs(chunks: list[GenerationChunk]) -> tuple[float, ...]:
    return tuple(logprob for chunk in chunks for logprob in chunk.logprobs)


def text_of(chunks: list[GenerationChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def post(engine: RunningEngine, path: str, **arguments: object) -> httpx.Response:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(engine.socket)), timeout=60) as http:
        return http.post(f"http://engine{path}", **arguments)  # type: ignore[arg-type]


async def test_engine_is_ready_with_its_version_on_a_private_socket(
    client: EngineClient, engine: RunningEngine, served: tuple[int, Path]
) -> None:
    assert await client.is_ready()
    assert await client.weight_version() == served[0]
    assert stat.S_IMODE(engine.socket.stat().st_mode) == 0o600


async def test_prompt_is_the_rendered_chat_template(client: EngineClient, served: tuple[int, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served[1])
    parts = [{"type": "text", "text": "Hello! How"}, {"type": "text", "text": "are you today?"}]
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert (await client.render_chat({"messages": MESSAGES})).token_ids == tuple(expected)
    in_parts = await client.render_chat({"messages": [{"role": "user", "content": parts}], "model": "any-name"})
    joined = [{"role": "user", "content": "Hello! How\nare you today?"}]
    assert list(in_parts.token_ids) == tokenizer.apply_chat_template(
        joined, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
async def test_logprobs_equal_a_forward_pass_at_the_sampling_temperature(
    client: EngineClient, served: tuple[int, Path], temperature: float
) -> None:
    reference = load_reference(served[1])
    differences = []
    for seed in range(4):
        request = {"messages": MESSAGES, "max_tokens": 40, "temperature": temperature, "seed": seed}
        prompt_ids, chunks = await collect(client, request)
        expected = reference_logprobs(reference, prompt_ids, generated(chunks), temperature)
        assert len(sampled_logprobs(chunks)) == len(expected)
        differences += [abs(a - b) for a, b in zip(sampled_logprobs(chunks), expected, strict=True)]
    assert sum(differences) / len(differences) < 0.02
    assert max(differences) < 0.3


async def test_temperature_zero_takes_the_most_likely_token(client: EngineClient, served: tuple[int, Path]) -> None:
    request = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    prompt_ids, chunks = await collect(client, request)
    ids = torch.tensor([[*prompt_ids, *generated(chunks)]])
    with torch.no_grad():
        logprobs_TV = load_reference(served[1])(input_ids=ids).logits[0].float().log_softmax(-1)
    best = logprobs_TV[len(prompt_ids) - 1 : -1].max(-1).values.tolist()
    own = reference_logprobs(load_reference(served[1]), prompt_ids, generated(chunks))
    assert max(a - b for a, b in zip(best, own, strict=True)) < 0.1  # bf16 may order near-ties differently
    assert generated((await collect(client, request))[1]) == generated(chunks)


async def test_truncated_sampling_reports_the_truncated_distribution(
    client: EngineClient, served: tuple[int, Path]
) -> None:
    _, chunks = await collect(client, {"messages": MESSAGES, "max_tokens": 8, "temperature": 1.0, "top_k": 1})
    assert sampled_logprobs(chunks) == pytest.approx([0.0] * len(generated(chunks)), abs=1e-4)
    _, chunks = await collect(client, {"messages": MESSAGES, "max_tokens": 8, "temperature": 1.0, "top_p": 1e-6})
    assert sampled_logprobs(chunks) == pytest.approx([0.0] * len(generated(chunks)), abs=1e-4)


async def test_seed_repeats_a_sample_whatever_runs_beside_it(client: EngineClient, served: tuple[int, Path]) -> None:
    request = {"messages": MESSAGES, "max_tokens": 12, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    _, alone = await collect(client, request)
    others = {"messages": MESSAGES, "max_tokens": 20, "temperature": 1.0}
    (_, again), *_ = await asyncio.gather(collect(client, request), *(collect(client, others) for _ in range(4)))
    _, other_seed = await collect(client, {**request, "seed": 8})
    assert generated(again) == generated(alone)
    assert generated(other_seed) != generated(alone)


async def test_text_is_the_decoded_tokens(client: EngineClient, served: tuple[int, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served[1])
    for seed in range(6):
        request = {"messages": MESSAGES, "max_tokens": 60, "temperature": 1.5, "seed": seed, "ignore_eos": True}
        _, chunks = await collect(client, request)
        decoded = tokenizer.decode(generated(chunks), skip_special_tokens=True)
        # Bytes at the very end that are not a whole character yet are dropped rather than shown broken.
        assert text_of(chunks).rstrip("�") == decoded[: len(text_of(chunks))].rstrip("�")
        assert set(decoded[len(text_of(chunks)) :]) <= {"�"}


async def test_length_ends_a_sample(client: EngineClient, served: tuple[int, Path]) -> None:
    _, chunks = await collect(client, {"messages": MESSAGES, "max_tokens": 5, "ignore_eos": True})
    assert len(generated(chunks)) == 5
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1].stop_reason is None
    assert chunks[-1].version_spans == (VersionSpan(served[0], 0, 5),)
    assert all(chunk.version_spans is None for chunk in chunks[:-1])


async def test_context_window_ends_a_sample(client: EngineClient, served: tuple[int, Path]) -> None:
    prompt_ids, chunks = await collect(client, {"messages": MESSAGES, "ignore_eos": True})
    assert chunks[-1].finish_reason == "length"
    assert len(prompt_ids) + len(generated(chunks)) == MAX_MODEL_LEN


async def test_end_token_ends_a_sample_without_a_stop_reason(client: EngineClient, served: tuple[int, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served[1])
    requests = [{"messages": MESSAGES, "max_tokens": 200, "temperature": 1.5, "seed": seed} for seed in range(12)]
    samples = [chunks for _, chunks in await asyncio.gather(*(collect(client, request) for request in requests))]
    ended = [chunks for chunks in samples if chunks[-1].finish_reason == "stop"]
    assert ended
    for chunks in ended:
        assert generated(chunks)[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in generated(chunks)[:-1]
        assert chunks[-1].stop_reason is None
        assert tokenizer.eos_token not in text_of(chunks)
        assert len(sampled_logprobs(chunks)) == len(generated(chunks))


async def test_stop_token_ends_a_sample_and_is_named(client: EngineClient, served: tuple[int, Path]) -> None:
    request = {"messages": MESSAGES, "max_tokens": 40, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    whole = generated((await collect(client, request))[1])
    stop_id = whole[10]
    _, chunks = await collect(client, {**request, "stop_token_ids": [stop_id]})
    assert generated(chunks) == whole[: whole.index(stop_id) + 1]
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", stop_id)


async def test_stop_string_ends_a_sample_and_is_cut_from_the_text_but_not_from_the_tokens(
    client: EngineClient, served: tuple[int, Path]
) -> None:
    request = {"messages": MESSAGES, "max_tokens": 60, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    _, whole = await collect(client, request)
    text = text_of(whole)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    assert stop
    _, chunks = await collect(client, {**request, "stop": [stop, "never in this text"]})
    assert text_of(chunks) == text[: text.index(stop)]
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", stop)
    assert generated(chunks) == generated(whole)[: len(generated(chunks))]
    assert stop in AutoTokenizer.from_pretrained(served[1]).decode(generated(chunks), skip_special_tokens=True)
    assert len(sampled_logprobs(chunks)) == len(generated(chunks))


async def test_requested_logprobs_are_openai_entries(client: EngineClient, served: tuple[int, Path]) -> None:
    request = {"messages": MESSAGES, "max_tokens": 4, "temperature": 1.0, "logprobs": True, "top_logprobs": 3}
    _, chunks = await collect(client, request)
    for chunk in chunks:
        assert chunk.top_logprobs is not None
        for entry, logprob in zip(chunk.top_logprobs, chunk.logprobs, strict=True):
            assert entry["logprob"] == logprob
            assert bytes(entry["bytes"]).decode() == entry["token"]
            assert len(entry["top_logprobs"]) >= 3
            assert max(top["logprob"] for top in entry["top_logprobs"]) >= logprob
    _, chunks = await collect(client, {"messages": MESSAGES, "max_tokens": 4})
    assert all(chunk.top_logprobs is None for chunk in chunks)


async def test_derender_gives_the_assistant_message(client: EngineClient, served: tuple[int, Path]) -> None:
    request = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0.7}
    prompt = await client.render_chat(request)
    chunks = [chunk async for chunk in client.generate(prompt, "derender")]
    message = await client.derender_chat(request, prompt, generated(chunks))
    assert message["role"] == "assistant"
    assert message["content"].rstrip("�") == text_of(chunks).rstrip("�")
    assert not message.get("tool_calls")


@pytest.mark.parametrize(
    ("changed", "param", "named"),
    [
        ({"messages": []}, None, "message|conversation"),
        ({"messages": "hello"}, "messages", "messages"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"temperature": "warm"}, "temperature", "temperature"),
        ({"top_p": 0}, "top_p", "top_p"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens", str(MAX_MODEL_LEN)),
        ({"messages": [{"role": "user", "content": "hello " * 400}]}, "input_tokens", str(MAX_MODEL_LEN)),
    ],
)
async def test_bad_request_is_refused_naming_its_fault(
    client: EngineClient, changed: JsonObject, param: str | None, named: str
) -> None:
    with pytest.raises(EngineRequestError, match=named) as caught:
        await client.render_chat({"messages": MESSAGES, **changed})
    assert caught.value.status_code == 400
    if param is not None:
        assert (caught.value.param or "").split(".")[0] == param


async def test_unknown_token_id_is_refused(client: EngineClient) -> None:
    prompt = await client.render_chat({"messages": MESSAGES, "max_tokens": 4})
    broken = type(prompt)((5, 10_000_000), {**prompt.generate_request, "token_ids": [5, 10_000_000]})
    with pytest.raises(EngineRequestError, match=r"10000000|vocabulary"):
        async for _ in client.generate(broken, "unknown"):
            pass


async def test_disconnect_stops_generation(client: EngineClient, engine: RunningEngine) -> None:
    async def num_running() -> float:
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(engine.socket))) as http:
            lines = (await http.get("http://engine/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running"))

    prompt = await client.render_chat({"messages": MESSAGES, "ignore_eos": True})
    streams = [client.generate(prompt, f"leaving-{number}") for number in range(8)]
    for stream in streams:
        await anext(aiter(stream))
    started = time.monotonic()
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]
    while await num_running() > 0:
        assert time.monotonic() - started < 5, "the engine still samples for clients that have gone"
        await asyncio.sleep(0.02)
    _, chunks = await collect(client, {"messages": MESSAGES, "max_tokens": 4, "ignore_eos": True})
    assert len(generated(chunks)) == 4


@pytest.mark.parametrize("clear_cache", [False, True])
async def test_swap_under_load_completes_every_stream_with_exact_version_spans(
    client: EngineClient,
    engine: RunningEngine,
    served: tuple[int, Path],
    versions: Iterator[int],
    tmp_path: Path,
    clear_cache: bool,
) -> None:
    num_straddling = 0
    late_differences: list[float] = []
    # A tiny model finishes in a moment; on a busy machine that may be before the swap arrives.
    while num_straddling < NUM_STREAMS // 2:
        before, version = await client.weight_version(), next(versions)
        assert version < 20, "no swap ever found a stream running"
        policy = roughened(served[1], tmp_path / f"policy-{version}", noise=0.3, seed=version)
        reference = load_reference(policy)
        for prompt_ids, chunks in await swap_under_load(client, engine, policy, version, clear_cache):
            spans = chunks[-1].version_spans
            assert spans is not None
            assert chunks[-1].finish_reason == "length"
            assert len(generated(chunks)) == len(sampled_logprobs(chunks)) == 200
            assert [span.version for span in spans] in ([before], [version], [before, version])
            assert [0, *(span.end for span in spans)] == [*(span.start for span in spans), 200]
            if len(spans) == 2:
                num_straddling += 1
                after = slice(spans[1].start, None)
                expected = reference_logprobs(reference, prompt_ids, generated(chunks))[after]
                late_differences += [abs(a - b) for a, b in zip(expected, sampled_logprobs(chunks)[after], strict=True)]
    # With the cache recomputed, what follows the swap is exactly the new policy's; with it kept, it is not quite.
    assert (sum(late_differences) / len(late_differences) < 0.02) == clear_cache


async def swap_under_load(
    client: EngineClient, engine: RunningEngine, policy: Path, version: int, clear_cache: bool
) -> list[tuple[tuple[int, ...], list[GenerationChunk]]]:
    """Swap while streams run. Returns (prompt ids, chunks) of each."""
    probe = probe_of(policy)
    sent: list[int] = []
    swapped = asyncio.Event()

    async def stream(number: int) -> tuple[tuple[int, ...], list[GenerationChunk]]:
        request = {"messages": MESSAGES, "max_tokens": 200, "temperature": 1.0, "seed": number, "ignore_eos": True}
        prompt = await client.render_chat(request)
        sent.append(number)
        chunks = []
        async for chunk in client.generate(prompt, f"load-{number}"):
            chunks.append(chunk)
            # Reading on would keep this process too busy to pause the engine in time; it samples all the same.
            await swapped.wait()
        return prompt.token_ids, chunks

    def let_them_run_and_swap() -> None:
        with SwapClient(socket=engine.socket, clear_cache=clear_cache) as swap:
            assert post(engine, "/resume").status_code == 200
            time.sleep(0.05)
            report = swap.publish(policy, version, probe)
        assert report.version == version
        assert 0 < report.pause_seconds < report.total_seconds
        assert swap_version(engine) == version

    # All of them wait in the engine before the first is sampled.
    assert post(engine, "/pause", params={"mode": "keep", "clear_cache": "false"}).status_code == 200
    streams = [asyncio.create_task(stream(number)) for number in range(NUM_STREAMS)]
    while len(sent) < NUM_STREAMS:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    await asyncio.to_thread(let_them_run_and_swap)
    swapped.set()
    return await asyncio.gather(*streams)


def swap_version(engine: RunningEngine) -> int:
    with SwapClient(socket=engine.socket) as swap:
        return swap.weight_version()


async def test_requests_wait_while_the_engine_is_paused(
    client: EngineClient, engine: RunningEngine, served: tuple[int, Path]
) -> None:
    assert post(engine, "/pause", params={"mode": "keep", "clear_cache": "false"}).status_code == 200
    waiting = asyncio.create_task(collect(client, {"messages": MESSAGES, "max_tokens": 3, "ignore_eos": True}))
    done, _ = await asyncio.wait([waiting], timeout=0.7)
    assert not done
    assert post(engine, "/resume").status_code == 200
    assert len(generated((await waiting)[1])) == 3


def bad_policies(served: Path, directory: Path) -> dict[str, Path]:
    tensors = load_file(served / "model.safetensors")
    norm = tensors["model.norm.weight"]
    nan = norm.clone()
    nan[3] = math.nan
    corrupt = with_tensors(served, directory / "corrupt", {})
    whole = (corrupt / "model.safetensors").read_bytes()
    (corrupt / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    return {
        "lm_head.weight": with_tensors(served, directory / "head", {"lm_head.weight": None}),
        "differs from": with_tensors(
            served, directory / "untied", {"lm_head.weight": tensors["lm_head.weight"] * 1.25}
        ),
        "model.norm.weight holds a value that is not finite": with_tensors(
            served, directory / "nan", {"model.norm.weight": nan}
        ),
        "shape": with_tensors(served, directory / "shape", {"model.norm.weight": norm[:5].clone()}),
        "unknown": with_tensors(served, directory / "unknown", {"model.extra.weight": norm.clone()}),
        "cannot be read": corrupt,
        "No such file": directory / "missing",
    }


async def test_bad_weights_are_refused_and_never_touch_the_model(
    client: EngineClient, engine: RunningEngine, swap: SwapClient, served: tuple[int, Path], tmp_path: Path
) -> None:
    probe = probe_of(served[1])
    swap.publish(served[1], 100, probe)
    before = swap.score(probe.prompt_ids, probe.continuation_ids)
    for reason, directory in bad_policies(served[1], tmp_path).items():
        with pytest.raises(SwapError, match=reason):
            swap.publish(directory, 101, probe)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(engine.socket))) as http:
            assert http.get("http://engine/is_paused").json() == {"is_paused": True}, reason
        assert await client.weight_version() == 100, reason
        # Tideline restarts the engine here; resuming it shows that the model itself was left alone.
        post(engine, "/resume")
        assert swap.score(probe.prompt_ids, probe.continuation_ids) == before, reason


def test_probe_that_does_not_match_fails_the_swap(
    engine: RunningEngine, served: tuple[int, Path], tmp_path: Path
) -> None:
    with SwapClient(socket=engine.socket) as swap:
        probe = probe_of(served[1])
        other = roughened(served[1], tmp_path / "other", noise=0.6, seed=9)
        with pytest.raises(SwapError, match="does not serve policy version 3 as the learner has it"):
            swap.publish(other, 3, probe)
        missing = Probe(probe.prompt_ids, probe.continuation_ids, probe.expected_logprobs[:-1])
        with pytest.raises(SwapError, match="scored 64 probe tokens where the learner has 63"):
            swap.publish(served[1], 4, missing)


async def test_version_label_cannot_move_without_weights(
    client: EngineClient, engine: RunningEngine, served: tuple[int, Path]
) -> None:
    version = await client.weight_version()
    post(engine, "/pause", params={"mode": "keep", "clear_cache": "false"})
    post(engine, "/start_weight_update")
    assert post(engine, "/finish_weight_update", json={"weight_version": "999"}).status_code >= 400
    post(engine, "/resume")
    assert await client.weight_version() == version
    # The weight update is still open, and the next swap fails on it: the test below has the engine restarted.


async def test_restart_after_a_failed_swap_recovers_on_the_last_good_version(
    client: EngineClient, engine: RunningEngine, swap: SwapClient, served: tuple[int, Path], tmp_path: Path
) -> None:
    good = roughened(served[1], tmp_path / "good", noise=0.3, seed=4)
    broken = with_tensors(served[1], tmp_path / "broken", {"lm_head.weight": None})
    probe = probe_of(good)
    # It waits in the paused engine: one that ran would at times be done before the swap gets to pause it.
    assert post(engine, "/pause", params={"mode": "keep", "clear_cache": "false"}).status_code == 200
    stream = asyncio.create_task(collect(client, {"messages": MESSAGES, "ignore_eos": True}))
    await asyncio.sleep(0.5)
    with pytest.raises(SwapError):
        await asyncio.to_thread(swap.publish, broken, 9, probe)
    assert not stream.done()
    restart = asyncio.create_task(asyncio.to_thread(engine.restart, 7, good))
    with pytest.raises(EngineUnavailableError):
        await stream
    await restart
    assert await client.is_ready()
    assert await client.weight_version() == 7
    scored = swap.score(probe.prompt_ids, probe.continuation_ids)
    assert sum(abs(a - b) for a, b in zip(scored, probe.expected_logprobs, strict=True)) / len(scored) < 0.02
    assert engine.state["reason"] == "the test asked for it"
    assert json.dumps(engine.state)


async def test_crashed_engine_is_started_again(client: EngineClient, engine: RunningEngine) -> None:
    if engine.kind == "vllm":
        pytest.skip("the same code path; another start of vLLM buys nothing")
    import os
    import signal

    num_restarts = engine.state["num_restarts"]
    os.kill(engine.state["pid"], signal.SIGKILL)
    await asyncio.to_thread(engine.wait_for_restart, num_restarts)
    assert "exited with code -9" in engine.state["reason"]
    assert await client.is_ready()


async def test_no_engine_is_unavailable(tmp_path: Path) -> None:
    async with EngineClient(socket=tmp_path / "none.sock") as client:
        assert not await client.is_ready()
        with pytest.raises(EngineUnavailableError):
            await client.weight_version()
        with pytest.raises(EngineUnavailableError):
            await client.render_chat({"messages": MESSAGES})
    with SwapClient(socket=tmp_path / "none.sock") as swap, pytest.raises(EngineUnavailableError):
        swap.publish(tmp_path, 1, Probe((1,), (2,), (-1.0,)))
