"""The app over a real SQLite store and a fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI

from app.service import create_app
from store import migrate, policies
from store.database import Database
from store.settings import Settings
from store.types import PolicyRecord, PolicyStatus
from tests.app.fake_engine import FakeEngine


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite database with policy 0; tests copy it."""
    path = tmp_path_factory.mktemp("database") / "tideline.db"
    migrate.upgrade(f"sqlite:///{path}")
    store = Database(f"sqlite:///{path}")
    now = datetime.now(UTC)
    store.write(lambda session: policies.insert(session, PolicyRecord(0, None, PolicyStatus.ACTIVE, "v000000", now)))
    store.close()
    return path


@pytest.fixture(autouse=True)
def _no_inherited_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No TIDELINE_* variable and no tideline.toml of the developer's reaches a test; what a test sets is undone."""
    import os

    for name in [name for name in os.environ if name.startswith("TIDELINE_")]:
        monkeypatch.delenv(name)
    for name in ("PROFILE", "MODEL", "HOST", "PORT", "DATA_DIR", "DATABASE_URL"):
        monkeypatch.setenv(f"TIDELINE_{name}", "")
        monkeypatch.delenv(f"TIDELINE_{name}")


@pytest.fixture
def settings(tmp_path: Path, empty_database: Path) -> Settings:
    (tmp_path / "tideline.db").write_bytes(empty_database.read_bytes())
    return Settings(profile="micro", data_dir=tmp_path)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    """The store, as another process sees it."""
    store = Database(settings.resolved_database_url)
    yield store
    store.close()


@pytest.fixture
async def service(settings: Settings, engine: FakeEngine) -> AsyncIterator[FastAPI]:
    app = create_app(settings, engine=engine)
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
async def http(service: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=service)
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        yield client


@pytest.fixture
async def openai_client(http: httpx.AsyncClient) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://app/v1", api_key="unused", http_client=http, max_retries=0)
