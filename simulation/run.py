"""Drive a running server through a schedule of preferences and record how its answers follow.

    users ask and judge all the time; beside them one watcher polls GET /v1/learning (version, queue) and
    GET /v1/learning/steps; every `evaluate_every` versions it measures held-out shares, and it ends the phases

Invariant: rows are in order of version, and a `switch` row stands between the last measurement under one preference
and the first under the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from simulation.evaluation import Evaluation, evaluate_with
from simulation.schedule import Phase, Schedule, paper_schedule
from simulation.server import Patience, get_json, open_clients
from simulation.users import Crowd, Judgement, be_user


@dataclass(frozen=True, slots=True)
class Simulation:
    """A whole run: who prefers what when, how the crowd behaves, and how often it is measured."""

    schedule: Schedule = field(default_factory=paper_schedule)
    crowd: Crowd = field(default_factory=Crowd)
    evaluate_every: int = 2
    """Measure after this many policy versions, at every start and end of a phase as well."""
    num_samples: int = 40
    """Held-out answers in one measurement."""
    poll_seconds: float = 0.5
    timeout_seconds: float = 120.0
    """Longest wait for one response."""
    give_up_after_seconds: float = 300.0
    """How long an absent server is waited for."""
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the adaptation record; `kind` is `evaluation`, `switch` or the name of a learner's event.

    Shares and reward are set for evaluations only. `version` is the policy served when the row was begun.
    """

    kind: str
    version: int
    phase: int
    preferred: str
    elapsed_seconds: float
    shares: dict[str, float] | None = None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """Preference number `index` of `num_phases` holds from here on."""

    index: int
    num_phases: int
    phase: Phase
    version: int


@dataclass(frozen=True, slots=True)
class Polled:
    """The server's own account, as of now; `learning` is the whole answer of GET /v1/learning."""

    version: int
    num_ready: int
    num_judgements: int
    mean_recent_reward: float | None
    learning: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepTaken:
    """A learner update, as GET /v1/learning/steps tells it."""

    step: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement on held-out topics was made (its texts are in `evaluation`)."""

    row: Row
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class Judged:
    """A user has judged an answer, or chosen not to."""

    judgement: Judgement


Event = PhaseStarted | Polled | StepTaken | Measured | Judged

RECENT_JUDGEMENTS = 64


class _Run:
    """State of one run; `rows` grows as it goes on."""

    def __init__(self, config: Simulation, on_event: Callable[[Event], None], rows: list[Row]) -> None:
        self.config = config
        self.on_event = on_event
        self.rows = rows
        self.phase_index = 0
        self.may_ask = asyncio.Event()
        self.may_ask.set()
        self.patience = Patience(config.give_up_after_seconds)
        self.rewards: list[float] = []
        self.num_judgements = 0
        self.last_step = -1
        self.began = time.monotonic()

    @property
    def phase(self) -> Phase:
        return self.config.schedule.phases[self.phase_index]

    def on_judgement(self, judgement: Judgement) -> None:
        self.num_judgements += 1
        self.rewards = [*self.rewards[1 - RECENT_JUDGEMENTS :], judgement.reward]
        self.on_event(Judged(judgement))

    def record(self, kind: str, version: int, evaluation: Evaluation | None = None) -> Row:
        row = Row(
            kind,
            version,
            self.phase_index,
            self.phase.preferred,
            time.monotonic() - self.began,
            None if evaluation is None else evaluation.shares,
            None if evaluation is None else evaluation.reward,
        )
        self.rows.append(row)
        return row

    async def poll(self, http: httpx.AsyncClient) -> int:
        """Read the server's state, open or close the users' gate, tell new steps; returns the served version."""
        learning = await self.patience.call(lambda: get_json(http, "/v1/learning"))
        version = int(learning["version"] or 0)
        num_ready = int(learning["queue"]["num_ready"])
        if num_ready < self.config.crowd.max_queue:
            self.may_ask.set()
        else:
            self.may_ask.clear()
        steps = await self.patience.call(lambda: get_json(http, "/v1/learning/steps", since=self.last_step))
        for step in steps["data"]:
            self.last_step = max(self.last_step, int(step["step"]))
            if step.get("event"):
                self.record(
                    str(step["event"]), int(step["parent_version"] if step["version"] is None else step["version"])
                )
            self.on_event(StepTaken(step))
        mean_reward = sum(self.rewards) / len(self.rewards) if self.rewards else None
        self.on_event(Polled(version, num_ready, self.num_judgements, mean_reward, learning))
        return version

    async def skip_past_steps(self, http: httpx.AsyncClient) -> None:
        """Steps from before the run are none of its events."""
        steps = await self.patience.call(lambda: get_json(http, "/v1/learning/steps", since=-1))
        self.last_step = max((int(step["step"]) for step in steps["data"]), default=-1)

    async def measure(self, chat: openai.AsyncOpenAI, version: int) -> Evaluation:
        evaluation = await evaluate_with(
            chat,
            self.config.crowd,
            self.phase.pool,
            self.phase.preferred,
            num_samples=self.config.num_samples,
            patience=self.patience,
        )
        self.on_event(Measured(self.record("evaluation", version, evaluation), evaluation))
        return evaluation

    async def go_through_phase(self, chat: openai.AsyncOpenAI, http: httpx.AsyncClient, start_version: int) -> int:
        """Stay until the phase is over; returns the version at its end."""
        self.on_event(PhaseStarted(self.phase_index, len(self.config.schedule.phases), self.phase, start_version))
        version = measured_version = start_version
        share = (await self.measure(chat, version)).shares[self.phase.preferred]
        while not self.phase.is_over(version - start_version, share if version == measured_version else None):
            await asyncio.sleep(self.config.poll_seconds)
            version = await self.poll(http)
            is_due = version - measured_version >= self.config.evaluate_every
            if is_due or (version > measured_version and self.phase.is_over(version - start_version, None)):
                measured_version = version
                share = (await self.measure(chat, version)).shares[self.phase.preferred]
        return version


async def run_simulation(
    base_url: str,
    config: Simulation,
    on_event: Callable[[Event], None] = lambda event: None,
    rows: list[Row] | None = None,
) -> list[Row]:
    """Run the schedule against the server at `base_url` and return the record.

    `on_event` is called from the event loop and must be quick. Pass `rows` to keep what there is of the record when
    the run is cancelled. Raises ServerUnreachableError, and the client's errors for what the server refuses.
    """
    run = _Run(config, on_event, [] if rows is None else rows)
    num_users = config.crowd.num_users
    clients = open_clients(
        base_url, timeout_seconds=config.timeout_seconds, num_connections=num_users + 16, api_key=config.api_key
    )
    chat, http = clients
    async with chat, http:
        await run.skip_past_steps(http)
        version = await run.poll(http)
        users = [
            asyncio.create_task(
                be_user(n, config.crowd, clients, lambda: run.phase, run.may_ask, run.patience, run.on_judgement)
            )
            for n in range(num_users)
        ]
        director = asyncio.create_task(_direct(run, chat, http, version))
        try:
            # Users only ever end by an error, which ends the run.
            done, _ = await asyncio.wait([director, *users], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (director, *users):
                task.cancel()
            await asyncio.gather(director, *users, return_exceptions=True)
    return run.rows


async def _direct(run: _Run, chat: openai.AsyncOpenAI, http: httpx.AsyncClient, version: int) -> None:
    for index in range(len(run.config.schedule.phases)):
        if index > 0:
            run.phase_index = index
            run.record("switch", version)
        version = await run.go_through_phase(chat, http, version)
