# SPDX-License-Identifier: Apache-2.0
"""The engine's polls, up to a thousand a second for each payload that it waits for: the ones in vain cost next to nothing."""

from __future__ import annotations

import time
from typing import Any

from omni_connector_core import NOT_READY, Key, OmniConnector, OmniConnectorError

__all__ = ["Polls"]

ABANDONED_S = 10.0
"""The engine says nothing when it waits no longer, because a request was aborted; it polls at least twice a second until then."""


class Polls:
    """Polls for the engine, but only when something may have come, and forgets what it has ceased to poll for.

    Of a stream it asks for the next chunk when it takes one: the producer then answers with its put, and the first poll of
    that chunk need not wait for an answer.

    Parameters
    ----------
    connector
        The consumer's end.
    stream
        Whether the keys end in the number of a chunk, and the next one will be polled for.
    """

    def __init__(self, connector: OmniConnector, *, stream: bool) -> None:
        self._connector = connector
        self._transport = connector.transport
        self._stream = stream
        # Polls that found nothing: what was new then, and when that was.
        self._vain: dict[str, tuple[int | None, float]] = {}
        self._tidy_at_s = 0.0

    def poll(self, key: str, metadata: Any) -> Any:
        """Poll for a key; see `OmniConnector.poll`. A poll that would find nothing, like the last one, is none."""
        news = self._transport.news()  # what comes during the poll is new to the next one
        last = self._vain.get(key)
        if last is not None and news is not None and last[0] == news:
            return NOT_READY
        payload = self._connector.poll(key, metadata)
        if payload is NOT_READY:
            now_s = time.monotonic()
            self._vain[key] = news, now_s
            if now_s >= self._tidy_at_s:
                self._tidy(now_s)
        else:
            self._vain.pop(key, None)
            if self._stream:
                self._expect_next(key)
        return payload

    def _expect_next(self, key: str) -> None:
        head, _, chunk = key.rpartition("_")
        if chunk.isdecimal():
            following = f"{head}_{int(chunk) + 1}"
            try:
                self._transport.expect([Key(following)])
            except OmniConnectorError:
                return  # the poll for it will say so
            self._vain[following] = None, time.monotonic()

    def _tidy(self, now_s: float) -> None:
        self._tidy_at_s = now_s + ABANDONED_S
        for key, (_, at_s) in list(self._vain.items()):
            if at_s < now_s - ABANDONED_S:
                del self._vain[key]
                self._connector.forget(key)
