# SPDX-License-Identifier: Apache-2.0
"""Requests that end only when they are aborted, so that a test can hang up, or kill, in the middle of one for certain."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import pre_tokenizers
from vllm.v1.engine.core import EngineCoreProc

_HOLD = sorted(pre_tokenizers.ByteLevel.alphabet()).index("~")  # the token, as in ``checkpoint``
_TOKENS = 12


def hold_requests() -> None:
    """Have an engine stop when a request with a ``~`` in its prompt has made twelve tokens, until it hears of its abort."""
    step = EngineCoreProc._process_engine_step

    @functools.wraps(step)
    def step_unless_held(self: EngineCoreProc) -> bool:
        while self.is_running() and any(map(_is_held, self.scheduler.requests.values())):
            self._handle_client_request(*self.input_queue.get())
        return bool(step(self))

    EngineCoreProc._process_engine_step = step_unless_held


def _is_held(request: Any) -> bool:
    return request.num_output_tokens >= _TOKENS and _HOLD in (request.prompt_token_ids or ())
