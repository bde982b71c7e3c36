"""The two ends of an edge, as a test sees them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.harness.payloads import fingerprint
from omni_connector_contract_tests.harness.peers import Peer, Peers, Pending, ProcessPeer
from omni_connector_contract_tests.harness.worker import Acting, Call, Close, Open, Run
from omni_connector_core import Health, Usage

__all__ = ["DEFAULT_TIMEOUT_S", "End", "Ends"]

DEFAULT_TIMEOUT_S = 8.0
FIRST_IMPORT_S = 120.0
"""The first opening in a process imports the backend's SDK, hundreds of megabytes from a cold disk for some."""
_numbers = itertools.count()


class End:
    """An open connector in a peer: has the methods of `OmniConnector`, each carried out there.

    Payloads may be given as recipes. What `get` returns has crossed the test's own pipe as well; for large payloads ask for
    `get_fingerprint`, for the lifetime of views use `act`.
    """

    def __init__(self, peer: Peer, backend: Backend, arguments: dict[str, Any]) -> None:
        self.peer, self.arguments = peer, arguments
        self._number = next(_numbers)
        peer.start(Open(self._number, backend, arguments)).result(max(peer.patience_s, FIRST_IMPORT_S))

    def start(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Call a method and do not wait for it."""
        return self.peer.start(Call(self._number, method, args, kwargs))

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method."""
        return self.start(method, *args, **kwargs).result()

    def start_act(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending:
        """Run a module's function in the peer, its first argument an `Acting`, and do not wait for it."""
        return self.peer.start(Run(self._number, function, args, kwargs))

    def act(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a module's function in the peer; its first argument is an `Acting`."""
        return self.start_act(function, *args, **kwargs).result()

    def put(self, key: Any, payload: Any, **kwargs: Any) -> Any:
        """Put a payload."""
        return self.call("put", key, payload, **kwargs)

    def get(self, key: Any, metadata: Any = None, **kwargs: Any) -> Any:
        """Get a payload."""
        return self.call("get", key, metadata, **kwargs)

    def get_fingerprint(self, key: Any, metadata: Any = None, **kwargs: Any) -> str:
        """Get a payload and return its fingerprint, made in the peer."""
        found: str = self.act(_get_fingerprint, key, metadata, kwargs)
        return found

    def poll(self, key: Any, metadata: Any = None, **kwargs: Any) -> Any:
        """Poll for a payload."""
        return self.call("poll", key, metadata, **kwargs)

    def fail(self, key: Any, reason: str) -> None:
        """Declare a payload failed."""
        self.call("fail", key, reason)

    def cleanup(self, request_id: str) -> int:
        """Clean a request up."""
        count: int = self.call("cleanup", request_id)
        return count

    def exists(self, *keys: Any, **kwargs: Any) -> list[bool]:
        """Ask which payloads are there."""
        found: list[bool] = self.call("exists", list(keys), **kwargs)
        return found

    def health(self, **kwargs: Any) -> Health:
        """Ask for the health."""
        health: Health = self.call("health", **kwargs)
        return health

    def stats(self) -> dict[str, Any]:
        """Ask for the counters."""
        stats: dict[str, Any] = self.call("stats")
        return stats

    def usage(self) -> Usage:
        """Ask what the transport holds."""
        usage: Usage = self.act(_usage)
        return usage

    def close(self) -> None:
        """Close the connector and drop what was kept."""
        if self.peer.alive:
            self.peer.ask(Close(self._number))


def _get_fingerprint(acting: Acting, key: Any, metadata: Any, kwargs: dict[str, Any]) -> str:
    return fingerprint(acting.connector.get(key, metadata, **kwargs))


def _usage(acting: Acting) -> Usage:
    return acting.connector.transport.usage()


class Ends:
    """The ends that one test uses, in a namespace of its own; `close` closes every one.

    Parameters
    ----------
    backend, peers
        What is tested, and who runs it.
    """

    def __init__(self, backend: Backend, peers: Peers) -> None:
        self.backend, self.peers = backend, peers
        self.namespace = peers.namespace()
        self.violence = False
        self._open: list[End] = []
        self._producer: End | None = None
        self._consumer: End | None = None

    @property
    def producer(self) -> End:
        """The producing end of the edge 0->1, opened when first used."""
        if self._producer is None:
            self._producer = self.open("producer")
        return self._producer

    @property
    def consumer(self) -> End:
        """The consuming end of the edge 0->1, in another process, opened when first used."""
        if self._consumer is None:
            self._consumer = self.open("consumer")
        return self._consumer

    def open(
        self, role: str, *, on: str | None = None, config: Mapping[str, Any] | None = None, **arguments: Any
    ) -> End:
        """Open one more end.

        Parameters
        ----------
        role
            ``producer``, ``consumer`` or ``both``.
        on
            The peer: each name is a process of its own; default: the role.
        config
            Options on top of the backend's.
        arguments
            For `create_connector`: edge, replica, rank, namespace.
        """
        options = {"timeout_s": DEFAULT_TIMEOUT_S, **self.backend.config, **(config or {})}
        arguments = {"namespace": self.namespace, **arguments, "role": role, "config": options}
        end = End(self.peers.get(on or role), self.backend, arguments)
        self._open.append(end)
        return end

    def process(self, end: End) -> ProcessPeer:
        """Return the process in which an end lives, to be stopped or killed; it may then leave files behind."""
        self.violence = True
        assert isinstance(end.peer, ProcessPeer)
        return end.peer

    def close(self) -> None:
        """Close every end that was opened, the last one first."""
        while self._open:
            self._open.pop().close()
        self._producer = self._consumer = None
