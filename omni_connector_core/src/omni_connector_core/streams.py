"""Chunk streams: what one request makes bit by bit, in order, exactly once, with bounded memory.

Chunk number n of a stream is an ordinary payload under ``Key(request_id, n, shard)``: a list of a mark and the chunk. The end of
the stream is the mark ``LAST`` on the last chunk, or a message of its own, ``END``, when the writer did not know which would be the
last; either way data and end are never torn apart, and an empty stream is one ``END``. The mark also names the writer, so that
a reader never takes a chunk of another one (a second replica, the same one restarted) for the next of its stream.

Back-pressure is by credits: a writer waits when a whole window of its chunks is untaken. It asks for credit once per half window,
and the reader announces its interest half a window at a time, so that neither adds a message per chunk. What was announced
counts as taken; so the producer holds at most the writer's window and three quarters of the reader's.

Per chunk: one put and one get, with their copies (shared memory: one), and a quarter of an announcement at the window of 8
and less above; nothing else (held by a test).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import (
    ClosedError,
    DecodeError,
    OmniConnectorError,
    PeerLostError,
    ProducerFailedError,
    TransferTimeoutError,
    locate,
)
from omni_connector_core.key import Key, Producer
from omni_connector_core.metadata import Where

if TYPE_CHECKING:
    from omni_connector_core.connector import OmniConnector

__all__ = ["StreamReader", "StreamWriter"]

MARKS = MORE, LAST, END = range(3)
WRITER_BITS = 60


class StreamWriter:
    """The producer's end of one stream; made by `OmniConnector.writer`.

    As a context manager it ends the stream on the way out, or fails it when an exception leaves the block.

    Not to be shared between threads.
    """

    def __init__(
        self,
        connector: OmniConnector,
        request_id: str,
        *,
        shard: str = "",
        window: int,
        readers: int = 1,
        timeout: float | None = None,
        ttl: float | None = None,
    ) -> None:
        self._connector = connector
        self._request_id, self._shard = request_id, shard
        self._half = max(window // 2, 1)
        self._window = max(window, self._half)
        self._credits = self._window
        self._short_since_s = 0.0
        self._readers, self._timeout, self._ttl = readers, timeout, ttl
        self._marks = secrets.randbits(WRITER_BITS) * len(MARKS)
        self._next = 0
        self._ended = False

    @property
    def written(self) -> int:
        """How many chunks were written."""
        return self._next

    @property
    def ended(self) -> bool:
        """Whether the stream was ended or failed."""
        return self._ended

    def write(self, chunk: Any, *, last: bool = False, timeout: float | None = None) -> None:
        """Write the next chunk, waiting for credit and for room.

        Parameters
        ----------
        last
            End the stream with this chunk, in one message.
        timeout
            Seconds to wait; None: what the writer was made with.

        Raises
        ------
        TransferTimeoutError
            The reader takes nothing; the chunk was not written, and may be again.
        RequestAbandonedError
            The reader abandoned the stream, or the request was cleaned up.
        ClosedError
            The stream has ended.
        """
        self._put(LAST if last else MORE, chunk, timeout)
        self._next += 1
        self._ended = last

    def end(self, *, timeout: float | None = None) -> None:
        """End the stream after what was written; idempotent. Raises as `write` does."""
        if not self._ended:
            self._put(END, None, timeout)
            self._ended = True

    def fail(self, reason: str) -> None:
        """End the stream with a failure: the reader gets what was written, then `ProducerFailedError(reason)`."""
        if not self._ended:
            self._ended = True
            self._connector.fail(self._key(self._next), reason)

    def _put(self, mark: int, chunk: Any, timeout: float | None) -> None:
        if self._ended:
            raise ClosedError("the stream has ended", key=self._key(self._next), hint="Open a writer for a new request")
        timeout = self._timeout if timeout is None else timeout
        if not self._credits:
            deadline = self._connector.deadline(timeout)
            self.take_credit(deadline)
            timeout = deadline.remaining_s()
        message = [self._marks + mark, chunk]
        self._connector.put(self._key(self._next), message, timeout=timeout, readers=self._readers, ttl=self._ttl)
        self._credits -= 1

    def take_credit(self, deadline: Deadline) -> None:
        """Wait until one more chunk may be written.

        Raises
        ------
        TransferTimeoutError
            The reader has not taken half a window of chunks by the deadline.
        """
        if not self.has_credit(deadline):
            error = TransferTimeoutError(
                f"the reader has {self._window} unread chunks and took none in {deadline.timeout_s:g} s",
                key=self._key(self._next),
                edge=self._connector.edge,
                backend=self._connector.backend,
                hint="The consumer is slow or gone; raise stream_window to let the producer run further ahead",
            )
            self._connector.metrics.failed("write", error.code)
            raise error

    def has_credit(self, deadline: Deadline) -> bool:
        """Wait until one more chunk may be written; False at the deadline."""
        if self._credits:
            return True
        if not self._short_since_s:
            self._short_since_s = time.monotonic()
        # readers take chunks in order, so the youngest of the oldest half window speaks for all of them
        youngest = self._key(self._next - self._window + self._half - 1)
        if not self._connector.transport.consumed(youngest, deadline=deadline):
            return False
        self._connector.metrics.credit(time.monotonic() - self._short_since_s)
        self._short_since_s = 0.0
        self._credits = self._half
        return True

    def _key(self, chunk: int) -> Key:
        return Key(self._request_id, chunk, self._shard)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
        elif not self._connector.closed:
            self.fail(f"{type(error).__name__}: {error}")


class StreamReader:
    """The consumer's end of one stream: an iterator over its chunks; made by `OmniConnector.reader`.

    As a context manager it abandons the stream when it is left before the end: the request is cleaned up on this edge, unread
    chunks are discarded, and the writer's next `write` raises `RequestAbandonedError`.

    Not to be shared between threads.
    """

    def __init__(
        self,
        connector: OmniConnector,
        request_id: str,
        *,
        shard: str = "",
        window: int,
        timeout: float | None = None,
        copy: bool = False,
        producer: Producer | None = None,
    ) -> None:
        self._connector = connector
        self._request_id, self._shard = request_id, shard
        self._half = max(window // 2, 1)
        self._timeout, self._copy, self._producer = timeout, copy, producer
        self._where = Where(producer=producer)
        self._writer: int | None = None
        self._next = 0
        self._expected = 0
        self._ended = False

    @property
    def read(self) -> int:
        """How many chunks were read."""
        return self._next

    @property
    def ended(self) -> bool:
        """Whether the stream is over: read to its end, failed, or abandoned."""
        return self._ended

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        try:
            message = self._connector.get(
                self.expect(), timeout=self._timeout, copy=self._copy, producer=self._producer
            )
        except OmniConnectorError as error:
            self.failed(error)
            raise
        return self.accept(message)

    def failed(self, error: OmniConnectorError) -> None:
        """End the reader because a get failed; after a timeout the chunk may still come, so iterate on."""
        if not isinstance(error, TransferTimeoutError):
            self._finish()
        if isinstance(error, ProducerFailedError):
            error.hint = f"{self._next} chunks came before"

    def expect(self) -> Key:
        """Announce the interest in the next chunks, when due; returns the key of the next."""
        if self._expected <= self._next + self._half // 2:
            keys = [self._key(self._expected + n) for n in range(self._half)]
            self._connector.transport.expect(keys, self._where)
            self._expected += self._half
        return self._key(self._next)

    def accept(self, message: Any) -> Any:
        """Take the next message apart.

        Raises
        ------
        StopIteration
            It is the end.
        DecodeError
            It is not a chunk of a stream.
        PeerLostError
            It is a chunk of another writer than the one before.
        """
        if not (type(message) is list and len(message) == 2 and type(message[0]) is int):
            self._finish()
            raise self._located(
                DecodeError(
                    "the payload is not a chunk of a stream",
                    hint="Write it with connector.writer(request_id), or read it with connector.get(key)",
                )
            )
        (writer, mark), chunk = divmod(message[0], len(MARKS)), message[1]
        if self._writer is None:
            self._writer = writer
        elif writer != self._writer:
            self._finish()
            raise self._located(
                PeerLostError(
                    f"chunk {self._next} is of another writer than those before",
                    hint="The writer was restarted, or two replicas write the request: read one, with producer=",
                )
            )
        if mark == END:
            self._finish()
            raise StopIteration
        self._next += 1
        if mark == LAST:
            self._finish()
        return chunk

    def _located(self, error: OmniConnectorError) -> OmniConnectorError:
        connector = self._connector
        locate(error, key=self._key(self._next), edge=connector.edge, backend=connector.backend)
        return error

    def close(self) -> None:
        """Abandon the stream unless it is over; idempotent."""
        if not self._ended:
            self._finish()
            if not self._connector.closed:
                self._connector.cleanup(self._request_id)

    def _finish(self) -> None:
        self._ended = True
        if not self._connector.closed:
            for chunk in range(self._next, self._expected):
                self._connector.transport.forget(self._key(chunk), self._where)

    def _key(self, chunk: int) -> Key:
        return Key(self._request_id, chunk, self._shard)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
