"""Mooncake's Transfer Engine behind the `Engine` interface.

Facts it rests on, measured with 0.3.13.post1 (`facts/mooncake`):

- A submitted read is never waited for by the engine itself, so the caller's deadline holds whatever
  ``MC_TRANSFER_TIMEOUT`` (30 s) says; the first contact with a peer does wait (61 s for a hung one).
- A read polled without pause takes as long as ``transfer_sync_read`` (47 us for 1 KB), which spins too but cannot be left.
  Sleeping between polls wins from about 1 MiB on: 1.7 to 2.1 GB/s against 1.0 at 16 MiB and 0.4 at 256 MiB.
- Over TCP four reads of a quarter each, under way at once, take less than one of the whole: 1.23 ms and 1.57 at 1 MiB, 7.7 and 8.5 to
  11 at 16 MiB, 117 and 135 at 256 MiB; two do as well from 16 MiB on, 16 do no better.
- Over TCP a frame is here sooner with the control channel's answer than by a read of its own, up to 384 KiB (put -> got, 60 KiB: 253
  and 383 us; 192: 313 and 501; 384: 495 and 696); 208 KiB no longer fit into a unix socket's buffer. Over RDMA nobody measured.
- The status of a batch of several pieces is that of its first, and a batch of more than 2,048 is cut short: every piece is submitted
  as a batch of its own. A piece costs 25 to 50 us, so many small ones are read as a whole instead.
- Status -1, and a read that was given up, prove nothing: bytes still arrive. Destroying the engine ends that. It waits, with the GIL
  held, for its thread that accepts handshakes, which looks up once a second: see `_hurry`.
- ``initialize`` answers 0 for RDMA on a host without an adapter.

The engine listens on all interfaces, ports 15000 to 17000, and serves registered memory to whoever asks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import stat
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from omni_connector_core.errors import BackendUnavailableError, PeerLostError
from omni_connector_core.onesided import Engine, Piece
from omni_connector_core.rdma import check_rdma

# read by the library when it is loaded
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

from mooncake.engine import TransferEngine

__all__ = ["MooncakeEngine"]

_SCRATCH_NBYTES = 64
_RUNNING, _DONE = 0, 1

_LOOK_UP = struct.pack("ll", 0, 10_000)
"""A ``timeval`` of 10 ms."""

_LANES, _LANE_NBYTES = 4, 256 << 10
"""Over TCP a piece is read in this many parts at once, none of which is smaller than this, bytes."""

_WINDOW = 256
"""Pieces of one read under way at a time: the engine queues 2,048 for each peer and drops the rest of a batch silently."""


class _Contact(msgspec.Struct, array_like=True, frozen=True):
    """What a peer needs to know.

    Attributes
    ----------
    session
        ``host:port`` by which the engine is addressed.
    nonce
        Tells an engine from a later one of the same address.
    address
        Registered memory that may be read to see whether the contact works.
    """

    session: str
    nonce: bytes
    address: int


@dataclass(slots=True)
class _Read:
    """A read on its way."""

    peer: str
    waiting: deque[Piece]
    running: list[int] = field(default_factory=list)


class MooncakeEngine(Engine):
    """One ``TransferEngine``.

    Parameters
    ----------
    host
        Address under which peers reach it.
    protocol, device_name
        See `MooncakeTEOptions`.
    """

    spin_s = 1e-3
    spin_nbytes = 256 << 10
    piece_nbytes = 64 << 10

    def __init__(self, host: str, protocol: str, device_name: str) -> None:
        if protocol == "rdma":
            check_rdma(device_name)
            self._lanes = 1  # the engine spreads a read over its adapters itself
        else:
            os.environ["MC_FORCE_TCP"] = "1"  # or it takes an adapter that it finds
            self.eager_nbytes = 192 << 10
            self._lanes = _LANES
        self._host = host
        self._engine = TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, device_name)
        if code:
            raise BackendUnavailableError(
                f"the Transfer Engine did not start over {protocol} on {host}: code {code}",
                hint="Check the options host, protocol and device_name, and set MC_LOG_LEVEL=INFO to see why",
            )
        shown = f"[{host}]" if ":" in host else host
        self._session = f"{shown}:{self._engine.get_rpc_port()}"
        self._nonce = secrets.token_bytes(8)
        self._scratch = ctypes.create_string_buffer(_SCRATCH_NBYTES)
        self.register(ctypes.addressof(self._scratch), _SCRATCH_NBYTES)
        self._blob = msgspec.msgpack.encode(_Contact(self._session, self._nonce, ctypes.addressof(self._scratch)))

    def register(self, address: int, nbytes: int) -> None:
        """Register memory; overlapping regions are refused by the engine."""
        code = self._engine.register_memory(address, nbytes)
        if code:
            raise BackendUnavailableError(
                f"the Transfer Engine did not register {nbytes:,} bytes: code {code}",
                hint="The memory may overlap memory that is registered; on RDMA, raise the memlock limit (ulimit -l)",
            )

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self._engine.unregister_memory(address)

    def endpoint(self, address: int) -> bytes:
        """Return session, nonce and an address for the first contact."""
        return self._blob

    def connect(self, blob: bytes) -> str:
        """Read a byte: the engine fetches the peer's description and connects, which may take it a minute."""
        try:
            contact = msgspec.msgpack.decode(blob, type=_Contact)
        except msgspec.DecodeError as error:
            raise PeerLostError(f"the producer's engine described itself as no engine does: {error}") from error
        scratch = ctypes.addressof(self._scratch)
        if self._engine.transfer_sync_read(contact.session, scratch, contact.address, 1):
            raise PeerLostError(f"the Transfer Engine at {contact.session} cannot be reached")
        return contact.session

    def start(self, peer: str, pieces: Sequence[Piece]) -> _Read:
        """Submit the first piece; if it is refused, nothing is under way."""
        read = _Read(peer, deque(part for piece in pieces for part in self._parts(piece)))
        self._submit(read, 1)
        return read

    def _parts(self, piece: Piece) -> Iterator[Piece]:
        """Cut a large piece into as many parts as pay."""
        remote, local, nbytes = piece
        step = max(-(-nbytes // self._lanes), _LANE_NBYTES)
        for start in range(0, nbytes, step):
            yield Piece(remote + start, local + start, min(step, nbytes - start))

    def done(self, read: _Read) -> bool:
        """Look which pieces have arrived, and submit more."""
        read.running = [batch for batch in read.running if not self._arrived(batch)]
        if read.waiting:
            self._submit(read, _WINDOW)
        return not read.running

    def _submit(self, read: _Read, window: int) -> None:
        while read.waiting and len(read.running) < window:
            remote, local, nbytes = read.waiting.popleft()
            batch: int = self._engine.batch_transfer_async_read(read.peer, [local], [remote], [nbytes])
            if not batch:
                raise PeerLostError(f"the Transfer Engine at {read.peer} takes no read")
            read.running.append(batch)

    def _arrived(self, batch: int) -> bool:
        status = self._engine.transfer_check_status(batch)
        if status not in (_RUNNING, _DONE):
            raise PeerLostError(f"the Transfer Engine gave a read up: status {status}")
        return bool(status == _DONE)

    def close(self) -> None:
        """Destroy the engine, which ends its connections and threads."""
        engine: Any = self._engine
        _hurry(self._host, engine.get_rpc_port())
        del self._engine
        del engine


def _hurry(host: str, port: int) -> None:
    """Let the thread that accepts handshakes at a port look up every 10 ms from now on: 18 ms to the engine's end instead of 970."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as known:
                accepts = known.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if accepts and known.family != socket.AF_UNIX and known.getsockname()[1] == port:
                    known.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _LOOK_UP)
                    socket.create_connection((host, port), timeout=1).close()  # ends the accept under way
