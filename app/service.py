"""The HTTP service: one FastAPI application, and the objects that live as long as it does.

Invariant: nothing outlives the lifespan. What was being sampled when it ends is stored before the database closes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from importlib.metadata import version

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from fastapi import FastAPI

from app.api import chat, feedback, health, learning, models
from app.api.dependencies import Services
from app.api.errors import install_error_handlers
from app.inference.client import EngineClient
from app.inference.protocol import InferenceEngine
from app.metrics import Metrics
from app.middleware import RequestEnvelope
from app.services.sampling import ChatService
from store import queue
from store.database import AsyncDatabase
from store.settings import Settings

EXPIRY_PERIOD_SECONDS = 60


def create_app(
    settings: Settings, *, database: AsyncDatabase | None = None, engine: InferenceEngine | None = None
) -> FastAPI:
    """The service over `settings`' database and engine, or over those given (which their giver then closes)."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        own_database = AsyncDatabase(settings.resolved_database_url) if database is None else None
        own_engine = engine_client(settings) if engine is None else None
        used_database, used_engine = database or own_database, engine or own_engine
        assert used_database is not None
        assert used_engine is not None
        chat_service = ChatService(used_engine, used_database, metrics)
        app.state.services = Services(settings, used_database, used_engine, chat_service, metrics)
        scheduler = AsyncIOScheduler(timezone=UTC)
        scheduler.add_job(
            expire_unjudged,
            "interval",
            (used_database, settings.feedback.expire_after_seconds),
            seconds=EXPIRY_PERIOD_SECONDS,
            coalesce=True,
        )
        scheduler.start()
        try:
            yield
        finally:
            scheduler.shutdown(wait=False)
            await chat_service.drain()
            if own_engine is not None:
                await own_engine.aclose()
            if own_database is not None:
                await own_database.close()

    app = FastAPI(title="Tideline", version=version("tideline"), lifespan=lifespan, redoc_url=None)
    for router in (chat.router, models.router, feedback.router, learning.router, health.router):
        app.include_router(router)
    install_error_handlers(app)
    app.add_middleware(RequestEnvelope, metrics=metrics)
    return app


def engine_client(settings: Settings) -> EngineClient:
    """The client of the engine that `settings` names: at its URL, or on the socket in the data directory."""
    url = settings.engine.url
    return EngineClient(
        url, None if url is not None else settings.engine_socket, prefix_caching=settings.engine.prefix_caching
    )


async def expire_unjudged(database: AsyncDatabase, after_seconds: float) -> None:
    """Expire trajectories that nobody judged within `after_seconds`."""
    now = datetime.now(UTC)
    before = now - timedelta(seconds=after_seconds)
    num_expired = await database.write(lambda session: queue.expire_unjudged(session, before, now))
    if num_expired:
        structlog.get_logger("tideline.scheduler").info("trajectories expired", num_expired=num_expired)
