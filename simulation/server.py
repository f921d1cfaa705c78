"""How simulated clients reach a server: patiently. A busy, restarting or absent server is waited for, not an error.

Invariant: what the server refuses for good (any other 4xx) is raised at once, in one sentence, and never repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import openai

T = TypeVar("T")

FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 10.0
RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class ServerUnreachableError(ConnectionError):
    """The server gave no usable answer: none for as long as we were told to wait, or a refusal."""


class ServerRefusedError(ServerUnreachableError):
    """The server answered that it will not do what was asked; `status_code` is its HTTP status."""

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code

    def __reduce__(self) -> tuple[type[ServerRefusedError], tuple[str, int]]:
        return type(self), (str(self), self.status_code)


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """The server's Retry-After in seconds, None if it gave none or one that is no number."""
    try:
        return max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        return None


def refusal(response: Any) -> str:
    """What the server says in an error of OpenAI's shape, or the beginning of whatever else it sent."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(response.text)[:200]


@dataclass(slots=True)
class Patience:
    """How long to go on, and how often it was needed."""

    give_up_after_seconds: float = 300.0
    num_retries: int = field(default=0, init=False)

    async def call(self, request: Callable[[], Awaitable[T]]) -> T:
        """Await `request()` until it succeeds.

        Connection errors, 429 and 5xx are tried again after the server's Retry-After or a growing pause. Raises
        ServerUnreachableError when that has gone on for too long, and ServerRefusedError at once for any other 4xx.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        pause = FIRST_WAIT_SECONDS
        while True:
            try:
                return await request()
            except (openai.APIConnectionError, httpx.TransportError) as error:
                wanted, reason = None, str(error) or type(error).__name__
            except (openai.APIStatusError, httpx.HTTPStatusError) as error:
                status_code = error.response.status_code
                if status_code not in RETRIED_STATUS:
                    what = f"{error.request.method} {error.request.url.path}"
                    message = f"the server refused {what} ({status_code}): {refusal(error.response)}"
                    raise ServerRefusedError(message, status_code) from error
                wanted, reason = retry_after_seconds(error.response.headers), str(error)
            wait = min(LONGEST_WAIT_SECONDS, pause if wanted is None else wanted)
            if loop.time() + wait - began > self.give_up_after_seconds:
                raise ServerUnreachableError(
                    f"the server did not answer for {self.give_up_after_seconds:.0f} s; last: {reason}"
                )
            self.num_retries += 1
            pause = min(LONGEST_WAIT_SECONDS, pause * 2)
            await asyncio.sleep(wait)


async def get_json(http: httpx.AsyncClient, path: str, **parameters: Any) -> dict[str, Any]:
    """The JSON object at `path`. Raises httpx's errors for anything but a 2xx."""
    response = await http.get(path, params=parameters)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def open_clients(
    base_url: str, *, timeout_seconds: float, num_connections: int, api_key: str | None = None
) -> tuple[openai.AsyncOpenAI, httpx.AsyncClient]:
    """The official chat client and a plain one for everything else. The caller closes both."""
    root = base_url.rstrip("/").removesuffix("/v1")
    limits = httpx.Limits(max_connections=num_connections + 4, max_keepalive_connections=num_connections + 4)
    chat = openai.AsyncOpenAI(
        base_url=f"{root}/v1",
        api_key=api_key or "unused",
        max_retries=0,
        timeout=timeout_seconds,
    )
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return chat, httpx.AsyncClient(base_url=root, headers=headers, limits=limits, timeout=timeout_seconds)
