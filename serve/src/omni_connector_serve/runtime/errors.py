"""Why a request ended without a result, each with the HTTP status that says so."""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "BusyError",
    "OutputError",
    "RequestError",
    "RequestTimeoutError",
    "ServeError",
    "StageError",
    "StageFailedError",
    "StageTimeoutError",
    "TransferFailedError",
    "UnavailableError",
]


class ServeError(Exception):
    """Base of the errors that end a request."""

    status: ClassVar[int] = 500

    def describe(self) -> dict[str, Any]:
        """Return what the client is told, ready for JSON."""
        return {"type": type(self).__name__, "message": str(self)}


class RequestError(ServeError):
    """The request itself is wrong. A stage may raise it, too: it refuses this request and goes on with the next."""

    status = 400


class BusyError(ServeError):
    """As many requests as the server takes are running."""

    status = 429


class OutputError(ServeError):
    """A stage made something that has no form in JSON."""


class UnavailableError(ServeError):
    """The server is starting, or stopping, or a stage does not come up."""

    status = 503


class RequestTimeoutError(ServeError):
    """The request's own deadline passed."""

    status = 504


class StageError(ServeError):
    """A stage ended the request.

    Parameters
    ----------
    stage
        Its id.
    cause
        What happened there, in one line.
    """

    def __init__(self, stage: str, cause: str) -> None:
        super().__init__(f"stage {stage!r}: {cause}")
        self.stage = stage
        self.cause = cause

    def describe(self) -> dict[str, Any]:
        """Return what the client is told, ready for JSON."""
        return {**super().describe(), "stage": self.stage, "cause": self.cause}


class StageFailedError(StageError):
    """The stage raised, or its process died, while it had the request."""


class StageTimeoutError(StageError):
    """The stage had the request for longer than its ``timeout_s``."""

    status = 504


class TransferFailedError(StageError):
    """A payload did not get from or to the stage.

    Attributes
    ----------
    neighbour
        The stage at the other end.
    lost
        Whether it is gone since the process that held it died.
    """

    status = 502

    def __init__(self, stage: str, cause: str, *, neighbour: str, lost: bool) -> None:
        super().__init__(stage, cause)
        self.neighbour = neighbour
        self.lost = lost
