"""The same connector for coroutines: nothing here blocks the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import OmniConnectorError, TransferTimeoutError
from omni_connector_core.handles import NOT_READY
from omni_connector_core.key import Key, Producer
from omni_connector_core.metadata import Metadata
from omni_connector_core.streams import StreamReader, StreamWriter
from omni_connector_core.transport import FIRST_PAUSE_S, LONGEST_PAUSE_S

if TYPE_CHECKING:
    from omni_connector_core.connector import OmniConnector

__all__ = ["AsyncConnector", "AsyncStreamReader", "AsyncStreamWriter"]


class AsyncConnector:
    """`OmniConnector` for coroutines; made by `OmniConnector.aio`. Parameters and errors as there.

    A get polls between other tasks, with a pause that grows from 50 us to 5 ms; a put runs in a thread of the connector's.
    """

    def __init__(self, connector: OmniConnector) -> None:
        self._connector = connector

    async def put(self, key: Key | str, payload: Any, **options: Any) -> Metadata:
        """Put a payload; its buffers must stay as they are until this returns. Keywords as for `OmniConnector.put`."""
        return await asyncio.wrap_future(self._connector.submit_put(key, payload, **options).future)

    async def get(
        self,
        key: Key | str,
        metadata: object = None,
        *,
        timeout: float | None = None,
        copy: bool = False,
        producer: Producer | None = None,
    ) -> Any:
        """Take a payload, waiting for it to the deadline; cancelling leaves it for whoever asks next."""
        connector = self._connector
        deadline = connector.deadline(timeout)
        pause_s = FIRST_PAUSE_S
        try:
            while (payload := connector.poll(key, metadata, copy=copy, producer=producer)) is NOT_READY:
                if deadline.expired():
                    raise TransferTimeoutError(
                        f"not there after {deadline.timeout_s:g} s",
                        key=key,
                        edge=connector.edge,
                        backend=connector.backend,
                    )
                await asyncio.sleep(min(pause_s, deadline.remaining_s()))
                pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
        except (TransferTimeoutError, asyncio.CancelledError):
            connector.forget(key, metadata, producer=producer)
            raise
        return payload

    async def cleanup(self, request_id: str, **options: Any) -> int:
        """Discard every payload of a request, from either end."""
        return await asyncio.to_thread(partial(self._connector.cleanup, request_id, **options))

    def writer(self, request_id: str, **options: Any) -> AsyncStreamWriter:
        """Open the producer's end of a stream; keywords as for `OmniConnector.writer`."""
        return AsyncStreamWriter(self._connector, self._connector.writer(request_id, **options), options.get("timeout"))

    def reader(self, request_id: str, **options: Any) -> AsyncStreamReader:
        """Open the consumer's end of a stream; keywords as for `OmniConnector.reader`."""
        return AsyncStreamReader(self, self._connector.reader(request_id, **options), options)


class AsyncStreamWriter:
    """`StreamWriter` for a coroutine."""

    def __init__(self, connector: OmniConnector, writer: StreamWriter, timeout: float | None) -> None:
        self._connector, self._writer, self._timeout = connector, writer, timeout

    async def write(self, chunk: Any, *, last: bool = False) -> None:
        """Write the next chunk, waiting for credit and room without blocking the loop."""
        await self._credit()
        await asyncio.to_thread(partial(self._writer.write, chunk, last=last))

    async def end(self) -> None:
        """End the stream; idempotent."""
        if not self._writer.ended:
            await self._credit()
            await asyncio.to_thread(self._writer.end)

    async def fail(self, reason: str) -> None:
        """End the stream with a failure."""
        await asyncio.to_thread(self._writer.fail, reason)

    async def _credit(self) -> None:
        deadline = self._connector.deadline(self._timeout)
        pause_s = FIRST_PAUSE_S
        while not self._writer.has_credit(Deadline(0)):
            if deadline.expired():
                self._writer.take_credit(deadline)
            await asyncio.sleep(min(pause_s, deadline.remaining_s()))
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.end()
        elif not self._connector.closed:
            await self.fail(f"{type(error).__name__}: {error}")


class AsyncStreamReader:
    """`StreamReader` for a coroutine: ``async for chunk in reader``."""

    def __init__(self, connector: AsyncConnector, reader: StreamReader, options: dict[str, Any]) -> None:
        self._connector, self._reader = connector, reader
        self._options = {name: options[name] for name in ("timeout", "copy", "producer") if name in options}

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._reader.ended:
            raise StopAsyncIteration
        try:
            message = await self._connector.get(self._reader.expect(), **self._options)
        except OmniConnectorError as error:
            self._reader.failed(error)
            raise
        try:
            return self._reader.accept(message)
        except StopIteration:
            raise StopAsyncIteration from None

    async def close(self) -> None:
        """Abandon the stream unless it is over; idempotent."""
        await asyncio.to_thread(self._reader.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
