"""GET /v1/learning, /v1/learning/steps and /v1/policies: what the learner did and what came of it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request

from app.api.dependencies import services_of
from app.api.errors import ApiError
from app.services.learning import describe_policy, describe_step, learning_snapshot
from store import policies, steps
from store.types import JsonObject

router = APIRouter()

LARGEST_VERSION = 2**31 - 1


@router.get("/v1/learning")
async def get_learning(request: Request) -> JsonObject:
    """How learning goes now."""
    now = datetime.now(UTC)
    return await services_of(request).database.read(lambda session: learning_snapshot(session, now))


@router.get("/v1/learning/steps")
async def list_steps(request: Request, since: Annotated[int, Query(ge=-1, le=LARGEST_VERSION)] = -1) -> JsonObject:
    """Every learner update after number `since`, in order."""
    records = await services_of(request).database.read(lambda session: steps.since(session, since))
    return {"object": "list", "data": [describe_step(record) for record in records]}


@router.get("/v1/policies")
async def list_policies(request: Request) -> JsonObject:
    """Every policy version, the newest first."""
    records = await services_of(request).database.read(policies.list_all)
    return {"object": "list", "data": [describe_policy(record) for record in records]}


@router.get("/v1/policies/{version}")
async def get_policy(request: Request, version: int) -> JsonObject:
    """One policy version."""
    record = None
    if 0 <= version <= LARGEST_VERSION:
        record = await services_of(request).database.read(lambda session: policies.get(session, version))
    if record is None:
        raise ApiError(404, f"there is no policy version {version}", "version", "policy_not_found")
    return describe_policy(record)
