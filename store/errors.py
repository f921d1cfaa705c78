"""The errors that the store raises on purpose. Each message is one sentence fit for a user."""

from __future__ import annotations

from store.types import TidelineError


class DatabaseUrlError(TidelineError, ValueError):
    """`database_url` names no database this project can use."""


class DatabaseUnavailableError(TidelineError, ConnectionError):
    """The database cannot be reached or used now: down, locked, full, or not created. Nothing was written."""


class DatabaseTooNewError(TidelineError, RuntimeError):
    """The database was made by a later version of Tideline."""


class DatabaseOutdatedError(TidelineError, RuntimeError):
    """The database is missing, or waits for `tideline db upgrade`."""


class UnknownTrajectoryError(TidelineError, LookupError):
    """No stored trajectory (or episode) has this id."""


class DuplicateTrajectoryError(TidelineError, ValueError):
    """A trajectory with this id is stored already; trajectories are never overwritten."""


class IdempotencyConflictError(TidelineError, ValueError):
    """The idempotency key was used before, with other content."""


class LeaseLostError(TidelineError, RuntimeError):
    """What the caller held is held by somebody else now, or no longer there. Nothing was written."""


class UnknownPolicyError(TidelineError, LookupError):
    """No policy has this version."""


class PolicyStateError(TidelineError, ValueError):
    """The policy's status does not allow this change."""
