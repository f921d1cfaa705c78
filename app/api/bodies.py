"""Reading a request's JSON body into a validated model.

Invariant: what gets past here can be stored and forwarded as it is: an object of finite numbers and of strings that
are valid UTF-8.
"""

from __future__ import annotations

import json
from typing import NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from app.api.errors import ApiError, validation_error
from store.types import JsonObject

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, model: type[Model]) -> tuple[Model, JsonObject]:
    """Return the body as `model`, and as the plain object that was sent.

    Raises ApiError (400) for a body that is not JSON, or that breaks the model; it names the field at fault.
    """
    body = parse_object(await request.body())
    try:
        return model.model_validate(body), body
    except ValidationError as error:
        raise validation_error(error) from error


def parse_object(raw: bytes) -> JsonObject:
    """Return the JSON object in `raw`. Raises ApiError (400)."""
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
        # "\ud800" is JSON, yet no UTF-8; "1e999" is JSON, yet no finite number.
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    return body


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")
