"""A phase ends by what the server did, and an impossible schedule is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.samples import POOL_A, POOL_B
from simulation.schedule import Phase, Schedule, paper_schedule


def test_paper_schedule_switches_style_and_pool() -> None:
    phases = paper_schedule((5, 6, 7)).phases
    assert [phase.preferred for phase in phases] == ["cute", "chuunibyou", "classical"]
    assert [phase.pool for phase in phases] == [POOL_A, POOL_A, POOL_B]
    assert [phase.max_updates for phase in phases] == [5, 6, 7]


def test_phase_ends_early_only_from_min_updates_on_and_at_its_target() -> None:
    phase = Phase("cute", POOL_A, max_updates=10, min_updates=4, target_share=0.8)
    assert not phase.is_over(3, 1.0)
    assert not phase.is_over(9, 0.79)
    assert not phase.is_over(9, None)
    assert phase.is_over(4, 0.8)
    assert phase.is_over(10, 0.0)


@given(st.integers(1, 50), st.integers(0, 60), st.none() | st.floats(0, 1))
def test_phase_without_target_ends_exactly_at_max_updates(length: int, num_updates: int, share: float | None) -> None:
    assert Phase("cute", POOL_A, length).is_over(num_updates, share) == (num_updates >= length)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Phase("classical", POOL_A, 5),
        lambda: Phase("cute", POOL_A, 0),
        lambda: Phase("cute", POOL_A, 5, min_updates=6),
        lambda: Phase("cute", POOL_A, 5, target_share=1.5),
        lambda: Schedule(()),
        lambda: paper_schedule(()),
        lambda: paper_schedule((1, 2, 3, 4)),
    ],
)
def test_impossible_schedules_are_refused(build) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        build()
