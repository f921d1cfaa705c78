"""What a feedback may hold, and the one reward in [-1, 1] that it means. Pure.

Invariant: a feedback judges one thing in one way: a trajectory or an episode, by a reward, a thumb, a rating or a
correction, or by a comment alone. Nothing is guessed: a boolean is not a number, a number is finite and in range.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.api.errors import ApiError
from store.types import FeedbackSubmission, JsonObject

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Text = Annotated[str, Field(strict=True)]
WITHOUT_NUL = r"^[^\x00]+$"
"""PostgreSQL cannot even compare a string that holds NUL."""
Identifier = Annotated[str, Field(strict=True, max_length=128, pattern=WITHOUT_NUL)]
Key = Annotated[str, Field(strict=True, max_length=256, pattern=WITHOUT_NUL)]

CHAT_ID_PREFIX = "chatcmpl-"
KINDS = ("reward", "thumb", "rating", "correction")
MAX_KEY_CHARACTERS = 256


class Rating(BaseModel):
    """`value` of `of` stars; 1 is the worst."""

    model_config = ConfigDict(extra="forbid")

    value: Annotated[Number, Field(ge=1)]
    of: Annotated[int, Field(strict=True, ge=2, le=1_000_000)]

    @model_validator(mode="after")
    def _check_range(self) -> Rating:
        if self.value > self.of:
            raise ValueError(f"{self.value:g} is more than the best, {self.of}")
        return self

    @property
    def reward(self) -> float:
        """1 to `of`, mapped linearly to [-1, 1]."""
        return 2 * (self.value - 1) / (self.of - 1) - 1


class FeedbackRequest(BaseModel):
    """Body of POST /v1/feedback."""

    model_config = ConfigDict(extra="forbid")

    trajectory_id: Identifier | None = None
    episode_id: Identifier | None = None
    reward: Annotated[Number, Field(ge=-1, le=1)] | None = None
    thumb: Literal["up", "down"] | None = None
    rating: Rating | None = None
    correction: Annotated[Text, Field(min_length=1)] | None = None
    comment: Annotated[Text, Field(min_length=1)] | None = None
    source: Key = "user"
    turn: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None
    weight: Annotated[Number, Field(gt=0, le=1e6)] = 1.0
    tags: JsonObject = {}
    idempotency_key: Key | None = None

    @model_validator(mode="after")
    def _check_together(self) -> FeedbackRequest:
        if (self.trajectory_id is None) == (self.episode_id is None):
            raise ValueError("trajectory_id or episode_id is needed, and only one of them")
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]} cannot be given together with {given[0]}")
        if not given and self.comment is None:
            raise ValueError("reward, thumb, rating, correction or comment is needed")
        return self

    def submission(self, header_key: str | None) -> FeedbackSubmission:
        """The feedback as the store takes it. Raises ApiError (400) for a bad or contradicting Idempotency-Key."""
        kind = next((kind for kind in KINDS if getattr(self, kind) is not None), "comment")
        trajectory_id = self.trajectory_id
        return FeedbackSubmission(
            trajectory_id=None if trajectory_id is None else trajectory_id.removeprefix(CHAT_ID_PREFIX),
            episode_id=self.episode_id,
            kind=kind,
            reward=self._mapped_reward(),
            content=self.model_dump(include={*KINDS, "comment", "tags"}, exclude_unset=True, exclude_none=True),
            source=self.source,
            source_kind=source_kind(self.source),
            weight=self.weight,
            turn=self.turn,
            idempotency_key=self._one_key(header_key),
        )

    def _mapped_reward(self) -> float | None:
        if self.thumb is not None:
            return 1.0 if self.thumb == "up" else -1.0
        return self.rating.reward if self.rating is not None else self.reward

    def _one_key(self, header_key: str | None) -> str | None:
        if header_key is None:
            return self.idempotency_key
        if not 1 <= len(header_key) <= MAX_KEY_CHARACTERS:
            raise ApiError(400, f"Idempotency-Key: 1 to {MAX_KEY_CHARACTERS} characters are needed", "Idempotency-Key")
        if self.idempotency_key not in (None, header_key):
            raise ApiError(400, "idempotency_key: differs from the Idempotency-Key header", "idempotency_key")
        return header_key


def source_kind(source: str) -> str:
    """Who judges, for aggregation: `orm:...` is a reward model, `verifier:...` a verifier, all others are human."""
    prefix = source.partition(":")[0] if ":" in source else ""
    return prefix if prefix in ("orm", "verifier") else "human"
