"""The producer's end of the control channel: one ROUTER and one thread per process.

The thread sleeps until a message, an announcement or a timer comes; an idle process is never woken. Everything about connected
consumers lives in that thread alone. A put announces to consumers that already wait: `Route.ledger` calls back in
the putting thread, which appends the answer and writes one eventfd.

A consumer that says nothing for `LEASE_S` while it holds claims or waits is dead: what it claimed can be claimed again.
"""

from __future__ import annotations

import atexit
import errno
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from omni_connector_core.arena import Region
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import (
    BackendUnavailableError,
    CapacityError,
    InvalidKeyError,
    OmniConnectorError,
    PeerLostError,
)
from omni_connector_core.key import Key, as_key
from omni_connector_core.ledger import Claim, Ledger
from omni_connector_core.onesided import messages as m
from omni_connector_core.onesided.discovery import sweep
from omni_connector_core.onesided.sockets import is_loopback, new_socket

__all__ = ["ControlServer", "Route"]

_log = logging.getLogger(__name__)

_REBIND_S = 0.5
"""For how long a port that was asked for may be taken before another one is, seconds."""

MAX_WAITING = 100_000
"""Questions that may wait for a put at one time; more are refused."""

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
    def progress_s(self) -> float | None:
        """How often `progress` wants to be called while a claim is out; None: never."""

    def progress(self) -> None:
        """Let the engine work."""

    def endpoint(self) -> tuple[str, bytes]:
        """Name and blob of the engine that serves its memory now."""


@dataclass(slots=True)
class _Client:
    """A consumer's channel that waits for something or holds something."""

    heard_s: float
    waits: dict[int, tuple[Route, Key]] = field(default_factory=dict)
    claims: dict[int, tuple[Route, int]] = field(default_factory=dict)
    """By claim: who holds it, and the number of the question that it answered."""


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
        shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
        self._socket = new_socket(zmq.ROUTER, shown, secret)
        self._socket.router_mandatory = True
        self._socket.router_handover = True
        self._socket.sndtimeo = 0
        self._socket.backlog = 1024
        try:
            self._bind(shown, port)
        except zmq.ZMQError as error:
            self._socket.close()
            raise BackendUnavailableError(f"cannot listen on {shown}: {error}", hint="Check the option host") from error
        bound = str(self._socket.get_string(zmq.LAST_ENDPOINT)).removeprefix("tcp://")
        self.address = bound
        """``host:port``; what is advertised is what is bound."""
        if secret is None and not is_loopback(host):
            _log.warning(
                "omni-connector listens on %s WITHOUT authentication: whoever reaches that address can read and delete "
                "payloads. Set the option secret_file, or bind to loopback.",
                bound,
            )
        self._routes: dict[str, Route] = {}
        self._clients: dict[bytes, _Client] = {}
        self._early: list[tuple[bytes, m.Ask]] = []
        self._outbox: deque[tuple[bytes, int, Route, _Result]] = deque()
        self._errands: deque[Callable[[], None]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bell_lock = threading.Lock()
        self._wake_at_s = float("inf")
        self._running = True
        self.refused = 0
        """Messages that were no messages of ours."""
        sweep()
        self._thread = threading.Thread(target=self._run, name="omni-control", daemon=True)
        self._thread.start()
        # a daemon thread that the interpreter ends in the middle of an engine's C++ code takes the process down with it
        self._pid = os.getpid()
        atexit.register(self._end)

    def _bind(self, host: str, port: int) -> None:
        give_up = Deadline(_REBIND_S)  # ZMQ lets go of a port some time after the socket on it was closed
        while port:
            try:
                self._socket.bind(f"tcp://{host}:{port}")
                return
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            if give_up.expired():
                _log.warning("port %d is taken: omni-connector takes a free one, which only this host finds", port)
                break
            time.sleep(0.01)
        self._socket.bind(f"tcp://{host}:*")

    # ---- from other threads

    def add(self, route: Route) -> None:
        """Serve a producing connector; consumers that asked too early are answered now."""
        self._routes[route.instance] = route
        self._errands.append(self._ask_again)
        self._ring()

    def remove(self, route: Route) -> None:
        """Stop serving it; claims that are out can still be ended."""
        self._routes.pop(route.instance, None)

    def expect(self, seconds: float) -> None:
        """Have the ledgers swept in that time at the latest."""
        if time.monotonic() + seconds < self._wake_at_s:
            self._ring()

    def close(self) -> None:
        """Stop the thread and close the socket."""
        atexit.unregister(self._end)
        self._end()
        os.close(self._bell)

    def _end(self) -> None:
        if os.getpid() == self._pid:
            with self._bell_lock:
                self._running = False
                os.eventfd_write(self._bell, 1)
            self._thread.join()

    def _ring(self) -> None:
        if threading.get_ident() != self._thread.ident:
            with self._bell_lock:
                if self._running:
                    os.eventfd_write(self._bell, 1)

    def _deliver(self, identity: bytes, number: int, route: Route, result: _Result) -> None:
        self._outbox.append((identity, number, route, result))
        self._ring()

    # ---- in the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        try:
            while self._running:
                wait_s = self._tend()
                self._wake_at_s = float("inf") if wait_s is None else time.monotonic() + wait_s
                events = dict(poller.poll(None if wait_s is None else math.ceil(wait_s * 1000)))
                if self._bell in events:
                    os.eventfd_read(self._bell)
                while self._errands:
                    self._errands.popleft()()
                if self._socket in events:
                    self._receive()
                self._flush()
        finally:
            for identity in list(self._clients):
                self._drop(identity)
            self._socket.close(linger=500)  # ms, for the last answers

    def _tend(self) -> float | None:
        """Do what is due; return the seconds until something is due next."""
        due: list[float] = []
        for route in list(self._routes.values()):
            next_s = route.ledger.sweep()
            if next_s is not None:
                due.append(next_s)
            if route.progress_s is not None and route.ledger.claims_out():
                route.progress()
                due.append(route.progress_s)
        if self._clients:
            now = time.monotonic()
            for identity in [i for i, client in self._clients.items() if now - client.heard_s > m.LEASE_S]:
                self._drop(identity)
            due.append(m.PING_S)
        self._flush()
        return min(due, default=None)

    def _receive(self) -> None:
        for _ in range(256):  # then look at the rest
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:  # a peer reset while its message was read: its own loss
                _log.debug("control channel: %s", error)
                return
            identity = parts[0]
            try:
                if len(parts) != 2:
                    raise m.ProtocolError(f"{len(parts)} parts")
                question = m.decode_question(parts[1])
            except m.ProtocolError as error:
                self.refused += 1
                _log.debug("control channel: refused a message: %s", error)
                if len(parts) == 2 and parts[1][:1] not in (b"", bytes([m.PROTOCOL])):
                    self._send(identity, m.Failed(0, "IncompatibleMetadataError", str(error)))
                continue
            client = self._clients.get(identity)
            if client is not None:
                client.heard_s = time.monotonic()
            self._handle(identity, question)

    def _handle(self, identity: bytes, question: m.Question) -> None:
        match question:
            case m.Ask():
                self._ask(identity, question)
            case m.Done():
                self._done(identity, question)
            case m.Ping():
                client = self._clients.get(identity)
                standing = [] if client is None else [claim for claim in question.claims if claim in client.claims]
                self._send(identity, m.Pong(question.number, standing))
            case m.Cancel():
                self._cancel(identity, question.number)
            case m.Describe():
                client = self._clients.get(identity)
                held = None if client is None else client.claims.get(question.claim)
                if held is not None:
                    self._send(identity, m.Endpoint(question.number, *held[0].endpoint()))
                else:
                    self._refuse(identity, question.number, PeerLostError("the producer knows of no such claim"))
            case m.Exists():
                routes = self._matching(question.scope, question.producer)
                keys = [Key(*key) for key in question.keys]
                values = [any(route.ledger.exists(key) for route in routes) for key in keys]
                self._send(identity, m.Truths(question.number, values))
            case m.Cleanup():
                ledgers = [route.ledger for route in self._matching(question.scope, None)]
                count = sum(ledger.cleanup(name) for ledger in ledgers for name in question.request_ids)
                self._send(identity, m.Count(question.number, count))

    def _ask(self, identity: bytes, ask: m.Ask) -> None:
        try:
            key = as_key(Key(*ask.key))
        except InvalidKeyError as error:
            self._refuse(identity, ask.number, error)
            return
        routes = self._matching(ask.scope, ask.producer, ask.instance)
        if not routes and ask.instance:
            gone = PeerLostError("the producer that put the payload is closed, or was restarted since")
            self._refuse(identity, ask.number, gone)
            return
        client = self._clients.get(identity)
        if client is None:
            client = self._clients[identity] = _Client(time.monotonic())
        if len(client.waits) + len(self._early) >= MAX_WAITING:
            self._refuse(identity, ask.number, CapacityError("too many questions wait"))
            self._settle(identity, client)
        elif not routes:
            self._forget_early(identity, ask.number)
            self._early.append((identity, ask))
            self._send(identity, m.Pending(ask.number))
        else:
            route = next((route for route in routes if route.ledger.exists(key)), routes[0])
            client.waits[ask.number] = (route, key)
            decided = False

            def deliver(result: _Result) -> None:
                nonlocal decided
                decided = True
                self._deliver(identity, ask.number, route, result)

            route.ledger.wait(key, (identity, ask.number), deliver)
            if not decided:
                self._send(identity, m.Pending(ask.number))

    def _ask_again(self) -> None:
        early, self._early = self._early, []
        for identity, ask in early:
            if identity in self._clients:
                self._ask(identity, ask)

    def _cancel(self, identity: bytes, number: int) -> None:
        self._forget_early(identity, number)
        client = self._clients.get(identity)
        if client is None:
            return
        wait = client.waits.pop(number, None)
        if wait is not None:
            wait[0].ledger.cancel(wait[1], (identity, number))
        for claim in [claim for claim, (_, asked) in client.claims.items() if asked == number]:
            self._done(identity, m.Done(number, claim, unread=True))  # its Found is on the way to nobody
        self._settle(identity, client)

    def _done(self, identity: bytes, done: m.Done) -> None:
        client = self._clients.get(identity)
        held = None if client is None else client.claims.pop(done.claim, None)
        if client is not None and held is not None:
            route, asked = held
            again = client.waits.pop(asked, None)  # the question was repeated after a reconnect
            if again is not None:
                again[0].ledger.cancel(again[1], (identity, asked))
            route.ledger.release(done.claim, unread=done.unread)
            self._settle(identity, client)

    def _flush(self) -> None:
        """Send what the ledgers decided."""
        while self._outbox:
            identity, number, route, result = self._outbox.popleft()
            client = self._clients.get(identity)
            waited = None if client is None else client.waits.pop(number, None)
            if isinstance(result, OmniConnectorError):
                self._refuse(identity, number, result)
            elif client is None or waited is None:  # it cancelled, or was dropped, meanwhile
                route.ledger.release(result.number, unread=True)
            else:
                client.claims[result.number] = (route, number)
                name, _ = route.endpoint()
                region = result.item
                frame = bytes(region.buffer()) if result.nbytes <= m.EAGER_NBYTES else b""
                self._send(identity, m.Found(number, result.number, name, region.address, result.nbytes, frame))
            if client is not None:
                self._settle(identity, client)

    def _refuse(self, identity: bytes, number: int, error: OmniConnectorError) -> None:
        self._send(identity, m.Failed(number, error.code, error.message))

    def _send(self, identity: bytes, answer: m.Answer) -> None:
        try:
            self._socket.send_multipart((identity, m.encode(answer)), zmq.NOBLOCK)
        except zmq.ZMQError:  # it left, or it does not read: either way it lost what it held
            self._drop(identity)

    def _drop(self, identity: bytes) -> None:
        client = self._clients.pop(identity, None)
        if client is None:
            return
        for number, (route, key) in client.waits.items():
            route.ledger.cancel(key, (identity, number))
        for claim, (route, _) in client.claims.items():
            route.ledger.release(claim, unread=True)
        self._early = [early for early in self._early if early[0] != identity]

    def _settle(self, identity: bytes, client: _Client) -> None:
        if not client.waits and not client.claims and not any(early[0] == identity for early in self._early):
            self._clients.pop(identity, None)

    def _forget_early(self, identity: bytes, number: int) -> None:
        self._early = [(who, ask) for who, ask in self._early if who != identity or ask.number != number]

    def _matching(self, scope: m.Scope, producer: tuple[int, int] | None, instance: str = "") -> list[Route]:
        """Find whom a question is for."""
        if instance:
            route = self._routes.get(instance)
            routes = [] if route is None else [route]
        else:
            routes = list(self._routes.values())
        return [r for r in routes if r.scope == scope and producer in (None, r.producer)]
