"""`OneSidedTransport`: a whole `Transport` over any `Engine`.

The producer copies a frame once into its arena and enters it into its ledger; a consumer asks for it over the control channel,
reads it with the engine into its own arena, or into memory of the caller's, and says done, upon which the producer frees it. What
the consumer holds is its own copy: it needs nothing of the producer any more, also when that dies.

A backend is this class with `engine_options` and `make_engine`.
"""

from __future__ import annotations

import secrets
import socket
import threading
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from omni_connector_core.arena import Pool, Region
from omni_connector_core.capabilities import Capabilities, Usage
from omni_connector_core.context import Role, TransportContext
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import (
    BackendUnavailableError,
    ClosedError,
    OmniConnectorError,
    PeerLostError,
    TransferTimeoutError,
)
from omni_connector_core.frame import Frame
from omni_connector_core.key import Key
from omni_connector_core.ledger import Ledger
from omni_connector_core.memcpy import region as memory_region
from omni_connector_core.metadata import ANYWHERE, Where
from omni_connector_core.onesided import messages as m
from omni_connector_core.onesided.channel import Channels
from omni_connector_core.onesided.device import make_pool
from omni_connector_core.onesided.discovery import Advert, Found
from omni_connector_core.onesided.engine import Engine, Piece
from omni_connector_core.onesided.fetch import Fetch
from omni_connector_core.onesided.hub import Share, hub
from omni_connector_core.onesided.options import OneSidedOptions
from omni_connector_core.onesided.producers import Producers, Whereabouts
from omni_connector_core.onesided.reading import Span
from omni_connector_core.onesided.server import ControlServer
from omni_connector_core.onesided.servers import close_server, open_server
from omni_connector_core.onesided.sockets import read_secret
from omni_connector_core.transport import Memory, Transport

__all__ = ["OneSidedTransport"]

_CALL_S = 5.0
"""For how long a question about other producers may take when the caller gave no deadline, seconds."""

_DRAIN_S = 2.0
"""For how long `close` waits for consumers that are reading, seconds."""

_PROBE_NBYTES = 64


class OneSidedTransport(Transport):
    """Frames by one-sided reads. Copies per transfer: one memcpy at the producer, then the engine's own read."""

    capabilities: Capabilities = Capabilities(cross_host=True, direct_get_into=True)
    options: OneSidedOptions

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._secret = read_secret(self.options.secret_file)
        self._host = routable_host() if self.options.host == "auto" else self.options.host
        self._own_share: Share | None = None
        self._producers = Producers(context)
        self._channels = Channels(self._secret)
        self._ledger: Ledger[Region] = Ledger(self._free)
        self._instance = secrets.token_hex(8)
        self._server: ControlServer | None = None
        self._advert: Advert | None = None
        self._start_lock = threading.Lock()
        self._fetches: dict[Key, list[Fetch]] = defaultdict(list)

    # ---- for backends

    @abstractmethod
    def engine_options(self) -> Hashable:
        """Return what tells engines apart: connectors of one process with equal ones share engine and arena."""

    @abstractmethod
    def make_engine(self) -> Engine:
        """Start an engine instance.

        Raises
        ------
        BackendUnavailableError
            It cannot work on this host; says why.
        """

    def _make_pool(self) -> Pool:
        return make_pool(self.options.capacity_bytes, self.options.memory_pool_device)

    @property
    def host(self) -> str:
        """The address of this host that the control channel binds and the engine should bind."""
        return self._host

    # ---- the producer's end, as the control server sees it (`Route`)

    @property
    def scope(self) -> m.Scope:
        """What is served: a backend's edge in a namespace."""
        return self._producers.scope

    @property
    def instance(self) -> str:
        """Names this connector for ever."""
        return self._instance

    @property
    def producer(self) -> tuple[int, int]:
        """Replica and rank."""
        return self.context.producer

    @property
    def ledger(self) -> Ledger[Region]:
        """The payloads of this producer."""
        return self._ledger

    @property
    def eager_nbytes(self) -> int:
        """See `Engine.eager_nbytes`."""
        return self._share().hub.eager_nbytes

    @property
    def progress_s(self) -> float | None:
        """How often `progress` is to be called while a consumer reads, seconds."""
        return self._share().hub.progress_s

    def progress(self) -> None:
        """Let the engine work."""
        self._share().hub.progress()

    def endpoint(self) -> tuple[str, bytes]:
        """Name and blob of the engine that serves the arena now."""
        hub, arena = self._share()
        return hub.endpoint(arena)

    # ---- Transport: the producer

    def _put(
        self, key: Key, frame: Frame, *, readers: int, ttl_s: float, overwrite: bool, deadline: Deadline
    ) -> dict[str, Any]:
        server = self._start_serving()
        ledger = self._ledger
        ledger.check(key, overwrite=overwrite)
        region = self._share().arena.allocate(frame.nbytes, deadline)
        try:
            region.store(frame)
        except BaseException:
            self._free(region)
            raise
        try:
            ledger.publish(key, region, nbytes=frame.nbytes, readers=readers, ttl_s=ttl_s, overwrite=overwrite)
        except OmniConnectorError:  # of anything else, such as Ctrl-C, nobody knows whether the payload is live by now
            self._free(region)
            raise
        if ledger.exists(key):  # else a consumer that waited has it by now
            server.expect(ttl_s)
        return {"address": server.address, "instance": self._instance}

    def _fail(self, key: Key, reason: str, *, deadline: Deadline) -> None:
        self._start_serving()
        self._ledger.fail(key, reason)

    def _consumed(self, key: Key, *, deadline: Deadline) -> bool:
        return self._ledger.consumed(key, deadline)

    def _start_serving(self) -> ControlServer:
        """Bind the control port and make it known, on first use."""
        if self._server is not None:
            return self._server
        self._share()
        with self._start_lock:
            if self._server is None:
                server = open_server(self._host, self.options.control_port, self._secret)
                try:
                    server.add(self)
                    self._advert = Advert(
                        self._producers.directory, Found(server.address, self._instance, *self.context.producer)
                    )
                except BaseException:
                    server.remove(self)
                    close_server(server)
                    raise
                self._server = server
            return self._server

    def _free(self, region: Region) -> None:
        region.arena.release(region)

    # ---- Transport: the consumer

    def _poll(self, key: Key, where: Where) -> Memory | None:
        fetch = self._begun(key, where) or self._new_fetch(key, where)
        memory = fetch.advance()
        if memory is None:
            self._fetches[key].append(fetch)
        return memory

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        fetch = self._begun(key, where) or self._new_fetch(key, where)
        return fetch.finish(deadline, self._check_open)

    def _get_into(self, key: Key, where: Where, buffers: Sequence[Any], *, deadline: Deadline) -> int:
        places = [memory_region(buffer, writable=True) for buffer in buffers]
        spans = [(place.address, place.nbytes) for place in places if place.nbytes]
        engine_hub = self._share().hub
        many_small = sum(nbytes for _, nbytes in spans) < len(spans) * engine_hub.piece_nbytes
        if many_small or not engine_hub.covers(spans):
            return super()._get_into(key, where, buffers, deadline=deadline)
        self._forget(key, where)
        nbytes: int = self._new_fetch(key, where, spans).finish(deadline, self._check_open)
        return nbytes

    def _register(self, buffer: Any) -> None:
        place = memory_region(buffer, writable=True)
        self._share().hub.register(place.address, place.nbytes)

    def _forget(self, key: Key, where: Where) -> None:
        for fetch in self._fetches.pop(key, ()):
            fetch.cancel()

    def _begun(self, key: Key, where: Where) -> Fetch | None:
        """Return what an earlier poll began, to go on with it; what looked elsewhere for the key would only take its read away."""
        begun = self._fetches.pop(key, None)
        if begun is None:
            return None
        same: Fetch | None = None
        for fetch in begun:
            if same is None and fetch.where == where:
                same = fetch
            else:
                fetch.cancel()
        return same

    def _new_fetch(self, key: Key, where: Where, target: Sequence[Span] | None = None) -> Fetch:
        return Fetch(self._producers, self._channels, self._share, key, where, target)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("closed while waiting")

    # ---- Transport: both ends

    def _exists(self, keys: Sequence[Key], where: Where) -> list[bool]:
        here = where.producer in (None, self.context.producer)
        values = [here and self._ledger.exists(key) for key in keys]
        deadline = Deadline(_CALL_S)
        for place in self._others(where):
            question = m.Exists(m.new_number(), self.scope, list(keys), place.producer)
            try:
                theirs = self._channels.call(place.address, question, m.Truths, deadline).values
            except PeerLostError:  # and what it held with it
                continue
            values = [ours or other for ours, other in zip(values, theirs, strict=True)]
        return values

    def _cleanup(self, request_id: str, *, deadline: Deadline) -> int:
        count = self._ledger.cleanup(request_id)
        if self.context.role is Role.PRODUCER:
            return count
        self._producers.abandon(request_id)
        for place in self._others(ANYWHERE):
            question = m.Cleanup(m.new_number(), self.scope, [request_id])
            try:
                count += self._channels.call(place.address, question, m.Count, deadline).count
            except PeerLostError:  # and what it held with it
                continue
        for key in [key for key in list(self._fetches) if key.request_id == request_id]:
            self._forget(key, ANYWHERE)
        return count

    def _others(self, where: Where) -> list[Whereabouts]:
        """Find the producers of this edge that are not this connector, each control server once."""
        places = [place for place in self._producers.find(where) if place.instance != self._instance]
        return list({place.address: place for place in places}.values())

    def _usage(self) -> Usage:
        pending = self._ledger.pending()
        return Usage(
            pending=pending.count,
            oldest_age_s=pending.oldest_age_s,
            bytes_held=0 if self._own_share is None else self._own_share.arena.used_bytes,
            capacity_bytes=self.options.capacity_bytes,
            expired=self._ledger.expired,
        )

    def _probe(self, *, deadline: Deadline) -> str:
        """Read a few bytes of the own arena with the engine, and ask every producer that is known whether it is there."""
        engine_hub, arena = self._share()
        with_both = arena.allocate(2 * _PROBE_NBYTES, deadline)
        memory = memoryview(with_both.buffer()).cast("B")
        memory[:_PROBE_NBYTES] = secrets.token_bytes(_PROBE_NBYTES)
        name, blob = engine_hub.endpoint(arena)
        contact = engine_hub.connect(name, blob)
        try:
            contact.result(deadline.remaining_s())
        except TimeoutError as error:
            arena.release(with_both)
            raise BackendUnavailableError("the engine did not reach itself in time") from error
        here = with_both.address
        transfer = engine_hub.start(name, [Piece(here, here + _PROBE_NBYTES, _PROBE_NBYTES)])
        if transfer is None:
            arena.release(with_both)
            raise BackendUnavailableError("the engine was restarted while it was probed")
        try:
            if not transfer.wait(deadline.at_s):
                raise TransferTimeoutError("the engine did not read its own memory in time")
        except BaseException:
            transfer.abandon(with_both)
            raise
        same = memory[:_PROBE_NBYTES] == memory[_PROBE_NBYTES:]
        arena.release(with_both)
        if not same:
            raise BackendUnavailableError("the engine read other bytes than were there")
        return f"the engine reads its own memory; {self._ask_around(deadline)}"

    def _ask_around(self, deadline: Deadline) -> str:
        places = self._others(ANYWHERE)
        silent = []
        for place in places:
            try:
                self._channels.call(place.address, m.Ping(m.new_number()), m.Pong, deadline)
            except OmniConnectorError:
                silent.append(place.address)
        return f"{len(places) - len(silent)} other producers answer" + (
            f", {', '.join(silent)} do not" if silent else ""
        )

    def _close(self) -> None:
        for begun in list(self._fetches.values()):
            for fetch in begun:
                fetch.cancel()
        self._fetches.clear()
        self._ledger.close()
        if self._server is not None:
            assert self._advert is not None
            self._advert.withdraw()
            deadline = Deadline(_DRAIN_S)
            self._ledger.room(lambda: not self._ledger.claims_out(), deadline)
            self._server.remove(self)
            close_server(self._server)
        self._channels.close()
        self._producers.close()

    def _share(self) -> Share:
        """Start the engine, or find it started, and an arena."""
        if self._own_share is None:
            with self._start_lock:
                if self._own_share is None:
                    found = hub((type(self), self._host, self.engine_options()), self.make_engine)
                    memory = (self.options.capacity_bytes, self.options.memory_pool_device)
                    self._own_share = Share(found, found.arena(memory, self._make_pool))
        return self._own_share


def routable_host() -> str:
    """Return this host's address on its default route.

    Raises
    ------
    BackendUnavailableError
        It has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: no host has it; connecting a UDP socket sends nothing
        except OSError as error:
            raise BackendUnavailableError(
                "this host has no default route", hint="Set the option host to an address that the other hosts reach"
            ) from error
        host: str = probe.getsockname()[0]
        return host
