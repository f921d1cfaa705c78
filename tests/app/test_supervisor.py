"""The supervisor, with children that are a line of shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from app.supervisor import ChildSpec, Supervisor

ROOT = Path(__file__).resolve().parents[2]


def wait_until(condition: Callable[[], bool], timeout_seconds: float = 15) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody has waited for yet is dead for our purposes.
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def written(log: Path) -> str:
    """The whole lines of a log that may not be there yet."""
    text = log.read_text() if log.exists() else ""
    return text[: text.rfind("\n") + 1]


def shell(name: str, script: str, tmp_path: Path, drain_seconds: float = 5) -> ChildSpec:
    return ChildSpec(name, ["sh", "-c", script], tmp_path / f"{name}.log", drain_seconds)


class Running:
    """A supervisor in a thread, with what it told."""

    def __init__(self, *specs: ChildSpec, drain_order: list[str] | None = None) -> None:
        self.events: list[tuple[str, str]] = []
        self.code: int | None = None
        names = [spec.name for spec in specs]
        self.supervisor = Supervisor(
            specs,
            drain_order=drain_order or names,
            environment=os.environ,
            on_event=lambda name, what: self.events.append((name, what)),
        )
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> Running:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.supervisor.stop()
        self.thread.join(30)

    def _run(self) -> None:
        self.code = self.supervisor.run()

    def told(self, name: str, word: str) -> bool:
        return any(each == name and word in what for each, what in self.events)

    def stop(self) -> None:
        self.supervisor.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()


def test_crashed_child_is_restarted_and_its_last_line_told(tmp_path: Path) -> None:
    with Running(shell("worker", "echo hello; echo it broke >&2; exit 3", tmp_path)) as running:
        wait_until(lambda: running.told("worker", "restarted"))
        wait_until(lambda: written(tmp_path / "worker.log").count("it broke") >= 2)
        running.stop()
    assert running.told("worker", "exited with code 3: it broke")
    assert running.code == 0


def test_restarts_back_off(tmp_path: Path) -> None:
    with Running(shell("worker", "date +%s.%N; exit 1", tmp_path)):
        wait_until(lambda: written(tmp_path / "worker.log").count("\n") >= 3)
    first, second, third = (float(line) for line in written(tmp_path / "worker.log").splitlines()[:3])
    assert second - first >= 0.5
    assert third - second >= 1.0


def test_misconfigured_child_stops_everything_with_its_message(tmp_path: Path) -> None:
    worker = shell("worker", "exec sleep 60", tmp_path)
    wrong = shell("wrong", "echo 'port: 7 is taken'; exit 2", tmp_path)
    with Running(worker, wrong) as running:
        running.thread.join(20)
        assert running.code == 2
    assert running.told("wrong", "port: 7 is taken")
    assert running.told("worker", "stopped")


def test_children_drain_one_after_another_in_the_order_given(tmp_path: Path) -> None:
    ends = tmp_path / "ends"
    script = "trap 'sleep 0.3; echo {name} >> {ends}; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    names = ["engine", "app", "learner"]
    specs = [shell(name, script.format(name=name, ends=ends), tmp_path) for name in names]
    with Running(*specs, drain_order=["app", "learner", "engine"]) as running:
        wait_until(lambda: all("up" in written(spec.log) for spec in specs))
        running.stop()
    assert ends.read_text().split() == ["app", "learner", "engine"]
    assert running.code == 0


def test_child_that_will_not_end_is_killed_with_all_it_started(tmp_path: Path) -> None:
    script = "trap '' TERM; sleep 300 & echo $!; while :; do sleep 0.1; done"
    with Running(shell("stubborn", script, tmp_path, drain_seconds=0.5)) as running:
        wait_until(lambda: bool(written(tmp_path / "stubborn.log")))
        grandchild = int(written(tmp_path / "stubborn.log"))
        child = running.supervisor.children["stubborn"].pid
        assert child is not None
        running.stop()
    wait_until(lambda: not is_alive(grandchild) and not is_alive(child))


def test_second_stop_does_not_wait(tmp_path: Path) -> None:
    script = "trap '' TERM; echo up; while :; do sleep 0.1; done"
    with Running(shell("slow", script, tmp_path, drain_seconds=60)) as running:
        wait_until(lambda: "up" in written(tmp_path / "slow.log"))
        began = time.monotonic()
        running.supervisor.stop()
        running.stop()
        assert time.monotonic() - began < 10


SUPERVISE = """
import os, sys
from pathlib import Path
from app.supervisor import ChildSpec, Supervisor
spec = ChildSpec("worker", ["sh", "-c", "echo $$; exec sleep 300"], Path(sys.argv[1]), 5)
tell = lambda name, what: print(name, what, file=sys.stderr)
sys.exit(Supervisor([spec], drain_order=["worker"], environment=os.environ, on_event=tell).run())
"""


def supervise(log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A supervisor in a process of its own, and its child's process id."""
    process = subprocess.Popen([sys.executable, "-c", SUPERVISE, str(log)], cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_until(lambda: bool(written(log)))
    return process, int(written(log))


def test_sigterm_ends_the_children_and_then_the_supervisor(tmp_path: Path) -> None:
    process, child = supervise(tmp_path / "log")
    assert is_alive(child)
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0
    assert not is_alive(child)


def test_killed_supervisor_leaves_no_orphan(tmp_path: Path) -> None:
    process, child = supervise(tmp_path / "log")
    process.kill()
    process.wait(15)
    wait_until(lambda: not is_alive(child))
