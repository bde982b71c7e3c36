"""Mutants that spoil bytes, reads or the payload that is meant."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from omni_connector_contract_tests.mutants.registry import caught_by
from omni_connector_core import Deadline, Edge, Key, OmniConnectorError, PayloadConflictError, TransportContext
from omni_connector_core.frame import Frame
from omni_connector_core.memory.transport import MemoryTransport
from omni_connector_core.metadata import Where
from omni_connector_core.transport import Memory

caught = functools.partial(caught_by, options="omni_connector_core.memory.transport:MemoryOptions")

LARGE = 64 * 1024


class _Spoils(MemoryTransport):
    """Changes the bytes of every payload on its way out."""

    def spoil(self, raw: bytearray) -> bytearray:
        """Return what the consumer gets instead."""
        raise NotImplementedError

    def _take_claim(self, key: Key, where: Where) -> Memory | None:
        memory = super()._take_claim(key, where)
        if memory is None:
            return None
        raw = self.spoil(bytearray(memory))
        return (ctypes.c_char * len(raw)).from_buffer_copy(raw)


@caught("TestTransfer::test_a_payload_of_any_size_arrives_whole")
class DropsTheLastChunk(_Spoils):
    """The last kilobyte of a large payload stays zero."""

    def spoil(self, raw: bytearray) -> bytearray:
        """Zero the end."""
        if len(raw) > LARGE:
            raw[-1024:] = bytes(1024)
        return raw


@caught("TestTransfer::test_a_payload_of_any_size_arrives_whole")
class Truncates(_Spoils):
    """A payload of more than a megabyte is cut."""

    def spoil(self, raw: bytearray) -> bytearray:
        """Cut it."""
        return raw[: 2**20]


@caught("TestTransfer::test_a_large_payload_of_any_kind_arrives_whole")
class SwapsBytesOfLargePayloads(_Spoils):
    """Large payloads arrive with pairs of bytes swapped."""

    def spoil(self, raw: bytearray) -> bytearray:
        """Swap behind the head."""
        if len(raw) > LARGE:
            middle = len(raw) // 2 & ~1
            raw[middle::2], raw[middle + 1 :: 2] = raw[middle + 1 :: 2], raw[middle::2]
        return raw


@caught("TestTransfer::test_a_payload_keeps_value_and_type[none]")
class TreatsEmptyAsAbsent(MemoryTransport):
    """A payload without raw data counts as not there."""

    def _take_claim(self, key: Key, where: Where) -> Memory | None:
        memory = super()._take_claim(key, where)
        return None if memory is not None and len(memory) <= 128 else memory


@caught("TestTransfer::test_the_caller_may_reuse_its_buffers_after_put")
class KeepsTheCallersBuffers(MemoryTransport):
    """`put` copies nothing; the bytes are fetched from the caller's buffers at the read."""

    frames: ClassVar[dict[tuple[str, Key], Frame]] = {}

    def _put(self, key: Key, frame: Frame, **options: Any) -> dict[str, Any]:
        self.frames[self.context.namespace, key] = frame
        return super()._put(key, frame, **options)

    def _take_claim(self, key: Key, where: Where) -> Memory | None:
        memory = super()._take_claim(key, where)
        if memory is not None:
            self.frames.pop((self.context.namespace, key)).write_into(memory)
        return memory


@caught("TestTransfer::test_many_payloads_do_not_mix")
class FreesBeforeTheRead(MemoryTransport):
    """The memory of an unread payload is given to the next put of that size or less."""

    arena = bytearray(2**20)

    def _put(self, key: Key, frame: Frame, **options: Any) -> dict[str, Any]:
        if frame.nbytes <= len(self.arena):
            frame.write_into(self.arena)
        return super()._put(key, frame, **options)

    def _take_claim(self, key: Key, where: Where) -> Memory | None:
        memory = super()._take_claim(key, where)
        if memory is not None and len(memory) <= len(self.arena):
            memory[:] = bytes(self.arena[: len(memory)])
        return memory


@caught("TestTransfer::test_put_returns_when_the_payload_can_be_fetched")
class PutReturnsTooEarly(MemoryTransport):
    """`put` hands the bytes to a thread and returns."""

    def _put(self, key: Key, frame: Frame, **options: Any) -> dict[str, Any]:
        threading.Timer(0.03, functools.partial(self._late, key, frame, options)).start()
        return {}

    def _late(self, key: Key, frame: Frame, options: dict[str, Any]) -> None:
        super()._put(key, frame, **options)


@caught("TestReplacing::test_overwrite_found_by_key_gives_the_new_value")
class OverwriteKeepsTheOldValue(MemoryTransport):
    """`put(overwrite=True)` of a live key succeeds and changes nothing."""

    def _put(self, key: Key, frame: Frame, *, overwrite: bool, **options: Any) -> dict[str, Any]:
        try:
            return super()._put(key, frame, overwrite=False, **options)
        except PayloadConflictError:
            if overwrite:
                return {}
            raise


@caught("TestReplacing::test_putting_a_live_key_is_a_conflict")
class IgnoresConflicts(MemoryTransport):
    """Every put overwrites."""

    def _put(self, key: Key, frame: Frame, *, overwrite: bool, **options: Any) -> dict[str, Any]:
        return super()._put(key, frame, overwrite=True, **options)


class _Remembers(MemoryTransport):
    """Keeps what was delivered, by incarnation and generation."""

    delivered: ClassVar[dict[tuple[Any, Any], bytes]] = {}

    def _recall(self, where: Where) -> Memory | None:
        at = where.at or {}
        raw = self.delivered.get((at.get("incarnation"), at.get("generation")))
        return None if raw is None else (ctypes.c_char * len(raw)).from_buffer_copy(raw)

    def _put(self, key: Key, frame: Frame, **options: Any) -> dict[str, Any]:
        at = super()._put(key, frame, **options)
        raw = bytearray(frame.nbytes)
        frame.write_into(raw)
        self.delivered[at["incarnation"], at["generation"]] = bytes(raw)
        return at


@caught("TestMetadata::test_metadata_of_a_payload_that_was_read_never_gives_it_again")
class AcceptsMetadataOfAReadPayload(_Remembers):
    """Metadata of a payload that was read gives it once more."""

    def _take_claim(self, key: Key, where: Where) -> Memory | None:
        return super()._take_claim(key, where) or self._recall(where)


@caught("TestReplacing::test_metadata_of_the_replaced_payload_never_gives_the_old_value")
class ReturnsTheOldValue(_Remembers):
    """Metadata of a payload that was overwritten gives the old bytes."""

    def _take_claim(self, key: Key, where: Where) -> Memory | None:
        memory = super()._take_claim(key, where)
        return memory and (self._recall(where) or memory)


@caught("TestReads::test_a_payload_is_read_once")
class GivesOneReadTooMany(MemoryTransport):
    """A payload can be read once more than was allowed."""

    def _put(self, key: Key, frame: Frame, *, readers: int, **options: Any) -> dict[str, Any]:
        return super()._put(key, frame, readers=readers + 1, **options)


@caught("TestReads::test_n_readers_get_it_n_times_and_no_more")
class CountsNoReaders(MemoryTransport):
    """Whatever `readers` is, one read frees the payload."""

    def _put(self, key: Key, frame: Frame, *, readers: int, **options: Any) -> dict[str, Any]:
        return super()._put(key, frame, readers=1, **options)


@caught("TestReads::test_n_readers_cannot_change_what_the_others_see")
class SharesMemoryBetweenReaders(MemoryTransport):
    """All readers get the same writable memory."""

    shared: ClassVar[dict[tuple[str, Key], Memory]] = {}

    def _take_claim(self, key: Key, where: Where) -> Memory | None:
        memory = super()._take_claim(key, where)
        return memory and self.shared.setdefault((self.context.namespace, key), memory)


@caught("TestReads::test_reading_frees_the_memory")
class NeverFrees(MemoryTransport):
    """What was read still counts as held, and is."""

    def _give_back(self, item: bytearray) -> None:
        self.__dict__.setdefault("kept", []).append(item)


@caught("TestEdgesAndProducers::test_two_edges_do_not_collide")
class IgnoresTheEdge(MemoryTransport):
    """Every edge is the same edge."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(dataclasses.replace(context, edge=Edge("any", "any")))
        self.context = context


@caught("TestEdgesAndProducers::test_two_namespaces_do_not_meet")
class IgnoresTheNamespace(MemoryTransport):
    """Every namespace is the same namespace."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(dataclasses.replace(context, namespace="any"))
        self.context = context


@caught("TestEdgesAndProducers::test_the_caller_says_which_rank_is_meant")
class IgnoresTheProducer(MemoryTransport):
    """Takes the payload of whichever producer it meets first, even when one was named."""

    def _take_claim(self, key: Key, where: Where) -> Memory | None:
        for transport in self._meeting.ledgers:
            only = Where(producer=transport.context.producer)
            if (memory := super()._take_claim(key, only)) is not None:
                return memory
        return super()._take_claim(key, where)


@caught("TestEdgesAndProducers::test_a_key_that_two_producers_hold_is_ambiguous_and_both_are_named")
class GuessesBetweenProducers(MemoryTransport):
    """A key that two producers hold gives one of them."""

    def _take_claim(self, key: Key, where: Where) -> Memory | None:
        if where.producer is None:
            for transport in self._meeting.ledgers:
                only = Where(producer=transport.context.producer)
                if (memory := super()._take_claim(key, only)) is not None:
                    return memory
        return super()._take_claim(key, where)


@caught("TestEdgesAndProducers::test_a_key_that_two_producers_hold_is_ambiguous_and_both_are_named")
class AmbiguityCostsTheRead(MemoryTransport):
    """Says that the key is ambiguous, and throws both payloads away."""

    def _take_claim(self, key: Key, where: Where) -> Memory | None:
        try:
            return super()._take_claim(key, where)
        except LookupError as error:
            if "held by" in str(error):
                for ledger in self._meeting.ledgers.values():
                    ledger.claim(key, self)
            raise


class _RenamesKeys(MemoryTransport):
    """Files every payload under another key."""

    def rename(self, key: Key) -> Key:
        """Return the key that is used instead."""
        raise NotImplementedError

    def _put(self, key: Key, frame: Frame, **options: Any) -> dict[str, Any]:
        return super()._put(self.rename(key), frame, **options)

    def _take_claim(self, key: Key, where: Where) -> Memory | None:
        return super()._take_claim(self.rename(key), where)

    def _exists(self, keys: Sequence[Key], where: Where) -> list[bool]:
        return super()._exists([self.rename(key) for key in keys], where)


@caught("TestKeys::test_keys_that_look_alike_are_different")
class CutsLongKeys(_RenamesKeys):
    """Keys are cut at 255 characters, as names of files are."""

    def rename(self, key: Key) -> Key:
        """Cut it."""
        return key._replace(request_id=key.request_id[:255])


@caught("TestKeys::test_keys_that_look_alike_are_different")
class FoldsCase(_RenamesKeys):
    """Keys that differ in case are one key."""

    def rename(self, key: Key) -> Key:
        """Fold it."""
        return key._replace(request_id=key.request_id.lower())


@caught("TestTransfer::test_chunks_and_shards_of_a_request_are_payloads_of_their_own")
class IgnoresTheShard(_RenamesKeys):
    """The shard is no part of the name."""

    def rename(self, key: Key) -> Key:
        """Drop it."""
        return key._replace(shard="")


@caught("TestKeys::test_fields_of_a_key_do_not_run_into_each_other")
class JoinsFieldsCarelessly(_RenamesKeys):
    """Request, chunk and shard are joined by colons that may also be in them."""

    def rename(self, key: Key) -> Key:
        """Join them."""
        text = f"{key.request_id}:{key.chunk}:{key.shard}" if key.chunk or key.shard else key.request_id
        return Key(text)


@caught("TestGetInto::test_the_bytes_arrive_in_order")
class GetIntoIsOffByOne(MemoryTransport):
    """`get_into` writes everything one byte further on."""

    def _get_into(self, key: Key, where: Where, buffers: Sequence[Any], *, deadline: Deadline) -> int:
        nbytes = super()._get_into(key, where, buffers, deadline=deadline)
        carry = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if view:
                carry, last = view[-1], carry
                view[:] = bytes([last]) + bytes(view[:-1])
        return nbytes


@caught("TestGetInto::test_thousands_of_pieces")
class GetIntoFillsFewPieces(MemoryTransport):
    """`get_into` stops after a thousand pieces and reports all bytes."""

    def _get_into(self, key: Key, where: Where, buffers: Sequence[Any], *, deadline: Deadline) -> int:
        before = [bytes(buffer) for buffer in buffers[1000:]]
        nbytes = super()._get_into(key, where, buffers, deadline=deadline)
        for buffer, old in zip(buffers[1000:], before, strict=True):
            memoryview(buffer).cast("B")[:] = old
        return nbytes


@caught("TestGetInto::test_buffers_that_do_not_fit_are_refused_untouched")
class GetIntoFillsWhatFits(MemoryTransport):
    """`get_into` with too little room fills it and then raises."""

    def _get_into(self, key: Key, where: Where, buffers: Sequence[Any], *, deadline: Deadline) -> int:
        try:
            return super()._get_into(key, where, buffers, deadline=deadline)
        except OmniConnectorError:
            for buffer in buffers:
                memoryview(buffer).cast("B")[:1] = b"\1"
            raise
