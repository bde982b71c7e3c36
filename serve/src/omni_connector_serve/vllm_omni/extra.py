# SPDX-License-Identifier: Apache-2.0
"""Take apart a connector's ``extra``: the transport's options, the engine's, and the pipeline's own."""

from __future__ import annotations

import functools
import importlib.resources
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_connector_core import BackendSpec, OptionError
from omni_connector_core.options import parse_options, suggestion
from omni_connector_serve.vllm_omni import report

OWN_OPTIONS = frozenset({"pipeline_options", "readers"})
"""Options of the adapter's own."""

_ZMQ_PORT = 50051  # upstream's default


@dataclass(frozen=True)
class UpstreamOptions:
    """The table in ``upstream_options.toml``."""

    engine: frozenset[str]
    pipeline: frozenset[str]
    unread: frozenset[str]
    built_in: frozenset[str]
    aliases: Mapping[str, str]


@functools.cache
def upstream_options() -> UpstreamOptions:
    """Read the table, once."""
    text = importlib.resources.files(__package__).joinpath("upstream_options.toml").read_text()
    table = tomllib.loads(text)
    sets = {name: frozenset(table[name]) for name in ("engine", "pipeline", "unread", "built_in")}
    return UpstreamOptions(**sets, aliases=table["aliases"])


@dataclass(frozen=True)
class Extra:
    """A connector's ``extra``, taken apart.

    Attributes
    ----------
    options
        The transport's options, by their names here.
    readers
        How many processes of the consuming stage take each payload; None: not said.
    zmq_port
        The base of the engine's port numbers for this connector.
    timeout_s
        For how long a transfer is tried, seconds.
    """

    options: Mapping[str, Any]
    readers: int | None
    zmq_port: int
    timeout_s: float


def split_extra(spec: BackendSpec, given: Mapping[str, Any], *, name: str) -> Extra:
    """Take ``extra`` apart and check it.

    Parameters
    ----------
    spec
        The backend.
    given
        What the deploy file says, with what the engine added.
    name
        The name in the deploy file; a built-in connector's name brings that connector's option names.

    Raises
    ------
    OptionError
        An option has a bad value, or looks like a misspelt one of the transport's.
    """
    options_type = spec.load_options()
    own = frozenset(options_type.__dataclass_fields__)
    built_in = spec.drop_in.options if spec.drop_in is not None and name != spec.name else {}
    upstream = upstream_options()
    pipeline = upstream.pipeline | set(given.get("pipeline_options", ()))
    options: dict[str, Any] = {}
    for option, value in given.items():
        if option in upstream.engine:
            continue
        if option in built_in:
            if (ours := built_in[option]) is not None:
                options[ours] = value
        elif option in own:
            options[option] = value
        elif option not in upstream.unread | pipeline | OWN_OPTIONS:
            _unknown(option, own, spec.name)
    parsed = parse_options(options_type, options, backend=spec.name)
    readers = given.get("readers")
    if readers is not None and (type(readers) is not int or readers < 1):
        raise OptionError(f"option readers: expected a whole number of at least 1, got {readers!r}", backend=spec.name)
    zmq_port = int(os.path.expandvars(str(given.get("zmq_port") or _ZMQ_PORT)))
    return Extra(options, readers, zmq_port, parsed.timeout_s)


def _unknown(option: str, own: frozenset[str], backend: str) -> None:
    """An option that the table does not know belongs to a pipeline of the operator's, unless it looks like a slip."""
    near = suggestion(option, own | OWN_OPTIONS)
    hint = f"If a model of your pipeline reads it, list it: pipeline_options: [{option}]"
    if near:
        raise OptionError(f"unknown option {option!r}{near}", backend=backend, hint=hint)
    report.logger.warning("%s: nothing is known to read the option %r. %s", backend, option, hint)
