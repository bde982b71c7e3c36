# SPDX-License-Identifier: Apache-2.0
"""Times every put and get of every connector, whoever made it, as the engine's threads see them.

With OMNI_CPU_RIG_TIMING=DIRECTORY each process writes ``<pid>.jsonl`` there: one line per put, and per get that brought a
payload, with the time of the empty polls before it.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory


def time_connectors(directory: Path) -> None:
    """Have every connector timed that the factory makes from now on."""
    make = OmniConnectorFactory.create_connector

    @functools.wraps(make)
    def create_connector(spec: Any) -> Any:
        connector = make(spec)
        log = (directory / f"{os.getpid()}.jsonl").open("a", buffering=1)
        connector.put = _timed(connector.put, "put", log, lambda result: result[1])
        connector.get = _timed(connector.get, "get", log, lambda result: result[1])
        return connector

    OmniConnectorFactory.create_connector = create_connector


def _timed(call: Callable[..., Any], name: str, log: TextIO, nbytes_of: Callable[[Any], int]) -> Callable[..., Any]:
    polls, polls_s = 0, 0.0

    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal polls, polls_s
        start_s = time.monotonic()
        result = call(*args, **kwargs)
        seconds = time.monotonic() - start_s
        if result is None:
            polls, polls_s = polls + 1, polls_s + seconds
        else:
            record = {"op": name, "at_s": start_s, "s": seconds, "nbytes": nbytes_of(result)}
            log.write(json.dumps({**record, "polls": polls, "polls_s": polls_s}) + "\n")
            polls, polls_s = 0, 0.0
        return result

    return timed
