"""Mutants of the flows themselves: one function of core's streams or KV flow is replaced by one that does it wrong.

They run over the in-process reference, where a patch reaches every peer.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from omni_connector_core import Deadline, Key, TransferTimeoutError
from omni_connector_core.kv import KVReceive, KVReceiver, KVSend, KVSender, KVSpec, Plan, Rank, Tile
from omni_connector_core.kv import cache as kv_cache
from omni_connector_core.kv import receive as kv_receive
from omni_connector_core.kv import send as kv_send
from omni_connector_core.kv.cache import Placement, Run
from omni_connector_core.kv.spec import Span
from omni_connector_core.streams import StreamReader, StreamWriter

__all__ = ["FLOW_MUTANTS", "FlowMutant"]

Original = Callable[..., Any]
kv_plan = importlib.import_module("omni_connector_core.kv.plan")  # the package has a function of that name


@dataclass(frozen=True, slots=True)
class FlowMutant:
    """One function of the flows done wrong.

    Attributes
    ----------
    owner, attribute
        The class or module that it belongs to, and its name there.
    wrong
        What is called instead, with the right function before the arguments. Its docstring says what is broken.
    test
        ``Class::test`` of the contract that must fail.
    """

    owner: Any
    attribute: str
    wrong: Callable[..., Any]
    test: str

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Break it for the length of the block."""
        right = inspect.getattr_static(self.owner, self.attribute)
        wrong = self.wrong
        replacement: Any
        if isinstance(right, property):
            assert right.fget is not None
            fget = right.fget
            replacement = property(lambda instance: wrong(fget, instance))
        else:

            def replacement(*args: Any, **kwargs: Any) -> Any:
                return wrong(right, *args, **kwargs)

        setattr(self.owner, self.attribute, replacement)
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, right)


FLOW_MUTANTS: dict[str, FlowMutant] = {}
"""Every mutant of a flow by its name."""


def breaks(owner: Any, attribute: str, caught_by: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function as what is called in place of the owner's, and the test that must catch it."""

    def enter(wrong: Callable[..., Any]) -> Callable[..., Any]:
        FLOW_MUTANTS[wrong.__name__] = FlowMutant(owner, attribute, wrong, caught_by)
        return wrong

    return enter


# ---- streams


@breaks(StreamWriter, "write", "TestStreams::test_the_end_never_overtakes_the_last_chunk")
def end_before_the_last_chunk(
    right: Original, self: StreamWriter, chunk: Any, *, last: bool = False, **more: Any
) -> None:
    """The end is a message of its own, and goes before the last chunk."""
    if last:
        self.end()
        self._ended, self._next = False, self._next + 1
    right(self, chunk, last=last, **more)


@breaks(StreamWriter, "write", "TestStreams::test_the_end_comes_with_the_last_chunk")
def last_chunk_twice(right: Original, self: StreamWriter, chunk: Any, *, last: bool = False, **more: Any) -> None:
    """The last chunk goes once as a chunk and once more with the end."""
    right(self, chunk, **more)
    if last:
        right(self, chunk, last=True, **more)


@breaks(StreamWriter, "end", "TestStreams::test_a_stream_arrives_in_order_and_ends")
def end_forgotten(right: Original, self: StreamWriter, **more: Any) -> None:
    """A stream whose last chunk was not marked has no end."""


@breaks(StreamWriter, "end", "TestStreams::test_an_empty_stream_is_a_stream")
def empty_stream_has_no_end(right: Original, self: StreamWriter, **more: Any) -> None:
    """A stream without chunks is not sent at all."""
    if self.written:
        right(self, **more)


@breaks(StreamReader, "accept", "TestStreams::test_the_writer_may_be_far_ahead_of_the_reader")
def a_chunk_lost(right: Original, self: StreamReader, message: Any) -> Any:
    """The reader passes over the third chunk."""
    chunk = right(self, message)
    return next(self) if self.read == 3 else chunk


@breaks(StreamReader, "_key", "TestStreams::test_a_stream_arrives_in_order_and_ends")
def chunks_out_of_order(right: Original, self: StreamReader, chunk: int) -> Key:
    """The reader takes the second chunk of every pair first."""
    found: Key = right(self, chunk ^ 1)
    return found


@breaks(StreamReader, "_key", "TestStreams::test_two_streams_of_a_request_keep_apart")
def shard_dropped(right: Original, self: StreamReader, chunk: int) -> Key:
    """The reader takes the chunks of any stream of the request for its own."""
    found: Key = right(self, chunk)
    return found._replace(shard="audio" if found.shard else "")


@breaks(StreamReader, "accept", "TestReplicas::test_a_stream_is_never_continued_by_another_replica")
def any_writers_chunks(right: Original, self: StreamReader, message: Any) -> Any:
    """The reader does not look at who wrote a chunk."""
    self._writer = None
    return right(self, message)


@breaks(StreamReader, "__init__", "TestReplicas::test_streams_of_two_replicas_do_not_mix")
def stream_of_any_replica(right: Original, self: StreamReader, *args: Any, **options: Any) -> None:
    """The reader reads replica 0, whichever it was told to read."""
    right(self, *args, **{**options, "producer": options["producer"] and options["producer"]._replace(replica=0)})


@breaks(StreamWriter, "__init__", "TestStreams::test_every_one_of_several_readers_gets_all_of_it")
def stream_for_one_reader(right: Original, self: StreamWriter, *args: Any, **options: Any) -> None:
    """Each chunk can be read once, however many readers there should be."""
    right(self, *args, **{**options, "readers": 1})


@breaks(StreamWriter, "take_credit", "TestStreams::test_a_writer_without_a_reader_stops_at_its_window")
def no_credits(right: Original, self: StreamWriter, deadline: Deadline) -> None:
    """The writer never waits for the reader."""


@breaks(StreamWriter, "take_credit", "TestStreams::test_any_window_delivers_everything")
def credits_never_come_back(right: Original, self: StreamWriter, deadline: Deadline) -> None:
    """A writer can write one window of chunks and no more."""
    if self.written >= self._window:
        raise TransferTimeoutError("no credit")


@breaks(StreamWriter, "take_credit", "TestStreams::test_a_slow_reader_bounds_the_writers_memory")
def credits_come_back_twice(right: Original, self: StreamWriter, deadline: Deadline) -> None:
    """Half a window of chunks that was read gives back a whole window of credits."""
    right(self, deadline)
    self._credits += self._half


@breaks(StreamWriter, "write", "TestStreamEndings::test_credits_come_back_after_an_abort")
def credits_leaked_on_abort(right: Original, self: StreamWriter, chunk: Any, **options: Any) -> None:
    """Streams share twenty credits, which come back when a stream ends, and not when it is aborted."""
    out = vars(self._connector).setdefault("credits_out", {})
    out[self] = self.written + 1
    if sum(out.values()) > 20:
        raise TransferTimeoutError("no credit")
    right(self, chunk, **options)


@breaks(StreamWriter, "fail", "TestStreamEndings::test_a_waiting_reader_learns_of_a_failure_within_a_second")
def stream_failure_not_sent(right: Original, self: StreamWriter, reason: str) -> None:
    """A failed stream just stops."""


@breaks(StreamWriter, "fail", "TestStreamEndings::test_a_failure_comes_after_what_was_written")
def stream_failure_drops_what_was_written(right: Original, self: StreamWriter, reason: str) -> None:
    """A failure takes the chunks with it that were written before."""
    for chunk in range(self.written):
        self._connector.fail(self._key(chunk), reason)


@breaks(StreamReader, "close", "TestStreamEndings::test_a_reader_that_leaves_stops_the_writer_and_frees_both_sides")
def abandoned_stream_not_cleaned(right: Original, self: StreamReader) -> None:
    """A reader that leaves tells nobody."""


# ---- KV: what lies where


@breaks(Placement, "gather", "TestKVFlow::test_tensor_parallel_sizes_may_differ")
def heads_swapped(right: Original, self: Placement, planes: Sequence[Any], tile: Any) -> None:
    """The heads of a part are sent in reverse order."""
    right(self, planes, tile[:, :, ::-1])


@breaks(Placement, "scatter", "TestKVFlow::test_every_dtype_arrives_bit_for_bit")
def keys_and_values_swapped(right: Original, self: Placement, planes: Sequence[Any], tile: Any) -> None:
    """K is received as V, and V as K."""
    right(self, planes[::-1], tile)


@breaks(Placement, "scatter", "TestKVFlow::test_every_dtype_arrives_bit_for_bit")
def bytes_of_an_element_swapped(right: Original, self: Placement, planes: Sequence[Any], tile: Any) -> None:
    """Elements of several bytes arrive in the other byte order."""
    right(self, planes, tile.byteswap())


@breaks(KVSender, "__init__", "TestKVFlow::test_a_layer_is_usable_before_the_next_is_sent")
def off_by_one_layer(right: Original, self: KVSender, *args: Any) -> None:
    """Each layer is sent under the number of the one before."""
    right(self, *args)
    self.planes = dict(zip(self.planes, [*list(self.planes.values())[1:], *self.planes.values()], strict=False))


@breaks(kv_send, "tile_key", "TestKVFlow::test_pipeline_ranges_may_differ")
def layers_counted_from_the_rank(right: Original, request_id: str, layer: int, tile: Tile) -> Key:
    """Every pipeline rank but the first is one layer behind."""
    key: Key = right(request_id, layer, tile)
    return key._replace(chunk=max(layer - 1, 0))


@breaks(kv_cache, "runs", "TestKVFlow::test_tensor_parallel_sizes_may_differ")
def block_ids_ignored(
    right: Original, block_ids: Sequence[int], block_size: int, first: int, stop: int
) -> Iterator[Run]:
    """Blocks are taken in the order in which they lie in the cache."""
    yield from right(sorted(block_ids), block_size, first, stop)


@breaks(kv_cache, "runs", "TestKVFlow::test_every_dtype_arrives_bit_for_bit")
def partial_last_block_dropped(
    right: Original, block_ids: Sequence[int], block_size: int, first: int, stop: int
) -> Iterator[Run]:
    """Tokens that do not fill a block are left out."""
    yield from (run for run in right(block_ids, block_size, first, stop) if run.blocks)


@breaks(kv_cache, "runs", "TestKVFlow::test_each_sequence_parallel_rank_gets_its_own_tokens_and_is_told_their_number")
def offset_in_the_first_block_forgotten(
    right: Original, block_ids: Sequence[int], block_size: int, first: int, stop: int
) -> Iterator[Run]:
    """A part that begins inside a block is put at the start of that block."""
    yield from right(block_ids, block_size, first - first % block_size, stop - first % block_size)


@breaks(kv_receive, "place", "TestKVFlow::test_layouts_and_block_sizes_may_differ")
def the_others_block_size(
    right: Original, spec: KVSpec, tiles: Iterable[Tile], block_ids: Sequence[int], num_tokens: int
) -> list[tuple[Tile, Placement]]:
    """The consumer walks its blocks as if they had the size 4, which only the producer's have."""
    placed: list[tuple[Tile, Placement]] = right(spec, tiles, block_ids, num_tokens)
    held = spec.tokens_of(spec.rank.sp, num_tokens)
    for tile, placement in placed:
        first = tile.tokens.start - held.start
        walked = list(kv_cache.runs(list(block_ids) * 2, 4, first, first + len(tile.tokens)))
        if spec.block_size > 4:
            placement._runs = [run for run in walked if run.stop - run.start <= 4]
    return placed


# ---- KV: who gets what


@breaks(KVSpec, "heads_of", "TestKVFlow::test_tensor_parallel_sizes_may_differ")
def heads_dealt_in_turn(right: Original, self: KVSpec, tp_rank: int) -> Span:
    """With more ranks than heads, neighbouring ranks hold different heads instead of replicas."""
    if self.tp_size <= self.num_kv_heads:
        return Span(*right(self, tp_rank))
    return Span(tp_rank % self.num_kv_heads, tp_rank % self.num_kv_heads + 1)


@breaks(
    KVSpec, "tokens_of", "TestKVFlow::test_each_sequence_parallel_rank_gets_its_own_tokens_and_is_told_their_number"
)
def tokens_split_unevenly(right: Original, self: KVSpec, sp_rank: int, num_tokens: int) -> Span:
    """What is left over goes to the last sequence-parallel rank."""
    each = num_tokens // self.sp_size
    return Span(sp_rank * each, num_tokens if sp_rank == self.sp_size - 1 else (sp_rank + 1) * each)


@breaks(Plan, "needed_by", "TestKVFlow::test_tensor_parallel_sizes_may_differ")
def wrong_replica_of_a_head(right: Original, self: Plan, rank: Rank) -> list[Tile]:
    """The consumer asks the first rank that holds a head, not the one whose turn it is."""
    each = max(self.producer.tp_size // self.producer.num_kv_heads, 1)
    return [tile._replace(source=(tile.source[0] // each * each, tile.source[1])) for tile in right(self, rank)]


@breaks(Plan, "sent_by", "TestKVFlow::test_tensor_parallel_sizes_may_differ")
def readers_miscounted(right: Original, self: Plan, rank: Rank) -> list[Tile]:
    """A part that several consumers need can be read once."""
    return [tile._replace(targets=tile.targets[:1]) for tile in right(self, rank)]


@breaks(KVSender, "open", "TestKVFlow::test_two_groups_of_consumers_read_what_is_sent_once")
def sent_for_one_group(right: Original, self: KVSender, *args: Any, readers: int = 1, **options: Any) -> KVSend:
    """One group of consumers can read it, however many there should be."""
    return right(self, *args, **options)  # type: ignore[no-any-return]


@breaks(
    KVReceive,
    "reuse_length",
    "TestKVFlow::test_each_sequence_parallel_rank_gets_its_own_tokens_and_is_told_their_number",
)
def whole_reuse_length(right: Original, self: KVReceive) -> int:
    """A sequence-parallel rank is told the length of the whole request."""
    return self._plan.num_tokens if self.complete else 0


@breaks(KVReceiver, "open", "TestKVFlow::test_two_replicas_that_hold_the_same_request_are_told_apart")
def replica_scope_dropped(
    right: Original, self: KVReceiver, *args: Any, replica: int | None = None, **options: Any
) -> KVReceive:
    """The consumer takes the cache from any replica, whichever it was told."""
    return right(self, *args, **options)  # type: ignore[no-any-return]


@breaks(kv_plan, "Key", "TestKVFlow::test_caches_of_two_requests_do_not_mix")
def request_dropped_from_the_key(right: Original, request_id: str, chunk: int, shard: str) -> Key:
    """Parts of all requests go by the same keys."""
    return Key("kv", chunk, shard)


# ---- KV: endings


@breaks(KVReceive, "_greet", "TestKVEndings::test_sides_that_misunderstand_each_other_find_out_before_bytes_move")
def heads_not_compared(right: Original, self: KVReceive) -> None:
    """What the producers say of themselves is not looked at."""


@breaks(KVReceive, "_greet", "TestKVEndings::test_sides_that_misunderstand_each_other_find_out_before_bytes_move")
def compared_too_late(right: Original, self: KVReceive) -> None:
    """The sides are compared after the first layer."""
    if self.layers_received:
        right(self)


@breaks(kv_receive, "check_compatible", "TestKVEndings::test_another_model_at_the_producer_is_found_out")
def another_model_is_welcome(right: Original, producer: KVSpec, consumer: KVSpec) -> None:
    """Only the shapes of the groups are compared."""


@breaks(KVSend, "fail", "TestKVEndings::test_an_abort_at_the_producer_reaches_the_consumer")
def kv_failure_not_sent(right: Original, self: KVSend, reason: str) -> None:
    """A producer that stops early tells nobody."""


@breaks(KVSend, "fail", "TestKVEndings::test_an_abort_at_the_producer_reaches_the_consumer")
def kv_failure_drops_layers(right: Original, self: KVSend, reason: str) -> None:
    """A failure takes the layers with it that were sent before."""
    for layer in range(self.layers_sent):
        for tile, _ in self._tiles:
            self._sender.connector.fail(kv_plan.tile_key(self._request_id, layer, tile), reason)


@breaks(KVReceive, "invalid_blocks", "TestKVEndings::test_an_abort_at_the_producer_reaches_the_consumer")
def stale_blocks_are_valid(right: Original, self: KVReceive) -> list[int]:
    """Blocks count as valid as soon as the first layer is there."""
    return [] if self.layers_received else right(self)


@breaks(KVReceive, "close", "TestKVEndings::test_a_consumer_that_leaves_stops_the_producer")
def a_consumer_leaves_quietly(right: Original, self: KVReceive) -> None:
    """A consumer that leaves early tells nobody."""


@breaks(KVReceive, "close", "TestKVEndings::test_a_request_that_failed_on_one_replica_may_be_sent_by_another")
def a_failed_replica_spoils_the_request(right: Original, self: KVReceive) -> None:
    """A consumer abandons a request that one replica failed, for all of them."""
    self._ended_there = False
    right(self)


@breaks(KVSend, "__exit__", "TestKVEndings::test_a_part_that_finds_no_room_fails_the_flow_and_gives_everything_back")
def a_failed_send_is_left_as_it_is(right: Original, self: KVSend, *_: Any) -> None:
    """An exception leaves the send as it is."""
