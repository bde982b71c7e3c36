"""The producer's end of the control channel: one listening socket and one thread per process.

The thread sleeps until a message or a timer comes; an idle process is never woken. A put answers consumers that already wait from its
own thread (`Route.ledger` calls back there), so that between a put and its consumer there is one system call and one wake-up,
the consumer's. Whoever touches what is known of consumers holds the server's one lock, for microseconds: nothing waits under it.

A consumer that says nothing for `LEASE_S` while it holds claims or waits is dead: what it claimed can be claimed again. Until then its
claims stand, also when its connection broke: it may come back over another one, by its name. Of a process of this host it is known
when it has ended: then they end at once.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from omni_connector_core import liveness
from omni_connector_core.arena import Region
from omni_connector_core.claim import Claim
from omni_connector_core.errors import CapacityError, InvalidKeyError, OmniConnectorError, PeerLostError
from omni_connector_core.key import Key, as_key
from omni_connector_core.ledger import Ledger
from omni_connector_core.onesided import messages as m
from omni_connector_core.onesided.discovery import sweep
from omni_connector_core.onesided.early import Early
from omni_connector_core.onesided.listener import Listener, Peer
from omni_connector_core.onesided.sockets import is_loopback

__all__ = ["ControlServer", "Route"]

_log = logging.getLogger(__name__)

MAX_WAITING = 100_000
"""Questions that may wait for a put at one time; more are refused."""

_LOOK_S = 0.02
"""How soon to look again whether a consumer of this host that lost its connection has ended, seconds: its sockets go before it."""

_Result = Claim[Region] | OmniConnectorError


class Route(Protocol):
    """One connector's producing end, as the server sees it."""

    @property
    def scope(self) -> m.Scope:
        """What it serves."""

    @property
    def instance(self) -> str:
        """Names this connector for ever: a successor at the same address has another one."""

    @property
    def producer(self) -> tuple[int, int]:
        """Its replica and rank."""

    @property
    def ledger(self) -> Ledger[Region]:
        """Its payloads."""

    @property
    def eager_nbytes(self) -> int:
        """The largest frame that comes with the answer, bytes."""

    @property
    def progress_s(self) -> float | None:
        """How often `progress` wants to be called while a claim is out; None: never."""

    def progress(self) -> None:
        """Let the engine work."""

    def endpoint(self) -> tuple[str, bytes]:
        """Name and blob of the engine that serves its memory now."""


@dataclass(slots=True, eq=False)
class _Client(Peer):
    """What a consumer's channel waits for and holds.

    Attributes
    ----------
    claims
        By claim: who holds it, and the number of the question that it answered.
    """

    heard_s: float = 0.0
    waits: dict[int, tuple[Route, Key]] = field(default_factory=dict)
    claims: dict[int, tuple[Route, int]] = field(default_factory=dict)

    def dead(self, now: float) -> bool:
        """Whether it was silent for too long, or its process is known to have ended."""
        process = self.doubtful
        return now - self.heard_s > m.LEASE_S or (process is not None and process.dead())


class ControlServer:
    """Answers consumers for every producing connector of this process.

    Parameters
    ----------
    host, port
        Where to bind; port 0 takes a free one.
    secret
        The shared secret, or None.

    Raises
    ------
    BackendUnavailableError
        The address cannot be bound.
    """

    def __init__(self, host: str, port: int, secret: bytes | None) -> None:
        self._lock = threading.RLock()
        self._routes: dict[str, Route] = {}
        self._clients: dict[bytes, _Client] = {}
        self._holding: set[_Client] = set()
        self._early: Early[_Client] = Early()
        self._listener = Listener(
            host, port, secret, self._lock, greeted=self._greeted, heard=self._heard, left=self._settle
        )
        self.address = self._listener.address
        """``host:port``."""
        if secret is None and not is_loopback(host):
            _log.warning(
                "omni-connector listens on %s WITHOUT authentication: whoever reaches that address can read and delete "
                "payloads. Set the option secret_file, or bind to loopback.",
                self.address,
            )
        self._wake_at_s = math.inf
        self._running = True
        self.refused = 0
        """Messages that were no messages of ours."""
        sweep()
        self._thread = threading.Thread(target=self._run, name="omni-control", daemon=True)
        self._thread.start()
        # a daemon thread that the interpreter ends in the middle of an engine's C++ code takes the process down with it
        self._pid = os.getpid()
        atexit.register(self._end)

    # ---- from other threads

    def add(self, route: Route) -> None:
        """Serve a producing connector; consumers that asked too early are answered now."""
        with self._lock:
            self._routes[route.instance] = route
            for client, ask in self._early.take_all():
                self._ask(client, ask)

    def remove(self, route: Route) -> None:
        """Stop serving it; claims that are out can still be ended."""
        with self._lock:
            self._routes.pop(route.instance, None)

    def expect(self, seconds: float) -> None:
        """Have the ledgers swept in that time at the latest."""
        if time.monotonic() + seconds < self._wake_at_s:
            self._ring()

    def close(self) -> None:
        """Stop the thread and close the sockets."""
        atexit.unregister(self._end)
        self._end()
        self._listener.close()
        liveness.forget()

    def _end(self) -> None:
        if os.getpid() == self._pid:
            with self._lock:
                self._running = False
                self._listener.ring()
            self._thread.join()

    def _ring(self) -> None:
        if threading.get_ident() != self._thread.ident:
            with self._lock:
                if self._running:
                    self._listener.ring()

    def _deliver(self, client: _Client, number: int, route: Route, result: _Result) -> None:
        """Answer a question that waited; also called in a putting thread."""
        with self._lock:
            waited = client.waits.pop(number, None)
            if isinstance(result, OmniConnectorError):
                self._refuse(client, number, result)
            elif waited is None or client.wire is None:  # it cancelled, or was dropped, meanwhile
                route.ledger.release(result.number, unread=True)
            else:
                client.claims[result.number] = (route, number)
                self._send(client, _found(number, route, result))
                if client.wire is None or route.progress_s is not None:  # whose was it? and let the engine work
                    self._ring()
            self._settle(client)

    # ---- in the thread

    def _run(self) -> None:
        try:
            while self._running:
                wait_s = self._tend()
                self._wake_at_s = math.inf if wait_s is None else time.monotonic() + wait_s
                self._listener.wait(wait_s)
        finally:
            with self._lock:
                for client in list(self._clients.values()):
                    self._drop(client)
                self._listener.close_sockets()

    def _tend(self) -> float | None:
        """Do what is due; return the seconds until something is due next."""
        due: list[float | None] = []
        for route in list(self._routes.values()):
            due.append(route.ledger.sweep())
            if route.progress_s is not None and route.ledger.claims_out():
                route.progress()
                due.append(route.progress_s)
        with self._lock:
            due.append(self._listener.tend())
            if self._holding:
                now = time.monotonic()
                for client in [client for client in self._holding if client.dead(now)]:
                    self._drop(client)
                due.append(_LOOK_S if any(client.doubtful for client in self._holding) else m.PING_S)
        return min((seconds for seconds in due if seconds is not None), default=None)

    def _greeted(self, name: bytes) -> _Client:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(name)
        return client

    # ---- what consumers say

    def _heard(self, client: _Client, raw: memoryview) -> None:
        client.heard_s = time.monotonic()
        try:
            question = m.decode_question(raw)
        except m.ProtocolError as error:
            self.refused += 1
            _log.debug("control channel: refused a message: %s", error)
            if raw[:1] not in (b"", bytes([m.PROTOCOL])):
                self._send(client, m.Failed(0, "IncompatibleMetadataError", str(error)))
            return
        match question:
            case m.Ask():
                self._ask(client, question)
            case m.Done():
                self._done(client, question)
            case m.Ping():
                standing = [claim for claim in question.claims if claim in client.claims]
                self._send(client, m.Pong(question.number, standing))
            case m.Cancel():
                self._cancel(client, question.number)
            case m.Describe():
                held = client.claims.get(question.claim)
                if held is not None:
                    self._send(client, m.Endpoint(question.number, *held[0].endpoint()))
                else:
                    self._refuse(client, question.number, PeerLostError("the producer knows of no such claim"))
            case m.Exists():
                routes = self._matching(question.scope, question.producer)
                keys = [Key(*key) for key in question.keys]
                values = [any(route.ledger.exists(key) for route in routes) for key in keys]
                self._send(client, m.Truths(question.number, values))
            case m.Cleanup():
                ledgers = [route.ledger for route in self._matching(question.scope, None)]
                count = sum(ledger.cleanup(name) for ledger in ledgers for name in question.request_ids)
                self._send(client, m.Count(question.number, count))

    def _ask(self, client: _Client, ask: m.Ask) -> None:
        try:
            key = as_key(Key(*ask.key))
        except InvalidKeyError as error:
            self._refuse(client, ask.number, error)
            return
        routes = self._matching(ask.scope, ask.producer, ask.instance)
        if not routes and ask.instance:
            gone = PeerLostError("the producer that put the payload is closed, or was restarted since")
            self._refuse(client, ask.number, gone)
        elif len(client.waits) + len(self._early) >= MAX_WAITING:
            self._refuse(client, ask.number, CapacityError("too many questions wait"))
        elif not routes:
            self._early.add(client, ask)
            self._send(client, m.Pending(ask.number))
        else:
            route = next((route for route in routes if route.ledger.exists(key)), routes[0])
            client.waits[ask.number] = (route, key)
            route.ledger.wait(key, (client.name, ask.number), self._answerer(client, ask.number, route))
            if ask.number in client.waits:
                self._send(client, m.Pending(ask.number))
        self._settle(client)

    def _answerer(self, client: _Client, number: int, route: Route) -> Callable[[_Result], None]:
        return lambda result: self._deliver(client, number, route, result)

    def _cancel(self, client: _Client, number: int) -> None:
        self._early.forget(client, number)
        wait = client.waits.pop(number, None)
        if wait is not None:
            wait[0].ledger.cancel(wait[1], (client.name, number))
        for claim in [claim for claim, (_, asked) in client.claims.items() if asked == number]:
            self._done(client, m.Done(number, claim, unread=True))  # its Found is on the way to nobody
        self._settle(client)

    def _done(self, client: _Client, done: m.Done) -> None:
        held = client.claims.pop(done.claim, None)
        if held is not None:
            route, asked = held
            again = client.waits.pop(asked, None)  # the question was repeated after a reconnect
            if again is not None:
                again[0].ledger.cancel(again[1], (client.name, asked))
            route.ledger.release(done.claim, unread=done.unread)
            self._settle(client)

    def _send(self, client: _Client, answer: m.Answer) -> None:
        if not self._listener.send(client, m.encode(answer)):
            _log.warning("omni-connector drops a consumer that reads no answers")
            self._drop(client)

    def _refuse(self, client: _Client, number: int, error: OmniConnectorError) -> None:
        self._send(client, m.Failed(number, error.code, error.message))

    def _drop(self, client: _Client) -> None:
        """End a consumer: what it holds goes to whoever asks next."""
        self._early.forget_all(client)
        waits, client.waits = client.waits, {}
        claims, client.claims = client.claims, {}
        self._listener.disconnect(client)
        for number, (route, key) in waits.items():
            route.ledger.cancel(key, (client.name, number))
        for claim, (route, _) in claims.items():
            route.ledger.release(claim, unread=True)
        self._settle(client)

    def _settle(self, client: _Client) -> None:
        """Note whether a consumer holds anything; one that neither does nor is connected is forgotten."""
        if client.waits or client.claims or client in self._early:
            if not self._holding:
                self._ring()  # for the lease
            self._holding.add(client)
            return
        self._holding.discard(client)
        if client.wire is None:
            self._clients.pop(client.name, None)

    def _matching(self, scope: m.Scope, producer: tuple[int, int] | None, instance: str = "") -> list[Route]:
        """Find whom a question is for."""
        if instance:
            route = self._routes.get(instance)
            routes = [] if route is None else [route]
        else:
            routes = list(self._routes.values())
        return [r for r in routes if r.scope == scope and producer in (None, r.producer)]


def _found(number: int, route: Route, claim: Claim[Region]) -> m.Found:
    """Say where a claimed payload lies, or, of a small one, what it is."""
    region, nbytes = claim.item, claim.nbytes
    if nbytes <= route.eager_nbytes:
        return m.Found(number, claim.number, "", region.address, nbytes, bytes(region.buffer()))
    name, _ = route.endpoint()
    return m.Found(number, claim.number, name, region.address, nbytes)
