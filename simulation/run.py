"""Drive a running server through a schedule of preferences and record how its answers follow.

    users      ask and judge while the gate is open
    watcher    polls GET /v1/learning and /v1/learning/steps; opens the gate, closes it while the queue is full
    director   measures held-out shares every `evaluate_every` versions and at both ends of a phase; ends the phases

Invariant: rows are in order of version, and a `switch` row stands between the last measurement under one preference
and the first under the next.
"""

from __future__ import annotations

import asyncio
import bisect
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
        self.version = 0
        self.may_ask = asyncio.Event()
        self.polled = asyncio.Event()
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
        # A measurement takes a while, and events of later versions may have been recorded meanwhile.
        bisect.insort_right(self.rows, row, key=lambda existing: existing.version)
        return row

    async def poll(self, http: httpx.AsyncClient) -> None:
        """Read the server's state, open or close the users' gate, tell of new steps."""
        learning = await self.patience.call(lambda: get_json(http, "/v1/learning"))
        self.version = int(learning["version"] or 0)
        num_ready = int(learning["queue"]["num_ready"])
        if num_ready < self.config.crowd.max_queue:
            self.may_ask.set()
        else:
            self.may_ask.clear()
        steps = await self.patience.call(lambda: get_json(http, "/v1/learning/steps", since=self.last_step))
        for step in steps["data"]:
            produced = int(step["parent_version"] if step["version"] is None else step["version"])
            if produced > self.version:
                # Recorded, but not served yet: told of once it is.
                break
            self.last_step = int(step["step"])
            if step.get("event"):
                self.record(str(step["event"]), produced)
            self.on_event(StepTaken(step))
        mean_reward = sum(self.rewards) / len(self.rewards) if self.rewards else None
        self.on_event(Polled(self.version, num_ready, self.num_judgements, mean_reward, learning))
        self.polled.set()

    async def watch(self, http: httpx.AsyncClient) -> None:
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(self.config.poll_seconds)
            await self.poll(http)

    async def skip_past_steps(self, http: httpx.AsyncClient) -> None:
        """Steps from before the run are none of its events."""
        steps = await self.patience.call(lambda: get_json(http, "/v1/learning/steps", since=-1))
        self.last_step = max((int(step["step"]) for step in steps["data"]), default=-1)

    async def measure(self, chat: openai.AsyncOpenAI) -> tuple[int, float]:
        """Measure the version served now; returns it and the preferred style's share."""
        version = self.version
        evaluation = await evaluate_with(
            chat,
            self.config.crowd,
            self.phase.pool,
            self.phase.preferred,
            num_samples=self.config.num_samples,
            patience=self.patience,
        )
        self.on_event(Measured(self.record("evaluation", version, evaluation), evaluation))
        return version, evaluation.shares[self.phase.preferred]

    async def go_through_phase(self, chat: openai.AsyncOpenAI) -> None:
        """Stay until the phase is over."""
        start = self.version
        self.on_event(PhaseStarted(self.phase_index, len(self.config.schedule.phases), self.phase, start))
        measured, share = await self.measure(chat)
        while not self.phase.is_over(measured - start, share):
            self.polled.clear()
            await self.polled.wait()
            is_last = self.phase.is_over(self.version - start, None)
            if self.version > measured and (is_last or self.version - measured >= self.config.evaluate_every):
                measured, share = await self.measure(chat)

    async def direct(self, chat: openai.AsyncOpenAI) -> None:
        """Go through all phases."""
        for index in range(len(self.config.schedule.phases)):
            self.phase_index = index
            if index > 0:
                self.record("switch", self.version)
            await self.go_through_phase(chat)


async def run_simulation(
    base_url: str,
    config: Simulation,
    on_event: Callable[[Event], None] = lambda event: None,
    rows: list[Row] | None = None,
) -> list[Row]:
    """Run the schedule against the server at `base_url` and return the record.

    `on_event` is called from the event loop and must be quick. Pass `rows` to keep what there is of the record when
    the run is cancelled. Raises ServerUnreachableError (ServerRefusedError for what the server refuses).
    """
    run = _Run(config, on_event, [] if rows is None else rows)
    num_users = config.crowd.num_users
    clients = open_clients(
        base_url, timeout_seconds=config.timeout_seconds, num_connections=num_users + 16, api_key=config.api_key
    )
    chat, http = clients
    async with chat, http:
        await run.skip_past_steps(http)
        await run.poll(http)
        watcher = asyncio.create_task(run.watch(http))
        director = asyncio.create_task(run.direct(chat))
        users = [
            asyncio.create_task(
                be_user(n, config.crowd, clients, lambda: run.phase, run.may_ask, run.patience, run.on_judgement)
            )
            for n in range(num_users)
        ]
        tasks = (director, watcher, *users)
        try:
            # All but the director only ever end by an error, which ends the run.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return run.rows
