"""What users do wrong: one clear error each, which says what to do (issue 2, section 7)."""

from __future__ import annotations

import os
import uuid

import pytest

from omni_connector_core import (
    ClosedError,
    ConfigError,
    EncodeError,
    ForkedError,
    InvalidKeyError,
    OptionError,
    RoleError,
    UnknownBackendError,
    create_connector,
)
from omni_connector_core.config import parse


@pytest.fixture
def conn():
    with create_connector("memory", namespace=uuid.uuid4().hex) as conn:
        yield conn


def said(error_type, call):
    with pytest.raises(error_type) as caught:
        call()
    return str(caught.value)


def test_an_unknown_backend():
    message = said(UnknownBackendError, lambda: create_connector("shared_memori"))
    assert "pip install omni-connector-shared-memori" in message


def test_an_unknown_option():
    assert "did you mean 'timeout_s'" in said(OptionError, lambda: create_connector("memory", {"timeout": 3}))


def test_a_role_in_the_options():
    assert "unknown option 'role'" in said(OptionError, lambda: create_connector("memory", {"role": "sender"}))


def test_a_role_that_is_none():
    with pytest.raises(ValueError, match="sender"):
        create_connector("memory", role="sender")


def test_a_role_and_a_misspelt_reference_in_a_file():
    stages = [{"stage_id": 0, "output_connectors": {"to_stage_1": "fest"}}, {"stage_id": 1}]
    message = said(
        ConfigError, lambda: parse({"connectors": {"fast": {"name": "memory", "role": "sender"}}, "stages": stages})
    )
    assert "'role' does not belong in a file" in message
    assert "did you mean 'fast'" in message


def test_a_payload_that_cannot_be_encoded(conn):
    message = said(EncodeError, lambda: conn.put("k", {"a": [1, {"b": object()}]}))
    assert "payload['a'][1]['b']" in message
    assert "key='k'" in message


def test_an_empty_key_and_a_key_of_two_thousand_bytes(conn):
    assert "the key is empty" in said(InvalidKeyError, lambda: conn.put("", 1))
    assert "2,000 UTF-8 bytes" in said(InvalidKeyError, lambda: conn.get("k" * 2000))


def test_get_after_close(conn):
    conn.close()
    message = said(ClosedError, lambda: conn.get("k"))
    assert "Create a new connector" in message
    assert "key='k'" in message


def test_put_from_a_consumer_end():
    with create_connector("memory", role="consumer") as conn:
        message = said(RoleError, lambda: conn.put("k", 1))
    assert "this process is the consumer of the edge" in message
    assert "Only the producer end" in message


def test_a_fork(conn):
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            conn.put("k", 1)
        except ForkedError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read().decode()
    os.waitpid(pid, 0)
    assert "belongs to the parent process" in message
    assert "spawn" in message


def test_the_first_lines_that_a_user_types():
    conn = create_connector("memory", config={})
    conn.put("test_key", b"test_data")
    assert conn.get("test_key") == b"test_data"
    conn.close()


@pytest.mark.parametrize("ttl", [float("nan"), -1.0, "5"])
def test_a_time_to_live_that_is_none(conn, ttl):
    assert "ttl is a number of seconds, at least 0" in said(ConfigError, lambda: conn.put("k", 1, ttl=ttl))
    assert conn.exists(["k"]) == [False]


@pytest.mark.parametrize("readers", [0, 1.5, "2", True])
def test_a_number_of_readers_that_is_none(conn, readers):
    assert "readers is an int of at least 1" in said(ConfigError, lambda: conn.put("k", 1, readers=readers))


def test_a_timeout_that_is_no_number(conn):
    assert "timeout is a number of seconds, not 'soon'" in said(ConfigError, lambda: conn.get("k", timeout="soon"))
    assert "timeout is a number of seconds" in said(ConfigError, lambda: conn.put("k", 1, timeout="soon"))


def test_one_key_where_several_are_asked_for(conn):
    assert "a sequence of keys" in said(InvalidKeyError, lambda: conn.exists("key"))


@pytest.mark.parametrize(
    ("which", "value"),
    [("edge", "01"), ("edge", ("0",)), ("edge", 3), ("role", "sender"), ("replica", -1), ("rank", "0"), ("rank", True)],
)
def test_an_end_that_is_none(which, value):
    message = said(ConfigError, lambda: create_connector("memory", **{which: value}))
    assert which in message
    assert repr(value) in message
