"""What the lifespan owns, and how an endpoint reaches it."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from app.inference.protocol import InferenceEngine
from app.metrics import Metrics
from app.services.sampling import ChatService
from store.database import AsyncDatabase
from store.settings import Settings


@dataclass(frozen=True, slots=True)
class Services:
    """The objects that live as long as the app does."""

    settings: Settings
    database: AsyncDatabase
    engine: InferenceEngine
    chat: ChatService
    metrics: Metrics


def services_of(request: Request) -> Services:
    """The running app's services."""
    services: Services = request.app.state.services
    return services
