"""Any interleaving of several streams' writers, readers, failures and aborts does what a naive model says."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from omni_connector_core import OmniConnector, create_connector
from omni_connector_core.errors import (
    ClosedError,
    ProducerFailedError,
    RequestAbandonedError,
    TransferTimeoutError,
)
from omni_connector_core.streams import StreamReader, StreamWriter

END = object()
_runs = itertools.count()


@dataclass
class Stream:
    """What is known of a stream: the messages that were sent, and how far each reader is."""

    request_id: str
    window: int
    writer: StreamWriter
    readers: list[StreamReader]
    abandoned: set[str]
    sent: list[Any] = field(default_factory=list)
    state: str = "open"

    def __post_init__(self) -> None:
        self.at = [0] * len(self.readers)
        self.over = [False] * len(self.readers)

    @property
    def aborted(self) -> bool:
        return self.request_id in self.abandoned

    @property
    def unread(self) -> int:
        return 0 if self.aborted else len(self.sent) - min(self.at)

    def may_write(self, wrote: bool) -> bool:
        """Whether a write may succeed (or fail for want of credit); credits come back by the half window."""
        half = max(self.window // 2, 1)
        return self.unread < self.window if wrote else self.unread + half > self.window


class Streams(RuleBasedStateMachine):
    """Opens, writes, reads and breaks streams over one connector; nothing ever waits."""

    streams = Bundle("streams")

    def __init__(self) -> None:
        super().__init__()
        self.conn: OmniConnector = create_connector("memory", namespace=f"streams-model-{next(_runs)}")
        self.abandoned: set[str] = set()
        self.all: list[Stream] = []
        self.values = itertools.count()

    def teardown(self) -> None:
        self.conn.close()

    @rule(target=streams, request=st.integers(0, 2), window=st.integers(1, 5), readers=st.integers(1, 2))
    def open(self, request: int, window: int, readers: int) -> Any:
        if len(self.all) == 6:
            return multiple()
        request_id, shard = f"r{request}", str(len(self.all))
        writer = self.conn.writer(request_id, shard=shard, window=window, readers=readers, timeout=0)
        reading = [self.conn.reader(request_id, shard=shard, window=6 - window, timeout=0) for _ in range(readers)]
        stream = Stream(request_id, window, writer, reading, self.abandoned)
        self.all.append(stream)
        return stream

    def send(self, stream: Stream, message: Any, act: Any) -> None:
        """Let the writer send a message, and check that it could."""
        if stream.state != "open":
            if message is END:  # harmless
                act()
            else:
                with pytest.raises(ClosedError):
                    act()
        elif stream.aborted:
            with pytest.raises(RequestAbandonedError):
                act()
        else:
            try:
                act()
            except TransferTimeoutError:
                assert stream.may_write(wrote=False)
            else:
                assert stream.may_write(wrote=True)
                stream.sent.append(message)

    @rule(stream=streams, last=st.booleans())
    def write(self, stream: Stream, last: bool) -> None:
        value, before = next(self.values), len(stream.sent)
        self.send(stream, value, lambda: stream.writer.write(value, last=last))
        if last and len(stream.sent) > before:
            stream.state = "last"

    @rule(stream=streams)
    def end(self, stream: Stream) -> None:
        before = len(stream.sent)
        self.send(stream, END, stream.writer.end)
        if len(stream.sent) > before:
            stream.state = "ended"

    @rule(stream=streams)
    def fail(self, stream: Stream) -> None:
        stream.writer.fail("no more")
        if stream.state == "open":
            stream.state = "failed"

    @rule(stream=streams, which=st.integers(0, 1))
    def read(self, stream: Stream, which: int) -> None:
        which %= len(stream.readers)
        reader, at = stream.readers[which], stream.at[which]
        if stream.over[which]:
            with pytest.raises(StopIteration):
                next(reader)
        elif stream.aborted:
            failed = (ProducerFailedError,) if stream.state == "failed" else ()
            with pytest.raises((RequestAbandonedError, *failed)):
                next(reader)
            stream.over[which] = True
        elif at < len(stream.sent):
            stream.at[which] += 1
            stream.over[which] = stream.state in ("last", "ended") and at + 1 == len(stream.sent)
            if stream.sent[at] is END:
                with pytest.raises(StopIteration):
                    next(reader)
            else:
                assert next(reader) == stream.sent[at]
        elif stream.state == "failed":
            with pytest.raises(ProducerFailedError, match="no more"):
                next(reader)
            stream.over[which] = True
        else:
            with pytest.raises(TransferTimeoutError):
                next(reader)

    @rule(stream=streams, which=st.integers(0, 1))
    def leave(self, stream: Stream, which: int) -> None:
        which %= len(stream.readers)
        stream.readers[which].close()
        if not stream.over[which]:
            self.abandoned.add(stream.request_id)
            stream.over[which] = True

    @rule(request=st.integers(0, 2))
    def cleanup(self, request: int) -> None:
        held = sum(stream.unread for stream in self.all if stream.request_id == f"r{request}")
        assert self.conn.cleanup(f"r{request}") == held
        self.abandoned.add(f"r{request}")

    @invariant()
    def nothing_is_pending_but_what_is_unread(self) -> None:
        stats = self.conn.stats()
        assert stats["pending"] == sum(stream.unread for stream in self.all)
        assert (stats["bytes_held"] == 0) == (stats["pending"] == 0)


Streams.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestStreamsModel = Streams.TestCase
