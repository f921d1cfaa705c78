"""Answering one chat request: sample each choice, keep it as a trajectory, and only then let its end be sent.

    admitted -> sampling -> sampled -> stored -> ended            one such life per choice
                   \\-> client gone or engine lost -> stored, untrainable

Invariant: a choice's end is handed out after its trajectory is durable, so nobody can judge an answer that the store
does not know. What is stored is what the engine returned: ids, log-probabilities, text and version spans untouched.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np

from app.inference.protocol import (
    EngineRequestError,
    EngineUnavailableError,
    GenerationChunk,
    InferenceEngine,
    RenderedPrompt,
)
from app.metrics import Metrics
from app.services.trainability import untrainable_reason
from store import trajectories
from store.database import AsyncDatabase
from store.ids import new_id
from store.types import JsonObject, Trajectory, VersionSpan

TIDELINE_PARAMETERS = frozenset({"model", "stream", "stream_options", "user", "metadata", "store", "n"})
"""Parameters of a chat request that are the app's business; the engine never sees them."""
KEPT_IN_SAMPLING = ("tools", "tool_choice", "response_format")


@dataclass(frozen=True, slots=True)
class ChoiceText:
    """Text that was just sampled, with the log-probability entries of its tokens if the client asked for them."""

    index: int
    text: str
    logprobs: tuple[JsonObject, ...] | None


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """The end of a choice. Its trajectory is durable (`trajectory_id` is None if it was not to be stored).

    `message` is the answer parsed by the engine, for a request with tools.
    """

    index: int
    trajectory_id: str | None
    finish_reason: str
    stop_reason: int | str | None
    version_spans: tuple[VersionSpan, ...]
    num_tokens: int
    message: JsonObject | None


ChatEvent = ChoiceText | ChoiceEnd


@dataclass(slots=True)
class Rollout:
    """What the engine has returned of one choice so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    version_spans: tuple[VersionSpan, ...] = ()

    def add(self, chunk: GenerationChunk) -> None:
        """Append one chunk."""
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.text += chunk.text
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason
            self.version_spans = chunk.version_spans or ()


@dataclass(frozen=True, slots=True)
class Admission:
    """A chat request that the engine has rendered and that is about to be sampled.

    `trajectory_ids` has one id per choice, given before the first token; `admitted_version` is the policy version at
    this moment.
    """

    request: JsonObject
    prompt: RenderedPrompt
    admitted_version: int
    trajectory_ids: tuple[str, ...]
    created_at: datetime
    keeps_trajectories: bool
    parses_tools: bool
    episode_id: str | None


class ChatService:
    """Samples chat answers. Owns the tasks that are sampling; `drain` waits for them."""

    def __init__(self, engine: InferenceEngine, database: AsyncDatabase, metrics: Metrics) -> None:
        self._engine = engine
        self._database = database
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    async def admit(
        self,
        request: JsonObject,
        *,
        num_choices: int,
        keeps_trajectories: bool,
        parses_tools: bool,
        episode_id: str | None,
    ) -> Admission:
        """Render `request` (OpenAI's JSON). Raises EngineUnavailableError and EngineRequestError."""
        version = await self._engine.weight_version()
        prompt = await self._engine.render_chat(
            {name: value for name, value in request.items() if name not in TIDELINE_PARAMETERS}
        )
        return Admission(
            request=request,
            prompt=prompt,
            admitted_version=version,
            trajectory_ids=tuple(new_id() for _ in range(num_choices)),
            created_at=datetime.now(UTC),
            keeps_trajectories=keeps_trajectories,
            parses_tools=parses_tools,
            episode_id=episode_id,
        )

    async def sample(self, admission: Admission) -> AsyncGenerator[ChatEvent, None]:
        """Sample every choice at once and yield what happens, until each has ended.

        Closing the iterator early stops the engine; what was sampled until then is stored as untrainable.
        Raises EngineUnavailableError and EngineRequestError; the other choices then stop too.
        """
        events: asyncio.Queue[ChatEvent | Exception] = asyncio.Queue()
        gone = asyncio.Event()
        for index in range(len(admission.trajectory_ids)):
            task = asyncio.create_task(self._roll_out(admission, index, events, gone))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        num_running = len(admission.trajectory_ids)
        try:
            while num_running:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                num_running -= isinstance(event, ChoiceEnd)
                yield event
        finally:
            gone.set()

    async def drain(self) -> None:
        """Wait until every choice that is being sampled is stored."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _roll_out(
        self,
        admission: Admission,
        index: int,
        events: asyncio.Queue[ChatEvent | Exception],
        gone: asyncio.Event,
    ) -> None:
        """Live one choice. This task is never cancelled: what it has sampled must reach the store."""
        try:
            rollout = Rollout()
            failure = await self._collect(admission, index, rollout, events, gone)
            if failure is None and rollout.finish_reason == "abort":
                failure = EngineUnavailableError("the engine aborted this answer")
            reason = untrainable_reason(admission.request, _sampling_parameters(admission.prompt))
            if failure is not None:
                reason = f"the engine failed before the end: {failure}"
            elif rollout.finish_reason is None:
                reason = "the client went away before the end"
            if rollout.finish_reason is None:
                reason = f"{reason}{await self._label_partial(admission, rollout)}"
            trajectory_id = await self._keep(admission, index, rollout, reason)
            if failure is not None:
                events.put_nowait(failure)
            elif rollout.finish_reason is not None:
                events.put_nowait(await self._end(admission, index, rollout, trajectory_id))
        except Exception as error:  # noqa: BLE001 - handed to the request, which answers with it
            events.put_nowait(error)

    async def _collect(
        self,
        admission: Admission,
        index: int,
        rollout: Rollout,
        events: asyncio.Queue[ChatEvent | Exception],
        gone: asyncio.Event,
    ) -> EngineUnavailableError | EngineRequestError | None:
        """Sample into `rollout` until the end or until the client is gone. Returns what went wrong in the engine."""

        async def collect() -> None:
            prompt = _with_seed_of(admission.prompt, index)
            async with aclosing(self._engine.generate(prompt, admission.trajectory_ids[index])) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    rollout.add(chunk)
                    text = "" if admission.parses_tools else chunk.text  # a tool call is told when it is whole
                    if text or chunk.top_logprobs:
                        events.put_nowait(ChoiceText(index, text, chunk.top_logprobs))

        sampling = asyncio.create_task(collect())
        leaving = asyncio.create_task(gone.wait())
        await asyncio.wait({sampling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        sampling.cancel()  # does nothing to a task that has ended
        await asyncio.wait({sampling})
        if sampling.cancelled():
            return None
        error = sampling.exception()
        if error is None or isinstance(error, EngineUnavailableError | EngineRequestError):
            return error
        raise error

    async def _label_partial(self, admission: Admission, rollout: Rollout) -> str:
        """Give an unfinished rollout its version span; the engine tells spans only at the end.

        Versions only grow, so one that is the same before and after is the version of every token in between.
        Returns what is to be added to the reason when that cannot be said.
        """
        if not rollout.token_ids:
            return ""
        rollout.finish_reason = None
        rollout.version_spans = (VersionSpan(admission.admitted_version, 0, len(rollout.token_ids)),)
        try:
            unchanged = await self._engine.weight_version() == admission.admitted_version
        except EngineUnavailableError:
            unchanged = False
        return "" if unchanged else " (its version span is the one at admission, not the engine's word)"

    async def _keep(self, admission: Admission, index: int, rollout: Rollout, reason: str | None) -> str | None:
        """Store the trajectory, durably. Returns its id, None if nothing is to be kept."""
        self._metrics.generated_tokens.inc(len(rollout.token_ids))
        if not admission.keeps_trajectories:
            return None
        trajectory = build_trajectory(admission, index, rollout, reason)
        await self._database.write(lambda session: trajectories.insert(session, trajectory))
        self._metrics.trajectories.labels("false" if reason else "true").inc()
        return trajectory.id

    async def _end(self, admission: Admission, index: int, rollout: Rollout, trajectory_id: str | None) -> ChoiceEnd:
        message = None
        finish_reason = str(rollout.finish_reason)
        if admission.parses_tools:
            message = await self._engine.derender_chat(admission.request, admission.prompt, tuple(rollout.token_ids))
            if message.get("tool_calls"):
                finish_reason = "tool_calls"
        return ChoiceEnd(
            index=index,
            trajectory_id=trajectory_id,
            finish_reason=finish_reason,
            stop_reason=rollout.stop_reason,
            version_spans=rollout.version_spans,
            num_tokens=len(rollout.token_ids),
            message=message,
        )


def build_trajectory(admission: Admission, index: int, rollout: Rollout, reason: str | None) -> Trajectory:
    """The trajectory of one choice, arrays exactly as sampled; `reason` says why it is untrainable, if it is."""
    prompt_ids = admission.prompt.token_ids
    sampling = _sampling_parameters(_with_seed_of(admission.prompt, index))
    asked = {name: admission.request[name] for name in KEPT_IN_SAMPLING if admission.request.get(name) is not None}
    return Trajectory(
        id=admission.trajectory_ids[index],
        created_at=admission.created_at,
        token_ids=np.array([*prompt_ids, *rollout.token_ids], dtype=np.int32),
        loss_mask=np.repeat(np.array([0, 1], dtype=np.uint8), [len(prompt_ids), len(rollout.token_ids)]),
        behaviour_logprobs=np.array(rollout.logprobs, dtype=np.float32),
        version_spans=rollout.version_spans,
        temperature=float(sampling.get("temperature", 1.0)),
        finish_reason=rollout.finish_reason or "abort",
        messages=admission.request["messages"],
        text=rollout.text,
        admitted_version=admission.admitted_version,
        trainable=reason is None,
        untrainable_reason=reason,
        sampling={**sampling, **asked},
        metadata=admission.request.get("metadata") or {},
        episode_id=admission.episode_id,
        user=admission.request.get("user"),
    )


def _sampling_parameters(prompt: RenderedPrompt) -> JsonObject:
    return dict(prompt.generate_request.get("sampling_params") or {})


def _with_seed_of(prompt: RenderedPrompt, index: int) -> RenderedPrompt:
    """The prompt of choice `index`: seeded choices differ by their index, as vLLM's own `n` makes them."""
    sampling = _sampling_parameters(prompt)
    if index == 0 or sampling.get("seed") is None:
        return prompt
    sampling["seed"] += index
    return replace(prompt, generate_request={**prompt.generate_request, "sampling_params": sampling})
