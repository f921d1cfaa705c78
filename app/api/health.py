"""GET /healthz, /readyz and /metrics.

Invariant: /readyz is 200 only if a chat request would be answered, feedback taken, and learned from; else it is 503
and says for each part whether it is ready.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from app.api.dependencies import Services, services_of
from app.api.errors import RETRY_AFTER_SECONDS
from app.services.learning import STOPPED, learning_snapshot, view_worker
from store import workers
from store.errors import DatabaseOutdatedError, DatabaseTooNewError, DatabaseUnavailableError
from store.migrate import check

router = APIRouter()

READY = "ready"


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process is alive."""
    return {"status": "alive"}


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """Whether each part is ready: the database, the engine, the learner."""
    services = services_of(request)
    database, engine = await asyncio.gather(_database_state(services), services.engine.is_ready())
    learner = await _learner_state(services) if database == READY else "unknown: the database is not ready"
    parts = {
        "database": database,
        "engine": READY if engine else "no engine answers, or its weights carry no policy version yet",
        "learner": learner,
    }
    ready = all(state == READY for state in parts.values())
    body = {"status": READY if ready else "not ready", "parts": parts}
    headers = None if ready else {"retry-after": str(RETRY_AFTER_SECONDS)}
    return JSONResponse(body, 200 if ready else 503, headers)


async def _database_state(services: Services) -> str:
    try:
        await asyncio.to_thread(check, services.settings.resolved_database_url)
    except (DatabaseTooNewError, DatabaseOutdatedError) as error:
        return str(error)
    except DatabaseUnavailableError:
        return "the database cannot be used now"
    return READY


async def _learner_state(services: Services) -> str:
    record = await services.database.read(lambda session: workers.get(session, "learner"))
    learner = view_worker(record, datetime.now(UTC))
    if learner.heartbeat_age_seconds is None:
        return "no learner has started yet"
    if learner.state == STOPPED:
        return f"the learner gave its last sign of life {learner.heartbeat_age_seconds:.0f} s ago"
    return READY


@router.get("/metrics")
async def prometheus(request: Request) -> Response:
    """Prometheus's text format."""
    services = services_of(request)
    now = datetime.now(UTC)
    snapshot = await services.database.read(lambda session: learning_snapshot(session, now))
    metrics = services.metrics
    metrics.num_ready.set(snapshot["queue"]["num_ready"])
    metrics.num_leased.set(snapshot["queue"]["num_leased"])
    metrics.oldest_ready_seconds.set(snapshot["queue"]["oldest_age_seconds"] or 0)
    if snapshot["version"] is not None:
        metrics.policy_version.set(snapshot["version"])
    return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)
