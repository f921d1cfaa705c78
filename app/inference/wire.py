"""How the clients reach an engine and read its errors.

Invariant: whatever goes wrong on the wire becomes one of the protocol's errors; no httpx exception passes through.
Error bodies have the shapes vLLM 0.32 sends: `{"error": {"message", "type", "param", "code"}}`,
`{"error": "..."}` (its weight-update routes) and FastAPI's `{"detail": ...}`.
"""

from __future__ import annotations

import json
import re
import socket as sockets
from pathlib import Path

import httpx

from app.inference.protocol import EngineRequestError, EngineUnavailableError
from store.types import JsonObject

SOCKET_BASE_URL = "http://engine"
"""Base URL of requests that travel over a Unix socket; the host name is not looked up."""
CONNECT_TIMEOUT_SECONDS = 5.0
ENGINE_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""One connection per request. The engine closes a connection after every 500 and when it has been idle for a while;
a request that reused one at that moment would look like a dead engine."""
VALIDATION_ERROR = re.compile(r"'loc': '(?:body\.)?([^']*)', 'msg': ('(?:[^']*)'|\"[^\"]*\")")
"""The first problem in the text vLLM makes of a pydantic validation error."""


def engine_address(base_url: str | None, socket: Path | None) -> tuple[str, str | None]:
    """Return (base URL, Unix socket path or None). Raises ValueError unless exactly one of the two is given."""
    if (base_url is None) == (socket is None):
        raise ValueError("an engine client needs exactly one of base_url and socket")
    if base_url is not None:
        return base_url.rstrip("/"), None
    return SOCKET_BASE_URL, str(socket)


def socket_answers(path: str) -> bool:
    """True when something accepts connections on this Unix socket.

    Asked before httpcore's synchronous backend connects, which leaves its socket open when it cannot.
    """
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as attempt:
        attempt.settimeout(CONNECT_TIMEOUT_SECONDS)
        return attempt.connect_ex(path) == 0


def error_message(body: bytes) -> tuple[str, str | None]:
    """Return (message, name of the field at fault or None) of an error body."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        parsed = json.loads(text)
    except ValueError:
        return text or "no message", None
    if not isinstance(parsed, dict):
        return text, None
    error = parsed.get("error", parsed)
    if isinstance(error, dict) and "message" in error:
        message, param = str(error["message"]), error.get("param")
        if (found := VALIDATION_ERROR.search(message)) is not None:
            return f"{found[1]}: {found[2][1:-1]}", found[1]
        return message, None if param is None else str(param)
    if isinstance(error, str):
        return error, None
    detail = parsed.get("detail")
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        location = ".".join(str(part) for part in detail[0].get("loc", ()) if part != "body")
        return str(detail[0].get("msg", detail[0])), location or None
    return str(detail if detail is not None else text), None


def error_from_status(status_code: int, body: bytes) -> EngineRequestError | EngineUnavailableError:
    """The error that a response with this status and body amounts to: 4xx and 501 are the request's fault."""
    message, param = error_message(body)
    if 400 <= status_code < 500 or status_code == 501:
        return EngineRequestError(message, status_code, param)
    return EngineUnavailableError(f"the engine answered {status_code}: {message}")


def error_from_transport(error: httpx.HTTPError) -> EngineUnavailableError:
    """The error that a failed connection or a broken stream amounts to."""
    return EngineUnavailableError(f"no engine answers ({type(error).__name__}: {error})")


def parse_weight_version(label: object) -> int:
    """Return the policy version in a weight label.

    Raises EngineUnavailableError for a label that is not a number: the engine is up but not yet labelled.
    """
    try:
        return int(str(label))
    except ValueError:
        raise EngineUnavailableError(
            f"the engine has not been told its policy version yet (its weights are labelled {label!r})"
        ) from None


def json_object(response: httpx.Response) -> JsonObject:
    """Return the response's JSON object. Raises the protocol's error for any other answer."""
    if response.status_code != 200:
        raise error_from_status(response.status_code, response.content)
    try:
        parsed = response.json()
    except ValueError as error:
        raise EngineUnavailableError(f"the engine sent no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise EngineUnavailableError(f"the engine sent {type(parsed).__name__} instead of an object")
    return parsed
