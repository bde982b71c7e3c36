"""The one engine of a process, shared by all its connectors with the same engine options, and the arenas over it.

Starting and ending an engine costs up to a second and its connections, registering memory costs more, and idle they cost nothing: both
are kept for the life of the process. Connectors that ask for the same amount of memory share an arena.

**Quarantine.** An engine may write into memory long after it reported a timeout, or was told to stop (up to 190 MiB were seen to
arrive late, `facts/multi_host`). So memory under a transfer that did not end well is not freed but left to the engine's *generation*:
the generation is retired, new transfers go to a new instance, and when the old one's other transfers are over, it
is closed. Only then is the memory free.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from omni_connector_core.arena import Arena, Pool, Region
from omni_connector_core.errors import BackendUnavailableError, OmniConnectorError, PeerLostError
from omni_connector_core.onesided.engine import Engine, Piece

__all__ = ["Hub", "Share", "Transfer", "hub"]

_log = logging.getLogger(__name__)

_CONTACTS = 1024
"""So many peers are remembered; one that was forgotten is met again."""

_PAUSE_PART, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1 / 32, 50e-6, 250e-6
"""Between two looks at a large transfer: this part of the time that has passed, within these bounds, seconds.

Of twelve ways tried by turns over the Transfer Engine (1, 16 and 256 MiB, 2 processors), pauses of 50 to 200 us were the fastest; to
spin, or to sleep through most of the time that the last transfers took and to spin then, took up to half as long again.
"""


class _Generation:
    """One engine instance: its peers, its transfers, and the memory that it may still write."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.peers: dict[str, Future[Any]] = {}
        self.running = 0
        self.retired = False
        self.quarantine: list[Region] = []
        self.gone = threading.Event()


class Transfer:
    """A read on its way; ends by `done` being true, by its error, or by `abandon`."""

    def __init__(self, hub: Hub, generation: _Generation, handle: Any, nbytes: int) -> None:
        self._hub = hub
        self._generation = generation
        self._handle = handle
        self._finished = False
        self._started_s = time.monotonic()
        engine = generation.engine
        self._spin_until_s = self._started_s + engine.spin_s if nbytes <= engine.spin_nbytes else 0.0

    def done(self) -> bool:
        """Whether every byte arrived.

        Raises
        ------
        PeerLostError
            It failed: call `abandon`, as bytes may still arrive.
        """
        if not self._finished and self._generation.engine.done(self._handle):
            self._finished = True
            self._hub._ended(self._generation)
        return self._finished

    def wait(self, until_s: float) -> bool:
        """Wait until every byte arrived, or to a point of the monotonic clock.

        A small transfer is spun for. A large one is looked at every 50 to 250 us: who spins takes a core from the engine.

        Raises
        ------
        PeerLostError
            It failed: call `abandon`, as bytes may still arrive.
        """
        while not self.done():
            now = time.monotonic()
            if now >= until_s:
                return False
            if now >= self._spin_until_s:
                pause_s = min(max((now - self._started_s) * _PAUSE_PART, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
                time.sleep(min(pause_s, until_s - now))
        return True

    def abandon(self, region: Region | None) -> threading.Event:
        """Give the transfer up, whether it failed or not.

        Parameters
        ----------
        region
            The arena's memory under it, which is quarantined; None when it is not the arena's.

        Returns
        -------
        Event
            Set when no byte can arrive any more.
        """
        return self._hub._abandoned(self._generation, region)


class Hub:
    """Owns a process' engine.

    Parameters
    ----------
    make_engine
        Makes an engine instance; called again for every generation.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self._lock = threading.RLock()
        self._arenas: dict[Hashable, Arena] = {}
        self._registered: dict[int, int] = {}
        self._generations: list[_Generation] = []
        self._current = self._new_generation()

    # ---- memory

    def arena(self, name: Hashable, make_pool: Callable[[], Pool]) -> Arena:
        """Return the arena of that name, made and registered for its first user."""
        with self._lock:
            arena = self._arenas.get(name)
            if arena is None:
                arena = Arena(make_pool())
                self.register(arena.address, arena.nbytes)
                self._arenas[name] = arena
            return arena

    def register(self, address: int, nbytes: int) -> None:
        """Register memory of the caller's. What it overlaps was registered for memory that is gone by now."""
        with self._lock:
            if self._registered.get(address) == nbytes:
                return
            for arena in self._arenas.values():  # a view of what was received
                if arena.address <= address and address + nbytes <= arena.address + arena.nbytes:
                    return
            for other, length in list(self._registered.items()):
                if other < address + nbytes and address < other + length:
                    self.unregister(other)
            self._current.engine.register(address, nbytes)
            self._registered[address] = nbytes

    def unregister(self, address: int) -> None:
        """Forget memory."""
        with self._lock:
            if self._registered.pop(address, None) is not None:
                self._current.engine.unregister(address)

    def covers(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether every run of memory, an address and a length, lies in what is registered."""
        with self._lock:
            starts = sorted(self._registered)
            for address, nbytes in spans:
                index = bisect.bisect_right(starts, address) - 1
                if index < 0 or address + nbytes > starts[index] + self._registered[starts[index]]:
                    return False
            return True

    @property
    def quarantined_bytes(self) -> int:
        """Bytes that wait for a retired engine's end."""
        with self._lock:
            return sum(region.size for generation in self._generations for region in generation.quarantine)

    # ---- as a producer

    def endpoint(self, arena: Arena) -> tuple[str, bytes]:
        """Name and blob of the engine instance that serves an arena now."""
        blob = self._current.engine.endpoint(arena.address)
        return hashlib.blake2b(blob, digest_size=8).hexdigest(), blob

    def progress(self) -> None:
        """Let the engine work."""
        self._current.engine.progress()

    @property
    def eager_nbytes(self) -> int:
        """See `Engine.eager_nbytes`."""
        return self._current.engine.eager_nbytes

    @property
    def progress_s(self) -> float | None:
        """See `Engine.progress_s`."""
        return self._current.engine.progress_s

    # ---- as a consumer

    @property
    def piece_nbytes(self) -> int:
        """See `Engine.piece_nbytes`."""
        return self._current.engine.piece_nbytes

    def peer(self, name: str) -> Future[Any] | None:
        """Return the contact with a peer's engine, made or being made; None: its blob is needed."""
        found = self._current.peers.get(name)
        return None if found is None or (found.done() and found.exception() is not None) else found

    def connect(self, name: str, blob: bytes) -> Future[Any]:
        """Make first contact with a peer's engine on a thread of its own, once however many ask.

        The engine may be stuck in here for as long as it likes (61 s were seen): who waits, waits to its own deadline.
        """
        with self._lock:
            generation = self._current
            found = self.peer(name)
            if found is not None:
                return found
            future: Future[Any] = Future()
            generation.peers[name] = future
            while len(generation.peers) > _CONTACTS:  # the oldest: most of so many have gone
                del generation.peers[next(iter(generation.peers))]

        def contact() -> None:
            try:
                future.set_result(generation.engine.connect(blob))
            except PeerLostError as error:
                future.set_exception(error)
            except Exception as error:  # noqa: BLE001 - whatever the vendor raises must reach who waits
                with contextlib.suppress(OmniConnectorError):  # an engine knows the networks there were when it started
                    self._retire(generation)
                if not isinstance(error, OmniConnectorError):
                    error = BackendUnavailableError(f"the engine failed on first contact: {error}")
                future.set_exception(error)

        threading.Thread(target=contact, name="omni-contact", daemon=True).start()
        return future

    def start(self, name: str, pieces: Sequence[Piece]) -> Transfer | None:
        """Begin to read from a peer with which contact was made; None: it was made by an engine that is retired.

        Raises
        ------
        PeerLostError
            It cannot be begun.
        """
        with self._lock:
            generation = self._current
            contact = generation.peers.get(name)
            if contact is None or not contact.done() or contact.exception() is not None:
                return None
            generation.running += 1
        try:
            handle = generation.engine.start(contact.result(), pieces)
        except BaseException:
            with self._lock:
                generation.peers.pop(name, None)
            self._ended(generation)
            raise
        return Transfer(self, generation, handle, sum(piece.nbytes for piece in pieces))

    # ---- generations

    def _new_generation(self) -> _Generation:
        engine = self._make_engine()
        for address, nbytes in self._registered.items():
            engine.register(address, nbytes)
        generation = _Generation(engine)
        self._generations.append(generation)
        return generation

    def _ended(self, generation: _Generation) -> None:
        with self._lock:
            generation.running -= 1
            over = generation.retired and not generation.running
        if over:
            self._bury(generation)

    def _abandoned(self, generation: _Generation, region: Region | None) -> threading.Event:
        with self._lock:
            if region is not None:
                generation.quarantine.append(region)
            self._retire(generation)
        self._ended(generation)
        return generation.gone

    def _retire(self, generation: _Generation) -> None:
        """Go on with a new engine; the old one is closed once its transfers are over."""
        with self._lock:
            if generation.retired:
                return
            self._current = self._new_generation()
            generation.retired = True
            over = not generation.running
        if over:
            self._bury(generation)

    def _bury(self, generation: _Generation) -> None:
        def close() -> None:
            try:
                generation.engine.close()
            except Exception:  # noqa: BLE001 - whatever the vendor raises
                _log.exception("the engine could not be closed: its memory stays in quarantine")
                return
            with self._lock:
                self._generations.remove(generation)
            for region in generation.quarantine:
                region.arena.release(region)
            generation.quarantine.clear()
            generation.gone.set()

        threading.Thread(target=close, name="omni-retire", daemon=True).start()


class Share(NamedTuple):
    """What a connector has of its process: the engine's hub, and an arena."""

    hub: Hub
    arena: Arena


_hubs: dict[tuple[int, Hashable], Hub] = {}
_hubs_lock = threading.Lock()


def hub(key: Hashable, make_engine: Callable[[], Engine]) -> Hub:
    """Return this process' hub for an engine configuration, made on first use and kept for the life of the process."""
    with _hubs_lock:
        found = _hubs.get((os.getpid(), key))
        if found is None:
            found = _hubs[os.getpid(), key] = Hub(make_engine)
        return found
