"""Options: what is accepted, and what every refusal says."""

import re
from dataclasses import dataclass
from typing import Literal

import pytest

from omni_connector_core import OptionError
from omni_connector_core.options import (
    Options,
    at_least,
    byte_size,
    one_of,
    option,
    option_table,
    parse_options,
)


@dataclass(frozen=True, kw_only=True)
class Some(Options):
    pool_bytes: int = option(parse=byte_size, default="64MiB", doc="Size of the pool.")
    mode: str = option(parse=one_of("fast", "safe"), default="fast", doc="How.")
    host: str | None = option(default=None, doc="Where.")
    devices: list[str] = option(default=["a"], doc="Which.")
    level: Literal[1, 2] = option(default=1, doc="How much.")
    verbose: bool = option(default=False, doc="Whether.")
    port: int = option(parse=at_least(0), default=0, doc="Port.")


def parse(config):
    return parse_options(Some, config, backend="some")


def test_defaults_hold_and_are_not_shared():
    first, second = parse(None), parse({})
    assert (first.pool_bytes, first.mode, first.host, first.devices) == (64 * 2**20, "fast", None, ["a"])
    assert first.devices is not second.devices


def test_the_config_is_not_changed():
    config = {"pool_bytes": "1 GB", "devices": ["x"]}
    assert parse(config).pool_bytes == 10**9
    assert config == {"pool_bytes": "1 GB", "devices": ["x"]}


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("512MiB", 512 * 2**20),
        ("1.5 GB", 1_500_000_000),
        ("2 kib", 2048),
        ("3TB", 3 * 10**12),
    ],
)
def test_sizes(given, nbytes):
    assert byte_size(given) == nbytes


@pytest.mark.parametrize("given", [0, -1, True, 1.5, None, "", "MiB", "0 GB", "-1 MB", "1 XB", "1 GB 2", [1]])
def test_what_is_no_size_is_refused(given):
    with pytest.raises(OptionError, match="option pool_bytes: a size is"):
        parse({"pool_bytes": given})


def test_an_unknown_option_suggests_and_lists():
    with pytest.raises(OptionError) as caught:
        parse({"pool_byte": 1})
    error = str(caught.value)
    assert "unknown option 'pool_byte'; did you mean 'pool_bytes'?" in error
    assert re.search(r"Known options: checksum, devices, .*ttl_s", error)
    assert caught.value.backend == "some"
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"mode": "fats"}, "expected one of fast, safe; did you mean 'fast'?, got 'fats'"),
        ({"host": 3}, "expected str"),
        ({"devices": "a"}, "expected list"),
        ({"level": 3}, "expected"),
        ({"verbose": 1}, "expected bool"),
        ({"port": True}, "expected a number of at least 0"),
        ({"port": 1.5}, "expected int"),
        ({"timeout_s": float("nan")}, "expected a number of at least 0"),
        ({"timeout_s": "3"}, "expected a number of at least 0"),
    ],
    ids=str,
)
def test_a_bad_value_names_the_option_and_what_is_expected(config, complaint):
    [name] = config
    with pytest.raises(OptionError, match=re.escape(f"option {name}: ") + ".*" + re.escape(complaint)):
        parse(config)


def test_an_int_is_a_float_where_a_float_is_wanted():
    assert isinstance(parse({"timeout_s": 3}).timeout_s, float)


@pytest.mark.parametrize("config", ["text", [("pool_bytes", 1)], 3])
def test_a_config_that_is_no_mapping_is_refused(config):
    with pytest.raises(OptionError, match="config is a mapping"):
        parse(config)


def test_the_table_lists_own_options_first():
    lines = option_table(Some).splitlines()
    assert lines[2] == "| `pool_bytes` | `64MiB` | Size of the pool. |"
    assert "| `host` | `-` | Where. |" in lines
    assert lines[-1].startswith("| `stream_window`")
