"""A NIXL agent behind the `Engine` interface.

Facts it rests on, measured with 1.5.1 (`facts/nixl`):

- Without a progress thread an idle agent costs nothing (with one, 70 to 95 % of a core). Then a producer must work the agent while
  a peer makes contact or reads over TCP; a read through shared memory is done by the time that it was begun.
- Only with error handling "peer" does a read from a dead process end (within 10 ms). One over a cut link never ends, and bytes
  arrive after its handle was released (176 MiB were seen): only the agent's end stops them.
- Metadata that was damaged on the way was accepted, and has crashed the process: it travels with a checksum.
- Two threads that meet the same peer at once have crashed UCX: one at a time.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omni_connector_core.errors import BackendUnavailableError, OmniConnectorError, PeerLostError
from omni_connector_core.onesided import Engine, Piece

# Read by UCX when it is loaded. Its InfiniBand module and the system's libibverbs crash the process at its end, so it is left out
# where there is nothing for it to find; memory that is freed between transfers is forgotten before the cache grows.
if not any(Path("/sys/class/infiniband").glob("*")):
    os.environ.setdefault("UCX_MODULES", "^ib")
os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")

from nixl import _bindings as vendor
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

__all__ = ["NixlEngine"]

_HOST_MEMORY = "DRAM"
_CHECKSUM_NBYTES = 4

_AT_WORK_S = 10e-6
"""A call for progress that takes longer moved bytes; one that finds nothing takes 1 to 2 us."""
_HOT_S = 2e-3
"""For how long a producer is called without pause, since a claim was made or bytes were moved."""
_COOL_S = 1e-3
"""How often it is called then."""

_making = threading.Lock()

_ERRORS: dict[type[Exception], type[OmniConnectorError]] = {
    vendor.nixlRemoteDisconnectError: PeerLostError,
    vendor.nixlNotFoundError: PeerLostError,
    vendor.nixlCancelledError: PeerLostError,
    vendor.nixlMismatchError: PeerLostError,
}
"""What the vendor raises, where it says something of the peer; all else says something of this agent."""

_VENDOR = (
    vendor.nixlBackendError,
    vendor.nixlInvalidParamError,
    vendor.nixlNotAllowedError,
    vendor.nixlNotPostedError,
    vendor.nixlNotSupportedError,
    vendor.nixlRepostActiveError,
    vendor.nixlUnknownError,
    *_ERRORS,
)


@contextlib.contextmanager
def _vendor_errors(what: str, hint: str | None = None) -> Iterator[None]:
    """Turn the vendor's exceptions into ours."""
    try:
        yield
    except _VENDOR as error:
        kind = _ERRORS.get(type(error), BackendUnavailableError)
        raise kind(f"{what}: {type(error).__name__}: {error}", hint=hint) from error


class NixlEngine(Engine):
    """One agent.

    Parameters
    ----------
    host
        Address that the control channel uses; a loopback one keeps UCX off all other networks too.
    backends, devices, tls
        See `NixlOptions`.

    Raises
    ------
    BackendUnavailableError
        A backend is not part of this NIXL, or does not start here.
    """

    spin_s = 1e-3
    spin_nbytes = 1 << 20

    def __init__(self, host: str, backends: Sequence[str], *, devices: str = "", tls: str = "") -> None:
        self._name = uuid.uuid4().hex
        config = nixl_agent_config(
            enable_prog_thread=False, backends=[], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        settings = {"UCX_NET_DEVICES": devices or ("lo" if _loopback(host) else ""), "UCX_TLS": tls}
        hint = "See `devices` and `tls`: UCX tells no more of one that it does not know" if devices or tls else None
        with _making, _environment(settings), _vendor_errors(f"NIXL did not start {', '.join(backends)}", hint):
            self._agent = nixl_agent(self._name, config)
            known = self._agent.get_plugin_list()
            for backend in backends:
                if backend not in known:
                    raise BackendUnavailableError(
                        f"NIXL has no backend {backend!r}", hint=f"It has {', '.join(sorted(known))}: see `backends`"
                    )
                own = {"ucx_error_handling_mode": "peer"} if backend == "UCX" else {}
                self._agent.create_backend(backend, own)
        self._backends = list(backends)
        self._registered: dict[int, Any] = {}
        self._blobs: dict[int, bytes] = {}
        self._contact = threading.Lock()
        self._peers: set[str] = set()
        self._called_s = 0.0
        self._hot_until_s = 0.0

    # ---- memory

    def register(self, address: int, nbytes: int) -> None:
        """Register host memory; peers are told of what they ask for alone."""
        with _vendor_errors(f"NIXL did not register {nbytes:,} bytes"):
            self._registered[address] = self._agent.register_memory([(address, nbytes, 0, "")], _HOST_MEMORY)

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        described = self._registered.pop(address, None)
        self._blobs.pop(address, None)
        if described is not None:
            with _vendor_errors("NIXL did not forget memory"):
                self._agent.deregister_memory(described)

    # ---- peers

    def endpoint(self, address: int) -> bytes:
        """Return the agent's metadata behind its checksum; the same for as long as the memory is registered."""
        blob = self._blobs.get(address)
        if blob is None:
            with _vendor_errors("NIXL did not describe itself"):
                metadata = self._agent.get_partial_agent_metadata(
                    self._registered[address], inc_conn_info=True, backends=self._backends
                )
            blob = self._blobs[address] = zlib.crc32(metadata).to_bytes(_CHECKSUM_NBYTES, "big") + metadata
        return blob

    def connect(self, blob: bytes) -> str:
        """Load a peer's metadata and connect; itself is a peer as well."""
        if blob in self._blobs.values():
            return self._name
        metadata = blob[_CHECKSUM_NBYTES:]
        if zlib.crc32(metadata).to_bytes(_CHECKSUM_NBYTES, "big") != blob[:_CHECKSUM_NBYTES]:
            raise PeerLostError("the producer's NIXL metadata arrived damaged")
        with self._contact, _vendor_errors("NIXL did not take the producer's metadata"):
            name = self._agent.add_remote_agent(metadata)
            peer = name.decode() if isinstance(name, bytes) else str(name)
            self._agent.make_connection(peer)
            self._peers.add(peer)
            return peer

    # ---- reading

    def start(self, peer: str, pieces: Sequence[Piece]) -> Any:
        """Begin to read: through shared memory, all of it happens here, without the GIL."""
        agent = self._agent
        with _vendor_errors("NIXL did not begin to read"):
            local = agent.get_xfer_descs([(piece.local, piece.nbytes, 0) for piece in pieces], _HOST_MEMORY)
            remote = agent.get_xfer_descs([(piece.remote, piece.nbytes, 0) for piece in pieces], _HOST_MEMORY)
            read = agent.initialize_xfer("READ", local, remote, peer)
            try:
                if agent.transfer(read) == "ERR":
                    raise PeerLostError("NIXL did not begin to read")
            except BaseException:
                self._release(read)
                raise
        return read

    def done(self, read: Any) -> bool:
        """Ask for the state of a read, which also moves it on."""
        try:
            with _vendor_errors("NIXL gave a read up"):
                state = self._agent.check_xfer_state(read)
        except BaseException:
            self._release(read)
            raise
        if state == "PROC":
            return False
        self._release(read)
        if state != "DONE":
            raise PeerLostError("NIXL gave a read up")
        return True

    def _release(self, read: Any) -> None:
        with contextlib.suppress(*_VENDOR):  # one that cannot be aborted ends with the agent
            read.release()

    # ---- at the producer

    @property
    def progress_s(self) -> float:  # type: ignore[override]
        """At once while contact is made or bytes are moved, then now and then."""
        return 0.0 if time.monotonic() < self._hot_until_s else _COOL_S

    def progress(self) -> None:
        """Let UCX answer peers; they are many small calls while there is something to do."""
        began_s = time.monotonic()
        if began_s - self._called_s > 2 * _COOL_S:  # nobody was reading until now
            self._hot_until_s = began_s + _HOT_S
        with _vendor_errors("NIXL made no progress"):
            self._agent.get_new_notifs()
        self._called_s = time.monotonic()
        if self._called_s - began_s > _AT_WORK_S:
            self._hot_until_s = self._called_s + _HOT_S

    def close(self) -> None:
        """Disconnect from all peers and destroy the agent."""
        with self._contact:
            agent: Any = self._agent
            for peer in self._peers:
                with contextlib.suppress(*_VENDOR):
                    agent.remove_remote_agent(peer)
            for described in self._registered.values():
                with contextlib.suppress(*_VENDOR):
                    agent.deregister_memory(described)
            self._peers.clear()
            self._registered.clear()
            del self._agent
            del agent


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set variables that UCX reads when a backend starts, and put back what was there; an empty value sets nothing."""
    before = {name: os.environ.get(name) for name, value in settings.items() if value}
    try:
        os.environ.update({name: settings[name] for name in before})
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
