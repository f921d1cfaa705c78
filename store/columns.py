"""Column types that mean the same on SQLite and on PostgreSQL.

Invariant guarded here: what is read equals what was written, to the bit for arrays and to the microsecond for times.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import BigInteger, DateTime, Dialect, Integer, LargeBinary
from sqlalchemy.types import TypeDecorator

RowNumber = BigInteger().with_variant(Integer, "sqlite")
"""A counter the database hands out. SQLite only counts up by itself in a column of type INTEGER."""


class UtcDateTime(TypeDecorator[datetime]):
    """A timezone-aware UTC time. SQLite has no time zones, so the offset is taken off there and put back on reading.

    Raises ValueError for a naive datetime: it names no moment.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value} has no timezone; times in the store are timezone-aware UTC")
        utc = value.astimezone(UTC)
        return utc.replace(tzinfo=None) if dialect.name == "sqlite" else utc

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class _ArrayColumn(TypeDecorator[npt.NDArray[Any]]):
    """A one-dimensional numpy array as its little-endian bytes; reading gives a read-only array."""

    impl = LargeBinary
    cache_ok = True
    dtype: np.dtype[Any]

    def process_bind_param(self, value: npt.NDArray[Any] | None, dialect: Dialect) -> bytes | None:
        if value is None:
            return None
        if value.ndim != 1:
            raise ValueError(f"an array of {value.ndim} dimensions cannot be stored, only one of 1")
        if not np.can_cast(value.dtype, self.dtype, casting="equiv"):
            raise TypeError(f"an array of {value.dtype} cannot be stored as {self.dtype}")
        return value.astype(self.dtype, copy=False).tobytes()

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> npt.NDArray[Any] | None:
        if value is None:
            return None
        return np.frombuffer(value, dtype=self.dtype).astype(self.dtype.newbyteorder("="), copy=False)


class Int32Array(_ArrayColumn):
    """int32 [n]."""

    cache_ok = True
    dtype = np.dtype("<i4")


class Float32Array(_ArrayColumn):
    """float32 [n]."""

    cache_ok = True
    dtype = np.dtype("<f4")


class Uint8Array(_ArrayColumn):
    """uint8 [n]."""

    cache_ok = True
    dtype = np.dtype("u1")


def dump_json(value: Any) -> str:
    """JSON text that both databases take. NaN and infinity, which JSON lacks, become null: an undefined metric."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_without_non_finite(value), allow_nan=False)


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(item) for item in value]
    return value
