"""Any interleaving of several streams' writers, readers, failures and aborts does what a naive model says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from omni_connector_core import OmniConnector, create_connector
from omni_connector_core.errors import (
    ClosedError,
    OmniConnectorError,
    PayloadConflictError,
    PeerLostError,
    ProducerFailedError,
    RequestAbandonedError,
    TransferTimeoutError,
)
from omni_connector_core.streams import StreamReader, StreamWriter

END = object()
NUMBERS = st.integers(0, 3)
_runs = itertools.count()


@dataclass
class Stream:
    """What is known of a stream: the messages that were sent, and how far each reader is."""

    request_id: str
    shard: str
    window: int
    writer: StreamWriter
    readers: list[StreamReader]
    abandoned: set[str]
    sent: list[Any] = field(default_factory=list)
    state: str = "open"
    intruder: StreamWriter | None = None
    foreign: dict[int, set[int]] = field(default_factory=dict)
    """The intruder's chunks by their number, with the readers that have not taken them."""

    def __post_init__(self) -> None:
        self.at = [0] * len(self.readers)
        self.over = [False] * len(self.readers)
        self.credits = self.window

    @property
    def aborted(self) -> bool:
        return self.request_id in self.abandoned

    @property
    def unread(self) -> int:
        return 0 if self.aborted else len(self.sent) - min(self.at)

    @property
    def pending(self) -> int:
        return 0 if self.aborted else self.unread + len(self.foreign)

    def live(self, chunk: int) -> bool:
        """Whether somebody's chunk of that number waits to be read."""
        return chunk in self.foreign or chunk in range(min(self.at), len(self.sent))

    def may_write(self) -> bool:
        """Whether the writer has credit; it comes back by the half window, when all of the oldest half was read."""
        half = max(self.window // 2, 1)
        if not self.credits and not self.live(len(self.sent) - self.window + half - 1):
            self.credits = half
        return self.credits > 0


class Streams(RuleBasedStateMachine):
    """Opens, writes, reads and breaks streams over one connector; nothing ever waits."""

    def __init__(self) -> None:
        super().__init__()
        self.conn: OmniConnector = create_connector("memory", namespace=f"streams-model-{next(_runs)}")
        self.abandoned: set[str] = set()
        self.all: list[Stream] = []
        self.values = itertools.count()

    def teardown(self) -> None:
        self.conn.close()

    @rule(request=st.integers(0, 5), window=st.integers(1, 5), readers=st.integers(1, 2))
    def open(self, request: int, window: int, readers: int) -> None:
        if sum(stream.state == "open" and not stream.aborted for stream in self.all) == 3:
            return
        request_id, shard = f"r{request}", str(len(self.all))
        writer = self.conn.writer(request_id, shard=shard, window=window, readers=readers, timeout=0)
        reading = [self.conn.reader(request_id, shard=shard, window=6 - window, timeout=0) for _ in range(readers)]
        self.all.append(Stream(request_id, shard, window, writer, reading, self.abandoned))

    def stream(self, which: int) -> Stream:
        """One of the youngest streams."""
        if not self.all:
            self.open(0, 4, 1)
        return self.all[-1 - which % len(self.all)]

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
                assert not stream.may_write()
            except PayloadConflictError:
                assert len(stream.sent) in stream.foreign
            else:
                assert stream.may_write()
                assert len(stream.sent) not in stream.foreign
                stream.credits -= 1
                stream.sent.append(message)

    @rule(number=NUMBERS, count=st.integers(1, 12))
    def flow(self, number: int, count: int) -> None:
        """Let every chunk be read as soon as it is written."""
        stream = self.stream(number)
        for _ in range(count):
            self.write_one(stream, last=False)
            for which in range(len(stream.readers)):
                self.read_one(stream, which)

    @rule(number=NUMBERS, count=st.integers(1, 8))
    def write(self, number: int, count: int) -> None:
        for _ in range(count):
            self.write_one(self.stream(number), last=False)

    def write_one(self, stream: Stream, *, last: bool) -> None:
        value, before = next(self.values), len(stream.sent)
        self.send(stream, value, lambda: stream.writer.write(value, last=last))
        if last and len(stream.sent) > before:
            stream.state = "last"

    @rule(number=NUMBERS)
    def intrude(self, number: int) -> None:
        """Let the writer's successor, which was started again, write the stream from its first chunk to one beyond the last."""
        stream = self.stream(number)
        if stream.intruder is None:
            if stream.aborted or stream.state != "open" or not min(stream.at):
                return
            stream.intruder = self.conn.writer(
                stream.request_id, shard=stream.shard, window=1000, readers=len(stream.readers), timeout=0
            )
        while (chunk := stream.intruder.written) <= len(stream.sent):
            if stream.aborted:
                with pytest.raises(RequestAbandonedError):
                    stream.intruder.write("intruder")
                break
            if chunk in range(min(stream.at), len(stream.sent)):
                with pytest.raises(PayloadConflictError):
                    stream.intruder.write("intruder")
                break
            stream.intruder.write("intruder")
            stream.foreign[chunk] = set(range(len(stream.readers)))

    @rule(number=NUMBERS, how=st.sampled_from(["last", "end", "fail", "leave", "cleanup"]), which=st.integers(0, 1))
    def finish(self, number: int, how: str, which: int) -> None:
        """Do one of the things that end a stream; rarer than the others, so that most come further than their first chunks."""
        stream = self.stream(number)
        match how:
            case "last":
                self.write_one(stream, last=True)
            case "leave":
                self.leave(stream, which % len(stream.readers))
            case _:
                getattr(self, how)(stream)

    def end(self, stream: Stream) -> None:
        before = len(stream.sent)
        self.send(stream, END, stream.writer.end)
        if len(stream.sent) > before:
            stream.state = "ended"

    def fail(self, stream: Stream) -> None:
        if stream.intruder is not None:  # a failure would take the intruder's chunk with it
            return
        stream.writer.fail("no more")
        if stream.state == "open":
            stream.state = "failed"

    @rule(number=NUMBERS, which=st.integers(0, 1), count=st.integers(1, 6))
    def read(self, number: int, which: int, count: int) -> None:
        stream = self.stream(number)
        for _ in range(count):
            self.read_one(stream, which % len(stream.readers))

    def read_one(self, stream: Stream, which: int) -> None:
        reader, at = stream.readers[which], stream.at[which]
        if stream.over[which]:
            with pytest.raises(StopIteration):
                next(reader)
        elif stream.aborted:
            failed = (ProducerFailedError,) if stream.state == "failed" else ()
            with pytest.raises((RequestAbandonedError, *failed)):
                next(reader)
            stream.over[which] = True
        elif at in stream.foreign:
            with pytest.raises(PeerLostError, match="another writer"):
                next(reader)
            stream.over[which] = True
            stream.foreign[at].remove(which)
            if not stream.foreign[at]:
                del stream.foreign[at]
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

    def leave(self, stream: Stream, which: int) -> None:
        stream.readers[which].close()
        if not stream.over[which]:
            self.abandoned.add(stream.request_id)
            stream.over[which] = True

    def cleanup(self, stream: Stream) -> None:
        request_id = stream.request_id
        held = sum(stream.pending for stream in self.all if stream.request_id == request_id)
        assert self.conn.cleanup(request_id) == held
        self.abandoned.add(request_id)

    @invariant()
    def nothing_is_pending_but_what_is_unread(self) -> None:
        stats = self.conn.stats()
        assert stats["pending"] == sum(stream.pending for stream in self.all)
        assert (stats["bytes_held"] == 0) == (stats["pending"] == 0)


SETTINGS = settings(max_examples=60, stateful_step_count=60, deadline=None)
Streams.TestCase.settings = SETTINGS
TestStreamsModel = Streams.TestCase


# ---- what the model must find


def end_before_the_last_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is a message of its own, and goes before the last chunk."""
    write = StreamWriter.write

    def wrong(self: StreamWriter, chunk: Any, *, last: bool = False, **more: Any) -> None:
        if last:
            self.end()
            self._ended, self._next = False, self._next + 1
        write(self, chunk, last=last, **more)

    monkeypatch.setattr(StreamWriter, "write", wrong)


def end_torn_from_the_last_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk and the end are two messages."""
    write = StreamWriter.write

    def wrong(self: StreamWriter, chunk: Any, *, last: bool = False, **more: Any) -> None:
        write(self, chunk, **more)
        if last:
            self.end()

    monkeypatch.setattr(StreamWriter, "write", wrong)


def credits_leaked_on_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams share sixteen credits, which come back with what is read, and not when a stream is aborted."""
    put = StreamWriter._put
    out: dict[Any, dict[StreamWriter, int]] = {}

    def wrong(self: StreamWriter, mark: int, chunk: Any, timeout: float | None) -> None:
        mine = out.setdefault(self._connector, {})
        for writer in mine:
            while mine[writer] and self._connector.transport.consumed(
                writer._key(writer.written - mine[writer]), deadline=self._connector.deadline(0)
            ):
                mine[writer] -= 1
        if sum(mine.values()) >= 16:
            raise TransferTimeoutError("no credit")
        put(self, mark, chunk, timeout)
        mine[self] = mine.get(self, 0) + 1

    monkeypatch.setattr(StreamWriter, "_put", wrong)


def a_credit_lost_with_a_refused_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """A put that fails takes its credit with it."""
    put = StreamWriter._put

    def wrong(self: StreamWriter, *args: Any) -> None:
        try:
            put(self, *args)
        except PayloadConflictError:
            self._credits -= 1
            raise

    monkeypatch.setattr(StreamWriter, "_put", wrong)


def a_window_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer may be one chunk further ahead than its window."""
    make = StreamWriter.__init__

    def wrong(self: StreamWriter, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self._credits += 1

    monkeypatch.setattr(StreamWriter, "__init__", wrong)


def a_window_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer stops one chunk before its window is full."""
    make = StreamWriter.__init__

    def wrong(self: StreamWriter, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self._credits = max(self._credits - 1, 1)

    monkeypatch.setattr(StreamWriter, "__init__", wrong)


def credits_for_the_chunk_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a window of credits comes back one chunk too early."""
    has_credit = StreamWriter.has_credit

    def wrong(self: StreamWriter, deadline: Any) -> bool:
        key = self._key
        self._key = lambda chunk: key(max(chunk - 1, 0))  # type: ignore[method-assign]
        try:
            return has_credit(self, deadline)
        finally:
            del self._key

    monkeypatch.setattr(StreamWriter, "has_credit", wrong)


def a_chunk_delivered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader gives the fifth chunk once more."""
    following = StreamReader.__next__

    def wrong(self: StreamReader) -> Any:
        kept = vars(self).pop("kept", None)
        if kept is not None:
            return kept
        chunk = following(self)
        if self.read == 5:
            vars(self)["kept"] = chunk
        return chunk

    monkeypatch.setattr(StreamReader, "__next__", wrong)


def any_writers_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader does not look at who wrote a chunk."""
    accept = StreamReader.accept

    def wrong(self: StreamReader, message: Any) -> Any:
        self._writer = None
        return accept(self, message)

    monkeypatch.setattr(StreamReader, "accept", wrong)


def a_failure_takes_the_last_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is told under the key of the chunk before."""

    def wrong(self: StreamWriter, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._connector.fail(self._key(max(self._next - 1, 0)), reason)

    monkeypatch.setattr(StreamWriter, "fail", wrong)


def a_reader_leaves_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that leaves before the end tells nobody."""
    monkeypatch.setattr(StreamReader, "close", StreamReader._finish)


MUTANTS = [
    end_before_the_last_chunk,
    end_torn_from_the_last_chunk,
    credits_leaked_on_abort,
    a_credit_lost_with_a_refused_put,
    a_window_too_large,
    a_window_too_small,
    credits_for_the_chunk_before,
    a_chunk_delivered_twice,
    any_writers_chunks,
    a_failure_takes_the_last_chunk,
    a_reader_leaves_quietly,
]
SEARCH = settings(
    SETTINGS, max_examples=500, phases=[Phase.generate], derandomize=True, database=None, report_multiple_bugs=False
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_model_finds(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception, OmniConnectorError, StopIteration)):
        run_state_machine_as_test(Streams, settings=SEARCH)
