"""Handles of transfers that were submitted and not waited for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from omni_connector_core.errors import ClosedError, OmniConnectorError, TransferTimeoutError
from omni_connector_core.metadata import Metadata

__all__ = ["NOT_READY", "GetHandle", "NotReady", "PutHandle"]


class NotReady:
    """The type of `NOT_READY`, which `poll` returns when there is no payload yet: no payload is ever equal to it."""

    _only: NotReady | None = None

    def __new__(cls) -> NotReady:
        """Return the only instance."""
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "NOT_READY"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "NOT_READY"


NOT_READY = NotReady()


class GetHandle:
    """A get that is under way.

    Parameters
    ----------
    poll
        Tries once, without waiting.
    wait
        Waits up to a number of seconds.
    forget
        Drops the interest in the payload.
    """

    def __init__(
        self, poll: Callable[[], Any], wait: Callable[[float | None], Any], forget: Callable[[], None]
    ) -> None:
        self._poll, self._wait, self._forget = poll, wait, forget
        self._payload: Any = NOT_READY
        self._error: OmniConnectorError | None = None
        self._cancelled = False

    def done(self) -> bool:
        """Whether `result` would return or raise at once; never blocks."""
        if self._payload is NOT_READY and self._error is None and not self._cancelled:
            try:
                self._payload = self._poll()
            except OmniConnectorError as error:
                self._error = error
        return self._payload is not NOT_READY or self._error is not None

    def result(self, timeout: float | None = None) -> Any:
        """Return the payload, waiting up to `timeout` seconds (default: the connector's).

        Raises
        ------
        TransferTimeoutError
            Not there yet; ask again later.
        """
        if not self.done():
            self._payload = self._wait(timeout)
        if self._error is not None:
            raise self._error
        return self._payload

    def cancel(self) -> None:
        """Give up: the payload stays for whoever asks next. Harmless when it was already taken."""
        if self._payload is NOT_READY and not self._cancelled:
            self._cancelled = True
            self._forget()


class PutHandle:
    """A put that is under way; the payload's buffers are the caller's again when it is done.

    Parameters
    ----------
    future
        The put.
    failed
        Completes an error with what the connector knows of the put.
    """

    def __init__(self, future: Future[Metadata], failed: Callable[[OmniConnectorError], OmniConnectorError]) -> None:
        self._future = future
        self._failed = failed

    @property
    def future(self) -> Future[Metadata]:
        """The same as a `concurrent.futures.Future`."""
        return self._future

    def done(self) -> bool:
        """Whether `result` would return or raise at once; never blocks."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Metadata:
        """Return the metadata, waiting up to `timeout` seconds (default: as long as the put itself may take)."""
        try:
            return self._future.result(timeout)
        except CancelledError as error:
            raise self._failed(ClosedError("the connector was closed before the put began")) from error
        except FutureTimeoutError as error:
            if self._future.done():
                raise
            raise self._failed(TransferTimeoutError(f"the put is not done after {timeout:g} s")) from error
