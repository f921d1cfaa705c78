"""Every error the HTTP service answers with, in OpenAI's one shape.

    {"error": {"message", "type", "param", "code"}}

Invariant: no other error body leaves the service, and none carries a traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from app.inference.protocol import EngineRequestError, EngineUnavailableError
from store.errors import DatabaseUnavailableError, IdempotencyConflictError, UnknownTrajectoryError
from store.types import JsonObject, TidelineError

RETRY_AFTER_SECONDS = 5
"""What a client is told to wait while no engine is ready; an engine starts within a minute."""


class ApiError(TidelineError):
    """A request that is answered with an error; `param` names the field at fault, if one is."""

    def __init__(self, status_code: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[type[ApiError], tuple[int, str, str | None, str | None]]:
        return type(self), (self.status_code, str(self), self.param, self.code)


def error_body(status_code: int, message: str, param: str | None = None, code: str | None = None) -> JsonObject:
    """The body of an error answer."""
    kind = "invalid_request_error" if status_code < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception) -> JSONResponse:
    """The answer that an error amounts to. One that nobody foresaw is a 500 that says nothing more."""
    status_code, message, param, code = describe_error(error)
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if status_code == 503 else None
    return JSONResponse(error_body(status_code, message, param, code), status_code, headers)


def describe_error(error: Exception) -> tuple[int, str, str | None, str | None]:
    """Return (HTTP status, message, field at fault or None, code or None) of an error."""
    match error:
        case ApiError():
            return error.status_code, str(error), error.param, error.code
        case EngineUnavailableError():
            return 503, f"no engine is ready to answer: {error}", None, "engine_unavailable"
        case DatabaseUnavailableError():
            return 503, "the database cannot be used now", None, "database_unavailable"
        case EngineRequestError():
            return _describe_engine_refusal(error)
        case UnknownTrajectoryError():
            return 404, str(error), None, "trajectory_not_found"
        case IdempotencyConflictError():
            return 409, str(error), "idempotency_key", "idempotency_conflict"
        case _:
            return 500, "the server failed to answer this request", None, "internal_error"


def _describe_engine_refusal(error: EngineRequestError) -> tuple[int, str, str | None, str | None]:
    # vLLM calls a prompt that does not fit `input_tokens`; in a chat request that is the messages' fault.
    if error.param == "input_tokens" or "maximum context length" in str(error):
        param = "max_tokens" if error.param == "max_tokens" else "messages"
        return 400, str(error), param, "context_length_exceeded"
    status_code = 400 if error.status_code in (422, 501) else error.status_code
    return status_code, str(error), error.param, "engine_refused"


def field_name(location: Sequence[int | str]) -> str | None:
    """Name a field as OpenAI does: ("messages", 0, "content") is `messages[0].content`."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name or None


def validation_error(error: ValidationError | RequestValidationError, skip: int = 0) -> ApiError:
    """A 400 with the first problem of a failed validation; `skip` parts of its location are not the client's."""
    first: dict[str, Any] = dict(error.errors()[0])
    param = field_name(first["loc"][skip:])
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown parameter"
    if param is None and first["type"] == "value_error":
        # Validators over several fields name the one at fault as the first word of their message.
        param = message.split(" ", 1)[0].rstrip(":,")
        return ApiError(400, message, param, "invalid_value")
    return ApiError(400, f"{param}: {message}" if param else message, param, "invalid_value")


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error in the one shape."""

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_error(error, skip=1))

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
        return JSONResponse(error_body(error.status_code, message, None, code), error.status_code, error.headers)

    app.add_exception_handler(TidelineError, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http_exception)
