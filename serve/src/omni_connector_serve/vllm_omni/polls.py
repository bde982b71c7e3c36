# SPDX-License-Identifier: Apache-2.0
"""The engine's polls, up to a thousand a second for each payload that it waits for: the ones in vain cost next to nothing."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from omni_connector_core import NOT_READY, OmniConnector, OmniConnectorError
from omni_connector_core.key import as_key

__all__ = ["Polls"]

ABANDONED_S = 10.0
"""The engine says nothing when it waits no longer, because a request was aborted; it polls at least twice a second until then."""

Name = tuple[str, str, str]


@dataclass(slots=True)
class _Vain:
    """A poll that found nothing, and what was new then."""

    connector: OmniConnector
    news: int | None
    at_s: float


class Polls:
    """Polls for the engine, but only when something may have come, and forgets what it has ceased to poll for.

    Of a stream it asks for the next chunk when it takes one: the producer then answers with its put, and the first poll of
    that chunk need not wait for an answer.
    """

    def __init__(self) -> None:
        self._vain: dict[Name, _Vain] = {}
        self._tidy_at_s = 0.0

    def vain(self, name: Name) -> bool:
        """Whether a poll of that name, edge and key, would find nothing, like the last one."""
        last = self._vain.get(name)
        return last is not None and last.news is not None and last.news == last.connector.transport.news()

    def poll(self, name: Name, connector: OmniConnector, metadata: Any, *, stream: bool) -> Any:
        """Poll for the key of that name; see `OmniConnector.poll`.

        Parameters
        ----------
        stream
            Whether the key ends in the number of a chunk, and the next one will be polled for.
        """
        news = connector.transport.news()  # what comes during the poll is new to the next one
        payload = connector.poll(name[2], metadata)
        if payload is NOT_READY:
            now_s = time.monotonic()
            self._vain[name] = _Vain(connector, news, now_s)
            if now_s >= self._tidy_at_s:
                self._tidy(now_s)
        else:
            self._vain.pop(name, None)
            if stream:
                self._expect_next(name, connector)
        return payload

    def _expect_next(self, name: Name, connector: OmniConnector) -> None:
        head, _, chunk = name[2].rpartition("_")
        if chunk.isdecimal():
            key = f"{head}_{int(chunk) + 1}"
            with contextlib.suppress(OmniConnectorError):  # the poll for it will say so
                connector.transport.expect([as_key(key)])
            self._vain[name[0], name[1], key] = _Vain(connector, None, time.monotonic())

    def _tidy(self, now_s: float) -> None:
        self._tidy_at_s = now_s + ABANDONED_S
        for name, last in list(self._vain.items()):
            if last.at_s < now_s - ABANDONED_S:
                del self._vain[name]
                last.connector.forget(name[2])
