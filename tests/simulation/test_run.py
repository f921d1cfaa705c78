"""A whole schedule against a toy server that does learn: phases, events, backpressure, the record."""

from __future__ import annotations

import asyncio

import pytest

from simulation.evaluation import evaluate, summarise
from simulation.run import Measured, PhaseStarted, Row, Simulation, StepTaken, run_simulation
from simulation.samples import POOL_A
from simulation.schedule import paper_schedule
from simulation.users import Crowd
from tests.simulation.contract_server import ToyServer, serving


async def test_run_simulation_follows_the_schedule_and_records_it() -> None:
    events: list[object] = []
    config = Simulation(
        paper_schedule((5, 5, 5)), Crowd(num_users=4, max_queue=16), evaluate_every=2, num_samples=20, poll_seconds=0.01
    )
    async with serving(ToyServer(batch_size=8)) as server:
        rows = await asyncio.wait_for(run_simulation(server.url, config, events.append), 60)
        assert [event.phase.preferred for event in events if isinstance(event, PhaseStarted)] == [
            "cute",
            "chuunibyou",
            "classical",
        ]
        switches = [index for index, row in enumerate(rows) if row.kind == "switch"]
        assert len(switches) == 2
        for index in switches:
            before = [row.phase for row in rows[:index] if row.kind == "evaluation"]
            after = [row.phase for row in rows[index:] if row.kind == "evaluation"]
            assert max(before) < min(after) == rows[index].phase
        assert [row.version for row in rows] == sorted(row.version for row in rows)
        assert [row.phase for row in rows] == sorted(row.phase for row in rows)
        last_of_phase = [max((r for r in rows if r.phase == p and r.shares), key=lambda r: r.version) for p in range(3)]
        for row in last_of_phase:
            assert row.shares is not None
            assert row.shares[row.preferred] > 0.6
        assert any(row.kind == "return_to_start" for row in rows)
        assert sum(isinstance(event, Measured) for event in events) == sum(row.kind == "evaluation" for row in rows)
        told = [event.step["step"] for event in events if isinstance(event, StepTaken)]
        assert told == list(range(len(told)))
        assert len(told) >= 15
        assert all(body["store"] in (True, False) for body in server.chats)


async def test_run_simulation_ends_a_phase_early_at_its_target() -> None:
    config = Simulation(
        paper_schedule((1000,), min_updates=2, target_share=0.8),
        Crowd(num_users=4),
        evaluate_every=1,
        num_samples=20,
        poll_seconds=0.02,
    )
    async with serving(ToyServer()) as server:
        rows = await asyncio.wait_for(run_simulation(server.url, config), 60)
    assert 2 <= rows[-1].version < 100
    assert rows[-1].shares is not None
    assert rows[-1].shares["cute"] >= 0.8


async def test_run_simulation_pauses_users_while_the_queue_is_full() -> None:
    config = Simulation(
        paper_schedule((1,)), Crowd(num_users=4, max_queue=30), num_samples=4, poll_seconds=0.01, evaluate_every=1
    )
    rows: list[Row] = []
    async with serving(ToyServer(learns=False)) as server:
        running = asyncio.create_task(run_simulation(server.url, config, rows=rows))
        async with asyncio.timeout(30):
            while len(server.ready) < 30:
                await asyncio.sleep(0.02)
        await asyncio.sleep(1.0)
        num_ready = len(server.ready)
        await asyncio.sleep(0.5)
        assert num_ready == len(server.ready), "users went on asking"
        # What was under way when the gate closed, and what one poll let slip through, still arrives.
        assert 30 <= num_ready <= 80
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert [row.kind for row in rows] == ["evaluation"], "what was measured is kept when the run is cancelled"


async def test_run_simulation_starts_its_record_after_earlier_updates() -> None:
    config = Simulation(paper_schedule((2,)), Crowd(num_users=4), num_samples=8, poll_seconds=0.02, evaluate_every=1)
    async with serving(ToyServer()) as server:
        await asyncio.wait_for(run_simulation(server.url, config), 60)
        first_version, first_steps = server.version, len(server.steps)
        events: list[object] = []
        rows = await asyncio.wait_for(run_simulation(server.url, config, events.append), 60)
    assert rows[0].version == first_version
    assert min(event.step["step"] for event in events if isinstance(event, StepTaken)) >= first_steps


async def test_evaluate_measures_without_leaving_a_trajectory() -> None:
    async with serving(ToyServer(favoured="chuunibyou", learns=False)) as server:
        evaluation = await evaluate(server.url, POOL_A, "chuunibyou", num_samples=60)
        assert all(body["store"] is False for body in server.chats)
        assert server.num_posts == 0
    assert evaluation.num_samples == 60
    assert sum(evaluation.shares.values()) == pytest.approx(1.0)
    assert evaluation.shares["chuunibyou"] > 0.75
    assert evaluation.reward > 0.7


def test_summarise_counts_styles_and_styleless_text() -> None:
    texts = [
        "Hehe, a tiny hug for you, nya~",
        "Thou hast a heart as still as the moon upon the river.",
        "It is a bus stop.",
    ]
    evaluation = summarise(texts, "cute")
    assert (
        evaluation.shares["cute"] == evaluation.shares["classical"] == evaluation.shares["none"] == pytest.approx(1 / 3)
    )
    assert evaluation.reward == pytest.approx(1 / 3, abs=0.1)
    with pytest.raises(ValueError, match="nothing"):
        summarise([], "cute")
