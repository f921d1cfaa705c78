"""`tideline demo`: the whole loop on a real model, watched. And `tideline simulate`: the same users on any server.

    model warm-started -> server ready -> users chat and judge, preferences shift -> server stopped -> table, plot

Invariant: Ctrl-C at any moment ends the server's processes and still writes what was measured until then.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from app.cli.options import USAGE_ERROR_CODE, ConfigFile, DataDir, Port, Profile, fail, resolve_settings
from app.cli.prepare import PreparationError, make_model, prepare
from app.cli.progress import SimulationDisplay
from app.cli.serve import with_free_port
from app.inference.launcher import EngineStartError, resolve_kind
from app.supervisor import Child, ChildSpec
from simulation.plot import plot_adaptation, write_csv
from simulation.run import Row, Simulation, run_simulation
from simulation.schedule import paper_schedule
from simulation.server import ServerUnreachableError
from simulation.users import Crowd
from store.settings import Settings
from store.types import TidelineError

INTERRUPTED_CODE = 130
DEMO_SETTINGS = {
    "TIDELINE_LEARNER__BATCH_SIZE": "16",
    "TIDELINE_LEARNER__MIN_BATCH_SIZE": "16",
    "TIDELINE_LEARNER__CRITIC__WARMUP_UPDATES": "0",
    "TIDELINE_LEARNER__MAX_STALENESS_VERSIONS": "4",
}
"""What the demo sets unless the environment says otherwise: a queue that is short keeps the learner near its users."""
RUN_FILES = ("policies", "checkpoints", "logs", "models", "tideline.db", "tideline.db-wal", "tideline.db-shm")
"""What a demo leaves in its directory beside its results; the next one starts anew."""

Updates = Annotated[
    str, typer.Option("--updates", help="Most policy updates in each phase: one number, or one for each phase.")
]
MinUpdates = Annotated[int, typer.Option(help="Fewest updates in a phase.", min=0)]
Target = Annotated[
    float, typer.Option(help="Share of the preferred style on held-out prompts that ends a phase.", min=0.01, max=1)
]
Users = Annotated[int, typer.Option(help="Users who chat at the same time.", min=1)]
Wrong = Annotated[float, typer.Option(help="Share of judgements that are inverted.", min=0, max=1)]
Missing = Annotated[float, typer.Option(help="Share of answers that nobody judges.", min=0, max=1)]
Samples = Annotated[int, typer.Option(help="Held-out answers in one measurement.", min=1)]
Every = Annotated[int, typer.Option(help="Policy updates between two measurements.", min=1)]


def demo(
    profile: Profile = None,
    data_dir: DataDir = None,
    port: Port = None,
    config: ConfigFile = None,
    updates: Updates = "25,30,30",
    min_updates: MinUpdates = 6,
    target: Target = 0.85,
    users: Users = 16,
    wrong: Wrong = 0.02,
    missing: Missing = 0.05,
    samples: Samples = 24,
    every: Every = 3,
) -> None:
    """Watch a model follow simulated users whose taste shifts: cute, then chuunibyou, then classical."""
    simulation = build_simulation(updates, min_updates, target, users, wrong, missing, samples, every)
    for name, value in DEMO_SETTINGS.items():
        os.environ.setdefault(name, value)
    home = resolve_settings(profile=profile, data_dir=data_dir, config=config)
    console = Console(highlight=False)
    try:
        resolve_kind(home.engine.kind)
        model = make_model(home, warm_start=True)
        directory = home.data_dir.resolve() / f"demo-{home.profile}"
        clear_run(directory)
        settings = with_free_port(resolve_settings(data_dir=directory, port=port or 0, model=str(model)))
        prepare(settings, starting_model=model)
    except (PreparationError, EngineStartError, TidelineError) as error:
        fail(str(error), USAGE_ERROR_CODE)
    except OSError as error:
        fail(f"{error.filename or home.data_dir}: {error.strerror}", USAGE_ERROR_CODE)
    raise typer.Exit(run_demo(settings, simulation, console))


def simulate(
    url: Annotated[str, typer.Option(help="Address of a running server.")] = "http://127.0.0.1:8000",
    out: Annotated[Path, typer.Option(help="Directory for adaptation.csv and adaptation.png.")] = Path(),
    api_key: Annotated[str | None, typer.Option(help="Key to send, if the server wants one.")] = None,
    updates: Updates = "25,30,30",
    min_updates: MinUpdates = 6,
    target: Target = 0.85,
    users: Users = 16,
    wrong: Wrong = 0.0,
    missing: Missing = 0.0,
    samples: Samples = 32,
    every: Every = 3,
) -> None:
    """Send simulated users with shifting taste to any running server."""
    simulation = build_simulation(updates, min_updates, target, users, wrong, missing, samples, every, api_key)
    if not out.is_dir():
        fail(f"out: there is no directory {out}", USAGE_ERROR_CODE)
    raise typer.Exit(run_and_report(url, simulation, out, Console(highlight=False), should_stop=lambda: None))


def build_simulation(
    updates: str,
    min_updates: int,
    target: float,
    users: int,
    wrong: float,
    missing: float,
    samples: int,
    every: int,
    api_key: str | None = None,
) -> Simulation:
    """The run these options describe. Ends the command with exit code 2 for options that describe none."""
    try:
        lengths = [int(part) for part in updates.split(",")]
        lengths = lengths * 3 if len(lengths) == 1 else lengths
        return Simulation(
            schedule=paper_schedule(lengths, min_updates=min_updates, target_share=target),
            crowd=Crowd(num_users=users, wrong_share=wrong, missing_share=missing, max_queue=users),
            evaluate_every=every,
            num_samples=samples,
            api_key=api_key,
        )
    except ValueError as error:
        fail(f"updates: {error}", USAGE_ERROR_CODE)


def clear_run(directory: Path) -> None:
    """Delete what an earlier demo left there, its results excepted. Raises OSError."""
    for name in RUN_FILES:
        path = directory / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def run_demo(settings: Settings, simulation: Simulation, console: Console) -> int:
    """Start a server on `settings`, run the simulation against it, stop it. Returns the exit code."""
    log = settings.data_dir / "logs" / "serve.log"
    server = Child(
        ChildSpec("server", [sys.executable, "-m", "app.cli", "serve"], log, drain_seconds=120), dict(os.environ)
    )
    url = f"http://{settings.host}:{settings.port}"
    server.start()
    try:
        with console.status("starting the server") as status:
            wait_until_ready(server, url, status.update)
        console.print(f"server ready at {url}/v1; logs and data in {settings.data_dir}", markup=False)

        def stopped() -> str | None:
            return None if server.poll() is None else f"the server ended: {server.last_words()} (log: {log})"

        return run_and_report(url, simulation, settings.data_dir, console, stopped)
    except KeyboardInterrupt:
        console.print("interrupted")
        return INTERRUPTED_CODE
    except TidelineError as error:
        fail(str(error))
    finally:
        with console.status("stopping the server"):
            server.stop(threading.Event())


def wait_until_ready(server: Child, url: str, tell: Callable[[str], None], timeout_seconds: float = 600) -> None:
    """Return once GET /readyz says so. Raises TidelineError if the server ends first or takes too long."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_seconds:
        if server.poll() is not None:
            raise TidelineError(f"the server ended while starting: {server.last_words(3)} (log: {server.spec.log})")
        waiting_for = "the app"
        try:
            response = httpx.get(f"{url}/readyz", timeout=5)
            if response.status_code == 200:
                return
            parts = response.json()["parts"]
            waiting_for = ", ".join(f"the {name}" for name, state in parts.items() if state != "ready")
        except (httpx.HTTPError, ValueError, KeyError):
            pass  # the app itself is not up yet
        tell(f"starting the server, waiting for {waiting_for} ({time.monotonic() - began:.0f} s)")
        time.sleep(0.5)
    raise TidelineError(f"the server was not ready after {timeout_seconds:.0f} s (log: {server.spec.log})")


def run_and_report(
    url: str, simulation: Simulation, out: Path, console: Console, should_stop: Callable[[], str | None]
) -> int:
    """Run the simulation with a live display; then the table, adaptation.csv and adaptation.png in `out`.

    `should_stop` is asked now and then and names the reason to end early. Returns the exit code.
    """
    rows: list[Row] = []
    code = 0
    display = SimulationDisplay(simulation, console)

    async def run() -> None:
        users = asyncio.create_task(run_simulation(url, simulation, display.on_event, rows))
        while not users.done():
            await asyncio.wait([users], timeout=1.0)
            if (reason := should_stop()) is not None:
                users.cancel()
                await asyncio.wait([users])
                raise TidelineError(reason)
        users.result()

    try:
        with display:
            asyncio.run(run())
    except KeyboardInterrupt:
        console.print("interrupted: what follows is the run so far")
        code = INTERRUPTED_CODE
    except (TidelineError, ServerUnreachableError, httpx.HTTPError) as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"tideline: {error}", style="red", markup=False)
        code = 1
    if any(row.shares is not None for row in rows):
        console.print(display.summary(rows))
        write_csv(rows, out / "adaptation.csv")
        plot_adaptation(rows, out / "adaptation.png")
        console.print(f"wrote {out / 'adaptation.csv'} and {out / 'adaptation.png'}", markup=False, soft_wrap=True)
    return code
