"""``engine: transfer``: one-sided reads over the vendor's transfer engine, which needs Ascend hardware.

**Not run on hardware.** Reviewed against the engine's Python interface (0.8.1), upstream's `YuanrongTransferEngineConnector`, and the
ACL reference; run as far as `require_ascend`, which is as far as a machine without CANN lets it.

The engine answers OK to ``initialize`` without an NPU, and fails at the first read: so CANN is looked for first. Upstream's
pool lies in NPU memory and holds tensors that are there already. Our frames are written by the host, so the arena is host memory
that ACL has pinned; an engine that takes none says so when the arena is registered, before any payload is put.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from omni_connector_core.arena import Pool
from omni_connector_core.errors import BackendUnavailableError, PeerLostError
from omni_connector_core.onesided import Engine, OneSidedTransport, Piece

__all__ = ["AscendEngine", "AscendTransport", "PinnedMemory", "require_ascend"]

_ACL = "libascendcl.so"
_PROTOCOL = "ascend"


def require_ascend() -> Any:
    """Load ACL, the runtime of Ascend's CANN.

    Raises
    ------
    BackendUnavailableError
        It is not here.
    """
    try:
        return ctypes.CDLL(_ACL)
    except OSError as error:
        raise BackendUnavailableError(
            f"engine: transfer needs {_ACL}, the runtime of Ascend NPUs: {error}",
            hint="Install CANN and source its set_env.sh, or use `engine: store`, which needs no NPU",
        ) from error


def _acl_ok(code: int, call: str) -> None:
    if code:
        raise BackendUnavailableError(f"{call} failed with code {code}", hint="`npu-smi info` shows the NPUs")


class PinnedMemory(Pool):
    """Host memory that ACL has pinned, for the life of the process: an engine may write to it as long.

    Parameters
    ----------
    nbytes
        Its size.
    device
        Number of the NPU.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        acl = require_ascend()
        _acl_ok(acl.aclrtSetDevice(ctypes.c_int32(device)), "aclrtSetDevice")
        pointer = ctypes.c_void_p()
        _acl_ok(acl.aclrtMallocHost(ctypes.byref(pointer), ctypes.c_size_t(nbytes)), "aclrtMallocHost")
        self.address = pointer.value or 0
        self.nbytes = nbytes

    def part(self, offset: int, nbytes: int) -> Any:
        """Return a ctypes array over a part."""
        return (ctypes.c_char * nbytes).from_address(self.address + offset)


class AscendEngine(Engine):
    """One ``TransferEngine``; its reads block, so they run on a thread of their own.

    Parameters
    ----------
    host
        Address under which peers reach it.
    device
        Number of the NPU.
    """

    def __init__(self, host: str, device: int) -> None:
        require_ascend()
        from yr.datasystem import TransferEngine

        self._engine = TransferEngine()
        self._check(self._engine.initialize(f"{host}:0", _PROTOCOL, f"npu:{device}"), "initialize")
        self._address = f"{host}:{self._engine.get_rpc_port()}"
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="omni-ascend")

    def register(self, address: int, nbytes: int) -> None:
        """Register memory."""
        self._check(self._engine.register_memory(address, nbytes), f"register {nbytes:,} bytes")

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self._engine.unregister_memory(address)

    def endpoint(self, address: int) -> bytes:
        """Return the engine's address."""
        return self._address.encode()

    def connect(self, blob: bytes) -> str:
        """Connect at the first read: the engine has no call for it."""
        return blob.decode()

    def start(self, peer: str, pieces: Sequence[Piece]) -> Future[Any]:
        """Read on the engine's thread."""
        remote, local, nbytes = (list(column) for column in zip(*pieces, strict=True))
        return self._reader.submit(self._engine.batch_transfer_sync_read, peer, local, remote, nbytes)

    def done(self, read: Future[Any]) -> bool:
        """See whether the thread is through with a read."""
        if not read.done():
            return False
        result = read.result()
        if result.is_error():
            raise PeerLostError(f"Yuanrong's transfer engine gave a read up: {result.to_string()}")
        return True

    def close(self) -> None:
        """End the reads and the engine."""
        self._reader.shutdown(cancel_futures=True)
        self._engine.finalize()

    @staticmethod
    def _check(result: Any, call: str) -> None:
        if result.is_error():
            raise BackendUnavailableError(f"Yuanrong's transfer engine did not {call}: {result.to_string()}")


class AscendTransport(OneSidedTransport):
    """Frames between the hosts of NPUs: the consumer reads the producer's memory."""

    def engine_options(self) -> Hashable:
        """All connectors of a process share the NPU that `ASCEND_RT_VISIBLE_DEVICES` makes its first."""
        return self.host

    def make_engine(self) -> AscendEngine:
        """Start an engine."""
        return AscendEngine(self.host, device=0)

    def _make_pool(self) -> Pool:
        return PinnedMemory(self.options.capacity_bytes, device=0)
