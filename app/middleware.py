"""Around every request: an id, a measurement, and an answer in the one error shape whatever goes wrong.

Plain ASGI, because Starlette's BaseHTTPMiddleware hides the client's disconnect from the endpoint.
"""

from __future__ import annotations

import re
import time

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import error_response
from app.metrics import Metrics
from store.ids import new_id

CLIENT_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
UNMATCHED_ROUTE = "unmatched"


class RequestEnvelope:
    """ASGI middleware. A client's own x-request-id is kept if it is 1 to 128 printable characters."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._log = structlog.get_logger("tideline.http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given.decode() if CLIENT_REQUEST_ID.fullmatch(given) else new_id()
        status_code: int | None = None
        began = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status_code
            if message["type"] == "http.response.start":
                status_code = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            self._log.exception("request failed", request_id=request_id, path=scope["path"])
            if status_code is not None:
                raise  # too late for an answer; the server closes the connection, which the client can see
            await error_response(error)(scope, receive, send_with_id)
        finally:
            # The route's pattern, not the path: ids in paths would make a metric for each.
            route = getattr(scope.get("route"), "path", UNMATCHED_ROUTE)
            self._metrics.requests.labels(scope["method"], route, str(status_code)).inc()
            self._metrics.request_seconds.labels(route).observe(time.perf_counter() - began)
