# SPDX-License-Identifier: Apache-2.0
"""Teaches the codec vLLM's payload types that are neither dataclass nor struct (those it knows by itself)."""

from __future__ import annotations

import sys
from typing import Any

from omni_connector_core import hookimpl
from omni_connector_core.codec import Codec


@hookimpl
def omni_connector_codec_types(codec: Codec) -> None:
    """Register vLLM's types, in a process that has them."""
    outputs = sys.modules.get("vllm.outputs")
    if outputs is not None:
        request_output = outputs.RequestOutput
        codec.register(
            request_output,
            "vllm.RequestOutput",
            # the engine hangs a multimodal_output on it, which is no parameter
            lambda output: dict(vars(output)),
            lambda state: _with_state(request_output, state),
        )


def _with_state(cls: type, state: Any) -> Any:
    if type(state) is not dict or not all(type(name) is str for name in state):
        raise ValueError("the state is a dict of attributes")
    made: Any = object.__new__(cls)
    made.__dict__.update(state)
    return made
