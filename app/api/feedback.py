"""POST /v1/feedback and GET /v1/feedback/{id}.

Invariant: a feedback is answered with 200 or 201 only once it is durable.
"""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.api.bodies import read_body
from app.api.dependencies import services_of
from app.api.errors import ApiError
from app.api.feedback_request import FeedbackRequest
from store import feedback
from store.types import JsonObject

router = APIRouter()


@router.post("/v1/feedback")
async def submit_feedback(request: Request) -> Response:
    """Judge one answer. 201 when it is new, 200 when its idempotency key repeats an earlier one."""
    services = services_of(request)
    judgement, _ = await read_body(request, FeedbackRequest)
    submission = judgement.submission(request.headers.get("idempotency-key"))
    aggregation = services.settings.feedback.aggregation
    receipt = await services.database.write(lambda session: feedback.submit(session, submission, aggregation))
    if receipt.created:
        services.metrics.feedback.labels(submission.kind, receipt.status.value).inc()
    body: JsonObject = {"id": receipt.id, "trajectory_id": receipt.trajectory_id, "status": receipt.status.value}
    if receipt.reason is not None:
        body["reason"] = receipt.reason
    return JSONResponse(body, 201 if receipt.created else 200)


@router.get("/v1/feedback/{feedback_id}")
async def get_feedback(request: Request, feedback_id: str) -> JsonObject:
    """The life of one feedback: what it said, what became of it and why, and the version it was trained into."""
    database = services_of(request).database
    life = None
    if "\0" not in feedback_id:  # PostgreSQL refuses to compare it
        life = await database.read(lambda session: feedback.get(session, feedback_id))
    if life is None:
        raise ApiError(404, f"there is no feedback {feedback_id!r}", code="feedback_not_found")
    body = asdict(life)
    body["version"] = body.pop("trained_in_version")
    body["history"] = [event._asdict() for event in life.history]
    del body["api_key_id"]
    return body
