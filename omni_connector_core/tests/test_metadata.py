"""Metadata: a shortcut when it is ours and fits, a lookup by key when it is not ours, an error when it is and does not."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector_core import Edge, IncompatibleMetadataError, Key, Producer
from omni_connector_core.metadata import ANYWHERE, Where, make_metadata, read_metadata

EDGE, KEY, PRODUCER = Edge("0", "1"), Key("r", 3, "s"), Producer(1, 2)
OURS = make_metadata("some", EDGE, PRODUCER, KEY, 4096, {"generation": 7})

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


def read(metadata, producer=None):
    return read_metadata(metadata, transport="some", edge=EDGE, key=KEY, producer=producer)


def test_ours_leads_straight_to_the_payload():
    assert read(json.loads(json.dumps(OURS))) == Where(PRODUCER, {"generation": 7}, 4096)


@given(junk)
def test_what_is_not_ours_means_look_up_by_key(metadata):
    where = read(metadata)
    assert where.at is None
    assert where.producer is None


@pytest.mark.parametrize("value", [np.zeros(2), np.zeros(0), object(), ()])
def test_so_does_what_is_no_mapping_whatever_its_truth(value):
    assert read(value) is ANYWHERE


@given(st.sampled_from(sorted(OURS)), junk)
def test_ours_but_damaged_is_refused_or_read_never_anything_else(field, value):
    try:
        where = read({**OURS, field: value})
    except IncompatibleMetadataError:
        return
    assert isinstance(where, Where)


@pytest.mark.parametrize(
    ("change", "both"),
    [
        ({"omni_connector": 2}, ("version 2", "version 1")),
        ({"transport": "other"}, ("'other'", "'some'")),
        ({"edge": ["0", "2"]}, ("0->2", "0->1")),
        ({"key": ["r", 4, "s"]}, ("'r'/4/s", "'r'/3/s")),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_ours_of_something_else_is_refused_and_both_sides_are_named(change, both):
    with pytest.raises(IncompatibleMetadataError) as caught:
        read({**OURS, **change})
    assert all(side in str(caught.value) for side in both)


def test_an_explicit_producer_must_agree():
    assert read(OURS, PRODUCER).producer == PRODUCER
    with pytest.raises(IncompatibleMetadataError, match=r"replica 1 rank 2.*replica 0 rank 0"):
        read(OURS, Producer(0, 0))
    assert read({"anything": 1}, Producer(0, 0)).producer == Producer(0, 0)
    assert read(None, Producer(0, 0)) == Where(producer=Producer(0, 0))


@pytest.mark.parametrize(
    ("metadata", "hint"),
    [
        ({"source_host": "10.0.0.1", "source_port": 50051}, ("10.0.0.1", 50051)),
        ({"host": "h", "port": 1}, ("h", 1)),
        ({"host": "h", "port": 0}, None),
        ({"host": "h", "port": 70000}, None),
        ({"host": 3, "port": 50}, None),
        ({"host": "h"}, None),
    ],
    ids=str,
)
def test_host_and_port_are_a_hint(metadata, hint):
    assert read(metadata).hint == hint
