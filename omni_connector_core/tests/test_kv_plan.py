"""The plan of a KV flow against a dense reference made by torch indexing, for every pair of group shapes."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_connector_core.errors import IncompatibleKVError
from omni_connector_core.kv import KVSpec, Rank, plan
from omni_connector_core.kv.spec import Span

SIZES = (1, 2, 4, 8)


def spec(**fields: object) -> KVSpec:
    values: dict[str, object] = {
        "num_layers": 4,
        "num_kv_heads": 4,
        "head_size": 8,
        "block_size": 4,
        "dtype": "float32",
    }
    return KVSpec(**{**values, **fields})  # type: ignore[arg-type]


def dense(side: KVSpec, rank: Rank, whole: torch.Tensor) -> torch.Tensor:
    """What a rank holds, cut from ``whole[layer, token, head]`` by torch indexing alone."""
    _, tokens, heads = whole.shape
    if side.tp_size <= heads:
        head_ids = torch.arange(heads).chunk(side.tp_size)[rank.tp]
    else:
        head_ids = torch.arange(heads).repeat_interleave(side.tp_size // heads)[rank.tp : rank.tp + 1]
    token_ids = torch.tensor_split(torch.arange(tokens), side.sp_size)[rank.sp]
    layer_ids = torch.arange(*side.pp_ranges[rank.pp])
    return whole[layer_ids][:, token_ids][:, :, head_ids]


def check_delivery(producer: KVSpec, consumer: KVSpec, num_tokens: int) -> None:
    """Carry numbered cells as the plan says and compare with the reference."""
    cells = torch.arange(producer.num_layers * num_tokens * producer.num_kv_heads)
    whole = cells.view(producer.num_layers, num_tokens, producer.num_kv_heads)
    way = plan(producer, consumer, num_tokens)
    sent: dict[tuple[int, Span, Span], list[object]] = {}
    for rank in producer.ranks():
        layers, tokens = producer.pp_ranges[rank.pp], producer.tokens_of(rank.sp, num_tokens)
        heads = producer.heads_of(rank.tp)
        held = dense(producer, rank, whole)
        for layer, tile in itertools.product(range(*layers), way.sent_by(rank)):
            part = held[
                layer - layers.start,
                tile.tokens.start - tokens.start : tile.tokens.stop - tokens.start,
                tile.heads.start - heads.start : tile.heads.stop - heads.start,
            ]
            name = (layer, tile.heads, tile.tokens)
            assert name not in sent, "two producers send the same part"
            sent[name] = [part, len(tile.targets)]
    for rank in consumer.ranks():
        layers, tokens = consumer.pp_ranges[rank.pp], consumer.tokens_of(rank.sp, num_tokens)
        heads = consumer.heads_of(rank.tp)
        got = torch.full((len(layers), len(tokens), len(heads)), -1)
        for layer, tile in itertools.product(range(*layers), way.needed_by(rank)):
            entry = sent[layer, tile.heads, tile.tokens]
            entry[1] -= 1  # type: ignore[operator]
            target = got[
                layer - layers.start,
                tile.tokens.start - tokens.start : tile.tokens.stop - tokens.start,
                tile.heads.start - heads.start : tile.heads.stop - heads.start,
            ]
            assert (target == -1).all(), "a cell is delivered twice"
            target.copy_(entry[0])  # type: ignore[arg-type]
        assert torch.equal(got, dense(consumer, rank, whole))
    assert all(entry[1] == 0 for entry in sent.values()), "the reads do not add up"


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("from_tp", "to_tp"), list(itertools.product(SIZES, SIZES)))
def test_every_pair_of_tensor_parallel_sizes(from_tp: int, to_tp: int, num_kv_heads: int) -> None:
    producer = spec(tp_size=from_tp, num_kv_heads=num_kv_heads)
    check_delivery(producer, spec(tp_size=to_tp, num_kv_heads=num_kv_heads), num_tokens=10)


@pytest.mark.parametrize(("from_sp", "to_sp"), list(itertools.product((1, 2, 3, 4), (1, 2, 3, 4))))
def test_every_pair_of_sequence_parallel_sizes(from_sp: int, to_sp: int) -> None:
    for num_tokens in (1, 2, 3, 7, 8, 23):
        check_delivery(spec(sp_size=from_sp), spec(sp_size=to_sp, tp_size=2), num_tokens)


RANGES = [(), (Span(0, 1), Span(1, 4)), (Span(0, 2), Span(2, 4)), (Span(2, 4), Span(0, 2)), (Span(0, 3), Span(3, 4))]


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product(RANGES, RANGES)))
def test_every_pair_of_pipeline_ranges(ours: tuple[Span, ...], theirs: tuple[Span, ...]) -> None:
    check_delivery(spec(pp_ranges=ours, tp_size=2), spec(pp_ranges=theirs), num_tokens=5)


@settings(max_examples=80, deadline=None)
@given(
    tp=st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)),
    sp=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    pp=st.tuples(st.sampled_from(RANGES), st.sampled_from(RANGES)),
    num_kv_heads=st.sampled_from((1, 2, 4, 8, 16)),
    num_tokens=st.integers(0, 40),
)
def test_everything_at_once(
    tp: tuple[int, int], sp: tuple[int, int], pp: tuple[tuple[Span, ...], ...], num_kv_heads: int, num_tokens: int
) -> None:
    sides = [
        spec(tp_size=t, sp_size=s, pp_ranges=p, num_kv_heads=num_kv_heads) for t, s, p in zip(tp, sp, pp, strict=True)
    ]
    check_delivery(*sides, num_tokens)


def test_each_side_hears_from_exactly_those_who_send_to_it() -> None:
    producer = spec(tp_size=8, pp_ranges=(Span(0, 1), Span(1, 4)), sp_size=2)
    consumer = spec(tp_size=2, pp_ranges=(Span(0, 2), Span(2, 4)))
    way = plan(producer, consumer, 9)
    pairs = {(a, b) for a in producer.ranks() for b in way.consumers_of(a)}
    assert pairs == {(a, b) for b in consumer.ranks() for a in way.producers_for(b)}
    assert pairs


def test_replicas_of_a_head_take_turns() -> None:
    way = plan(spec(tp_size=8, num_kv_heads=2), spec(num_kv_heads=2), 4)
    assert [tile.source for tile in way.tiles] == [(0, 0), (5, 0)]


def test_a_rank_that_is_not_given_is_an_error_and_never_zero() -> None:
    for field in ("tp_size", "sp_size"):
        with pytest.raises(IncompatibleKVError, match="was not given") as caught:
            _ = spec(**{field: 2}).rank
        assert caught.value.field == field.replace("size", "rank")
    with pytest.raises(IncompatibleKVError, match="pp_rank was not given"):
        _ = spec(pp_ranges=RANGES[1]).rank
    assert spec().rank == Rank(0, 0, 0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_layers": 5}, "num_layers"),
        ({"num_kv_heads": 8}, "num_kv_heads"),
        ({"head_size": 16}, "head_size"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"layout": "latent", "num_kv_heads": 1}, "num_kv_heads"),
    ],
)
def test_what_cannot_be_bridged_names_the_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(IncompatibleKVError) as caught:
        plan(spec(), spec(**change), 4)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tp_size": 3}, "tp_size"),
        ({"tp_size": 0}, "tp_size"),
        ({"tp_size": 2, "tp_rank": 2}, "tp_rank"),
        ({"dtype": "int4"}, "dtype"),
        ({"layout": "upside_down"}, "layout"),
        ({"layout": "latent"}, "num_kv_heads"),
        ({"pp_ranges": ((0, 2), (1, 4))}, "pp_ranges"),
        ({"pp_ranges": ((0, 3),)}, "pp_ranges"),
        ({"head_size": True}, "head_size"),
    ],
)
def test_a_spec_that_makes_no_sense_names_the_field(fields: dict[str, object], field: str) -> None:
    with pytest.raises(IncompatibleKVError) as caught:
        spec(**fields)
    assert caught.value.field == field


def test_planning_does_not_depend_on_the_number_of_layers_and_is_cached() -> None:
    def best_of_five(num_layers: int, size: int) -> float:
        times = []
        for n in range(5):
            sides = (
                spec(num_layers=num_layers, tp_size=size, num_kv_heads=8),
                spec(num_layers=num_layers, num_kv_heads=8),
            )
            start_s = time.perf_counter()
            way = plan(*sides, 1000 + n)
            for rank in sides[0].ranks():
                way.sent_by(rank)
            times.append(time.perf_counter() - start_s)
        return min(times[1:])

    # the bar is 2 ms for 80 layers x 8 ranks; it takes some 50 us here
    assert best_of_five(80, 8) < 2e-3
