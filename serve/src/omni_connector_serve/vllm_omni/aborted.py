# SPDX-License-Identifier: Apache-2.0
"""What an aborted request has made so far is not sent to the next stage, which will never ask for it.

The engine sends the full payload of every request that has ended, also of one whose client hung up or that failed: its workers are
told which requests have ended, but not how. The scheduler knows. So its word goes to the workers with its next output, and they drop
what they have kept of such a request, before they would send it.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.request import RequestStatus
from vllm_omni.core.sched.omni_scheduler_mixin import OmniSchedulerMixin
from vllm_omni.worker.omni_connector_model_runner_mixin import OmniConnectorModelRunnerMixin

from omni_connector_serve.vllm_omni.adapter import ConnectorAdapter

__all__ = ["send_nothing_of_aborted_requests"]

_WORD = "omni_connector_aborted"
_FOR_NOBODY = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)


def send_nothing_of_aborted_requests() -> None:
    """Have the schedulers of this process say which requests were aborted, and its workers listen."""
    finish, wrap = OmniSchedulerMixin.finish_requests, OmniSchedulerMixin._wrap_omni_scheduler_output
    receive = OmniConnectorModelRunnerMixin.recv_full_payload_inputs

    @functools.wraps(finish)
    def finish_requests(self: OmniSchedulerMixin, request_ids: Any, finished_status: RequestStatus) -> Any:
        finished = finish(self, request_ids, finished_status)
        if finished_status in _FOR_NOBODY:
            vars(self).setdefault(_WORD, set()).update(request.request_id for request in finished)
        return finished

    @functools.wraps(wrap)
    def wrap_scheduler_output(self: OmniSchedulerMixin, *args: Any, **kwargs: Any) -> Any:
        output = wrap(self, *args, **kwargs)
        setattr(output, _WORD, vars(self).pop(_WORD, frozenset()))
        return output

    @functools.wraps(receive)
    def recv_full_payload_inputs(self: OmniConnectorModelRunnerMixin, scheduler_output: Any) -> Any:
        if isinstance(self._omni_connector, ConnectorAdapter):
            for request in getattr(scheduler_output, _WORD, ()):
                self._pending_full_payload_send.pop(request, None)
        return receive(self, scheduler_output)

    OmniSchedulerMixin.finish_requests = finish_requests
    OmniSchedulerMixin._wrap_omni_scheduler_output = wrap_scheduler_output
    OmniConnectorModelRunnerMixin.recv_full_payload_inputs = recv_full_payload_inputs
