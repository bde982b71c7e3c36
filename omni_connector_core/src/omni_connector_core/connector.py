"""What everyone but a backend's author uses: an `OmniConnector` moves payloads over whichever backend was named."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

from omni_connector_core.aio import AsyncConnector
from omni_connector_core.capabilities import Capabilities, Health
from omni_connector_core.codec import Codec
from omni_connector_core.context import Role
from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import ClosedError, InvalidKeyError, OmniConnectorError, locate
from omni_connector_core.handles import NOT_READY, GetHandle, NotReady, PutHandle
from omni_connector_core.key import Edge, Key, Producer, as_key
from omni_connector_core.metadata import Metadata, Where, read_metadata
from omni_connector_core.metrics import Metrics
from omni_connector_core.streams import StreamReader, StreamWriter
from omni_connector_core.transport import Memory, Transport

__all__ = ["OmniConnector"]


class OmniConnector:
    """One end of one edge. Thread-safe; a context manager closes it.

    Make one with `create_connector`.

    Every method that waits takes `timeout` in seconds (None: the option `timeout_s`) and holds one absolute deadline over
    everything it does. Every failure is an `OmniConnectorError` with key, edge and backend.
    """

    def __init__(self, transport: Transport, codec: Codec) -> None:
        context = transport.context
        self._transport = transport
        self._codec = codec
        self._context = context
        self._options = context.options
        self._executor: ThreadPoolExecutor | None = None
        self._executor_lock = threading.Lock()
        self._metrics = Metrics(
            transport.usage,
            backend=context.backend,
            edge=str(context.edge),
            replica=str(context.producer.replica),
            rank=str(context.producer.rank),
        )

    # ---- who this is

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self._context.backend

    @property
    def edge(self) -> Edge:
        """The edge that this is one end of."""
        return self._context.edge

    @property
    def role(self) -> Role:
        """Which end it is."""
        return self._context.role

    @property
    def capabilities(self) -> Capabilities:
        """What the backend can do beyond the contract."""
        return self._transport.capabilities

    @property
    def transport(self) -> Transport:
        """The transport underneath, for frames."""
        return self._transport

    @property
    def metrics(self) -> Metrics:
        """The counters, for flows that are built on this."""
        return self._metrics

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._transport.closed

    def __repr__(self) -> str:
        return f"<OmniConnector {self.backend} {self.edge} {self.role.value}{' closed' if self.closed else ''}>"

    # ---- put

    def put(
        self,
        key: Key | str,
        payload: Any,
        *,
        timeout: float | None = None,
        readers: int = 1,
        ttl: float | None = None,
        overwrite: bool = False,
    ) -> Metadata:
        """Put a payload; when this returns it can be fetched, and its buffers are the caller's again.

        Parameters
        ----------
        payload
            Anything that the codec covers (see `omni_connector_core.codec`).
        readers
            How many gets may take it; it is freed after the last.
        ttl
            Seconds after which an unread payload is freed; None: the option `ttl_s`.
        overwrite
            Replace a live payload of the same key, atomically.

        Returns
        -------
        Metadata
            May be passed to the consumer's `get`, as a shortcut; survives JSON and msgpack.

        Raises
        ------
        EncodeError, InvalidKeyError, PayloadConflictError, RequestAbandonedError, CapacityError, PayloadTooLargeError,
        UnsupportedError, RoleError, BackendUnavailableError, ClosedError, ForkedError
        """
        start_s = time.perf_counter()
        try:
            key = as_key(key)
            frame = self._codec.encode(payload)
            metadata = self._transport.put(
                key, frame, deadline=self.deadline(timeout), readers=readers, ttl_s=ttl, overwrite=overwrite
            )
        except OmniConnectorError as error:
            raise self._failed("put", error, key)  # noqa: B904 - the same error, completed
        self._metrics.put(frame.nbytes, time.perf_counter() - start_s)
        return metadata

    def submit_put(
        self,
        key: Key | str,
        payload: Any,
        *,
        timeout: float | None = None,
        readers: int = 1,
        ttl: float | None = None,
        overwrite: bool = False,
    ) -> PutHandle:
        """Start a put in a thread of the connector's and return its handle at once; parameters as for `put`.

        The payload's buffers must stay as they are until the handle is done.
        """
        put = partial(self.put, key, payload, timeout=timeout, readers=readers, ttl=ttl, overwrite=overwrite)
        with self._executor_lock:
            if self.closed:
                raise self._failed("put", ClosedError("the connector is closed"), key)
            if self._executor is None:
                self._executor = ThreadPoolExecutor(32, thread_name_prefix=f"omni-connector-put-{self.edge}")
            return PutHandle(self._executor.submit(put), lambda error: self._failed("put", error, key))

    def fail(self, key: Key | str, reason: str, *, timeout: float | None = None) -> None:
        """Tell the key's consumers, waiting now or later, that its payload will never come.

        They get `ProducerFailedError(reason)` within a second. A payload put before is dropped.
        """
        try:
            key = as_key(key)
            self._transport.fail(key, reason, deadline=self.deadline(timeout))
        except OmniConnectorError as error:
            raise self._failed("fail", error, key)  # noqa: B904

    # ---- get

    def get(
        self,
        key: Key | str,
        metadata: object = None,
        *,
        timeout: float | None = None,
        copy: bool = False,
        producer: Producer | None = None,
    ) -> Any:
        """Take a payload, waiting for it to the deadline.

        Parameters
        ----------
        metadata
            What the put returned, for the direct way; anything else means: find it by key.
        copy
            Return private memory. Without it tensors and arrays are views that keep the transport's memory until the last of
            them is garbage collected, also after `close`.
        producer
            Whose payload is meant, when several replicas or ranks may hold the key.

        Raises
        ------
        TransferTimeoutError, ProducerFailedError, RequestAbandonedError, PayloadExpiredError, PeerLostError,
        AmbiguousKeyError, IncompatibleMetadataError, DecodeError, InvalidKeyError, RoleError, BackendUnavailableError,
        ClosedError, ForkedError
        """
        start_s = time.perf_counter()
        try:
            key, where = self._find(key, metadata, producer)
            memory = self._transport.get(key, where, deadline=self.deadline(timeout))
            return self._decode(memory, start_s, copy)
        except OmniConnectorError as error:
            raise self._failed("get", error, key)  # noqa: B904

    def poll(
        self,
        key: Key | str,
        metadata: object = None,
        *,
        copy: bool = False,
        producer: Producer | None = None,
    ) -> Any | NotReady:
        """Take a payload if it is here now, else return `NOT_READY`; never blocks. Parameters as for `get`.

        A first poll may only ask for the payload and a later one find it. Who stops polling says so with `forget`.
        """
        start_s = time.perf_counter()
        try:
            key, where = self._find(key, metadata, producer)
            memory = self._transport.poll(key, where)
            return NOT_READY if memory is None else self._decode(memory, start_s, copy)
        except OmniConnectorError as error:
            raise self._failed("get", error, key)  # noqa: B904

    def get_into(
        self,
        key: Key | str,
        buffers: Sequence[Any],
        metadata: object = None,
        *,
        timeout: float | None = None,
        producer: Producer | None = None,
    ) -> int:
        """Move a payload's raw buffers (its tensors and arrays, in order) into the caller's memory, in order.

        The two lists are one stream of bytes each: piece boundaries may differ, the totals must not. Thousands of pieces are
        fine. Nothing is decoded.

        Parameters
        ----------
        buffers
            Writable, C-contiguous objects with the buffer protocol.

        Returns
        -------
        int
            Bytes written.

        Raises
        ------
        BufferMismatchError
            The totals differ; nothing was written.
        """
        start_s = time.perf_counter()
        try:
            key, where = self._find(key, metadata, producer)
            nbytes = self._transport.get_into(key, buffers, where, deadline=self.deadline(timeout))
        except OmniConnectorError as error:
            raise self._failed("get", error, key)  # noqa: B904
        self._metrics.get(nbytes, time.perf_counter() - start_s, 0.0)
        return nbytes

    def register(self, buffer: Any) -> None:
        """Prepare a buffer of the caller's for `get_into`, once; slices of it are then prepared too."""
        self._transport.register(buffer)

    def submit_get(
        self,
        key: Key | str,
        metadata: object = None,
        *,
        copy: bool = False,
        producer: Producer | None = None,
    ) -> GetHandle:
        """Start a get and return its handle at once; parameters as for `get`."""
        poll = partial(self.poll, key, metadata, copy=copy, producer=producer)
        handle = GetHandle(
            poll,
            lambda timeout: self.get(key, metadata, timeout=timeout, copy=copy, producer=producer),
            partial(self.forget, key, metadata, producer=producer),
        )
        handle.done()
        return handle

    def forget(self, key: Key | str, metadata: object = None, *, producer: Producer | None = None) -> None:
        """Drop the interest in a payload that polls left behind, so that it stays for whoever asks next."""
        key, where = self._find(key, metadata, producer)
        self._transport.forget(key, where)

    def exists(self, keys: Sequence[Key | str], *, producer: Producer | None = None) -> list[bool]:
        """Say for each key whether an unread payload is there; may say no of one that was only just put."""
        if isinstance(keys, str | Key):
            raise self._failed("exists", InvalidKeyError("exists takes a sequence of keys, and this is one"), keys)
        return self._transport.exists([as_key(key) for key in keys], Where(producer=producer))

    # ---- streams

    def writer(
        self,
        request_id: str,
        *,
        shard: str = "",
        window: int | None = None,
        readers: int = 1,
        timeout: float | None = None,
        ttl: float | None = None,
    ) -> StreamWriter:
        """Open the producer's end of a request's chunk stream.

        Parameters
        ----------
        shard
            Names one of several streams of the same request.
        window
            Chunks that may be unread before `write` waits; None: the option `stream_window`.
        readers, ttl
            As for `put`, of every chunk.
        timeout
            Seconds that each `write` may wait for the reader; None: the option `timeout_s`.
        """
        window = self._options.stream_window if window is None else window
        as_key(Key(request_id, 0, shard))
        return StreamWriter(self, request_id, shard=shard, window=window, readers=readers, timeout=timeout, ttl=ttl)

    def reader(
        self,
        request_id: str,
        *,
        shard: str = "",
        window: int | None = None,
        timeout: float | None = None,
        copy: bool = False,
        producer: Producer | None = None,
    ) -> StreamReader:
        """Open the consumer's end of a request's chunk stream; it may be opened before the writer.

        Parameters
        ----------
        timeout
            Seconds that each chunk may take to come; None: the option `timeout_s`.
        copy, producer
            As for `get`.
        """
        window = self._options.stream_window if window is None else window
        as_key(Key(request_id, 0, shard))
        return StreamReader(self, request_id, shard=shard, window=window, timeout=timeout, copy=copy, producer=producer)

    @property
    def aio(self) -> AsyncConnector:
        """The same connector for coroutines."""
        return AsyncConnector(self)

    # ---- both ends

    def cleanup(self, request_id: str, *, timeout: float | None = None) -> int:
        """Discard every payload of exactly this request, all chunks and shards, from either end; idempotent.

        Consumers waiting for one get `RequestAbandonedError`, and so does a later put. A producer discards its own, so that the
        request may be retried on another replica; a consumer discards every producer's.

        Returns
        -------
        int
            How many unread payloads were discarded.
        """
        key = as_key(request_id)
        try:
            return self._transport.cleanup(key.request_id, deadline=self.deadline(timeout))
        except OmniConnectorError as error:
            raise self._failed("cleanup", error, key)  # noqa: B904

    def health(self, *, timeout: float = 5.0) -> Health:
        """Probe the backend for real, within `timeout` seconds, and report."""
        return self._transport.health(deadline=Deadline(timeout))

    def stats(self) -> dict[str, Any]:
        """Return the counters (see `omni_connector_core.metrics.Metrics.as_dict`)."""
        return self._metrics.as_dict()

    def close(self) -> None:
        """Free everything; idempotent. Views that were handed out stay valid."""
        self._transport.close()
        with self._executor_lock:
            if self._executor is not None:
                self._executor.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> OmniConnector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def deadline(self, timeout: float | None) -> Deadline:
        """Return the deadline of a call with that timeout in seconds; None: the option `timeout_s`."""
        return Deadline(self._options.timeout_s if timeout is None else timeout)

    # ---- inside

    def _find(self, key: Key | str, metadata: object, producer: Producer | None) -> tuple[Key, Where]:
        context = self._context
        key = as_key(key)
        return key, read_metadata(metadata, transport=context.backend, edge=context.edge, key=key, producer=producer)

    def _decode(self, memory: Memory, start_s: float, copy: bool) -> Any:
        here_s = time.perf_counter()
        nbytes = memory.nbytes if isinstance(memory, memoryview) else len(memory)
        payload = self._codec.decode(memory, copy=copy)
        self._metrics.get(nbytes, here_s - start_s, time.perf_counter() - here_s)
        return payload

    def _failed(self, operation: str, error: OmniConnectorError, key: Key | str) -> OmniConnectorError:
        known = key if isinstance(key, Key) else None
        locate(error, key=known, edge=self.edge, backend=self.backend)
        if error.key is None:
            error.key = repr(key)
        self._metrics.failed(operation, error.code)
        return error
