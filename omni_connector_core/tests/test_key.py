"""Names: what is a key, and that no two names share an encoding."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from omni_connector_core import Edge, InvalidKeyError, Key, Producer
from omni_connector_core.key import as_key, encoded, encoded_name

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
# few characters, among them all that an encoding uses itself: collisions would be likely
tricky = st.text(alphabet="aA0=:#%_-/.\x00\u00e9", max_size=6)
ids = tricky.filter(bool)
names = st.tuples(
    tricky,
    st.builds(Edge, tricky, tricky),
    st.builds(Producer, st.integers(0, 12), st.integers(0, 12)),
    st.builds(Key, ids, st.integers(0, 120), tricky),
)


@given(names, names, st.sampled_from([None, 33, 40, 64]))
def test_no_two_names_share_an_encoding(first, second, limit):
    assume(first != second)
    assert encoded_name(*first, limit=limit) != encoded_name(*second, limit=limit)


@given(names, st.integers(33, 200))
def test_an_encoding_is_of_a_small_alphabet_and_keeps_the_limit(name, limit):
    result = encoded_name(*name, limit=limit)
    assert re.fullmatch(r"[A-Za-z0-9_\-=:#]*", result)
    assert len(result) <= limit


@given(st.lists(text, min_size=1, max_size=4), st.lists(text, min_size=1, max_size=4))
def test_fields_do_not_run_into_each_other(first, second):
    assume(first != second)
    assert encoded(*first) != encoded(*second)


@given(text.filter(bool).filter(lambda t: len(t.encode()) <= 1024), st.integers(0, 2**63 - 1), text)
def test_a_text_is_the_request_id_of_a_key(request_id, chunk, shard):
    assert as_key(request_id) == Key(request_id, 0, "")
    key = Key(request_id, chunk, shard)
    assert as_key(key) == key


def test_only_a_hashed_name_holds_a_hash_sign():
    assert "#" not in encoded("a#b" * 5)
    assert "#" in encoded("a" * 100, limit=50)


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        ("", "empty"),
        (Key(""), "empty"),
        ("k" * 2000, "2,000 UTF-8 bytes; at most 1,024"),
        ("\N{SNOWMAN}" * 342, "1,026 UTF-8 bytes"),
        ("\ud800", "not valid Unicode"),
        (Key("r", 0, "s" * 257), "shard has 257"),
        (Key("r", 0, "\udfff"), "shard is not valid Unicode"),
        (Key("r", -1), "chunk is an int"),
        (Key("r", True), "chunk is an int"),
        (Key("r", 2**63), "chunk is an int"),
        (Key("r", 1.0), "chunk is an int"),
        (Key(7), "request_id and shard are str"),
        (Key("r", 0, None), "request_id and shard are str"),
        (7, "not int"),
        (("r", 0, ""), "not tuple"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_what_is_no_key_is_refused_with_the_reason(key, complaint):
    with pytest.raises(InvalidKeyError, match=re.escape(complaint)):
        as_key(key)


def test_names_read_well():
    assert str(Key("r")) == "'r'"
    assert str(Key("r", 2)) == "'r'/2"
    assert str(Key("r", 0, "layer-3")) == "'r'/0/layer-3"
    assert len(str(Key("r" * 1000))) < 100
    assert str(Edge("enc", "dec")) == "enc->dec"
    assert str(Producer(1, 2)) == "replica 1 rank 2"
