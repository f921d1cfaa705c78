"""GET /v1/models: the one policy that is served, under its name and its aliases."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request

from app.api.dependencies import services_of
from app.api.errors import ApiError
from store import policies
from store.settings import Settings
from store.types import JsonObject

router = APIRouter()

ALIASES = ("tideline",)


def policy_name(settings: Settings) -> str:
    """The name of the served policy: its profile, or the last part of the model it started from."""
    return settings.profile if settings.model is None else Path(settings.model).name or settings.model


def check_model_name(settings: Settings, name: str | None) -> None:
    """Raise ApiError (404) unless `name` is the policy, one of its aliases, or left out."""
    known = (policy_name(settings), *ALIASES)
    if name is not None and name not in known:
        raise ApiError(404, f"model: there is no {name!r} here, only {' and '.join(known)}", "model", "model_not_found")


@router.get("/v1/models")
async def list_models(request: Request) -> JsonObject:
    """The served policy under each of its names, with its current version."""
    names = (policy_name(services_of(request).settings), *ALIASES)
    return {"object": "list", "data": [await _model(request, name) for name in dict.fromkeys(names)]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> JsonObject:
    """The served policy under one name."""
    check_model_name(services_of(request).settings, name)
    return await _model(request, name)


async def _model(request: Request, name: str) -> JsonObject:
    services = services_of(request)
    active = await services.database.read(policies.active)
    root = policy_name(services.settings)
    return {
        "id": name,
        "object": "model",
        "created": 0 if active is None else int(active.created_at.timestamp()),
        "owned_by": "tideline",
        "root": root,
        "parent": None,
        "max_model_len": services.settings.engine.max_model_len,
        "aliases": [alias for alias in ALIASES if alias != root],
        "version": None if active is None else active.version,
    }
