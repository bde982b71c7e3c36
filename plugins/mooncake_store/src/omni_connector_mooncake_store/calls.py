"""Calls into an SDK that may take longer than the caller has time.

A call whose longest duration fits into the deadline runs in the caller's thread. Any other runs in a helper thread, which the
caller leaves at its deadline; when the call ends at last, `late` sees its result. A hand-over costs about 50 us. A call that
nobody waits for is handed over by `start`.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import BackendUnavailableError, OmniConnectorError

__all__ = ["SHORTEST_S", "Calls"]

ResultT = TypeVar("ResultT")

IDLE_S = 1.0
"""How long a helper thread waits for another call before it ends, seconds."""
DRAIN_S = 10.0
"""How long the end of a process waits for calls that are stuck, seconds."""
SHORTEST_S = 0.25
"""What a call is given also when less is left until the deadline: a get with a timeout of zero asks once."""


class _Job(Generic[ResultT]):
    def __init__(self, call: Callable[[], ResultT], late: Callable[[ResultT], None]) -> None:
        self.call = call
        self.late = late
        self.result: ResultT
        self.abandoned = False
        self.ended = False
        self.lock = threading.Lock()
        self.bell = threading.Lock()
        self.bell.acquire()

    def run(self) -> None:
        result = self.call()
        with self.lock:
            self.result, self.ended = result, True
            abandoned = self.abandoned
        if abandoned:
            self.late(result)
        else:
            self.bell.release()


class Calls:
    """Runs calls. Thread-safe. A call must not raise: an SDK returns codes.

    Parameters
    ----------
    service
        Who is called, for messages.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self._idle: deque[SimpleQueue[_Job[Any]]] = deque()
        self._under_way: set[object] = set()

    @property
    def under_way(self) -> bool:
        """Whether a call has not ended, wherever it runs."""
        return bool(self._under_way)

    def run(
        self,
        call: Callable[[], ResultT],
        *,
        longest_s: float,
        deadline: Deadline,
        late: Callable[[ResultT], None] = lambda _: None,
        overdue: type[OmniConnectorError] = BackendUnavailableError,
    ) -> ResultT:
        """Run `call` and return its result by the deadline.

        Parameters
        ----------
        longest_s
            The longest that the call takes, by the SDK's own limits.
        late
            Called with the result in the helper thread, when the caller had left.
        overdue
            Raised when the call was still running at the deadline.
        """
        if deadline.at_s - time.monotonic() >= longest_s:
            token = object()
            self._under_way.add(token)
            try:
                return call()
            finally:
                self._under_way.discard(token)
        job = self.start(call, late)
        if not job.bell.acquire(timeout=max(deadline.remaining_s(), SHORTEST_S)):
            with job.lock:
                job.abandoned = not job.ended
            if job.abandoned:
                raise overdue(f"{self._service} has not answered by the deadline")
        return job.result

    def start(self, call: Callable[[], ResultT], late: Callable[[ResultT], None] = lambda _: None) -> _Job[ResultT]:
        """Run `call` in a helper thread."""
        job = _Job(call, late)
        self._under_way.add(job)
        _running.add(job)
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = SimpleQueue()
            threading.Thread(target=self._work, args=[worker], name="omni-connector-call", daemon=True).start()
        worker.put(job)
        return job

    def _work(self, queue: SimpleQueue[_Job[Any]]) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._finish(queue.get(timeout=IDLE_S))
                self._idle.append(queue)
        try:
            self._idle.remove(queue)
        except ValueError:  # somebody just took it, and is about to put a job into it
            self._finish(queue.get())

    def _finish(self, job: _Job[Any]) -> None:
        job.run()
        self._under_way.discard(job)
        _running.discard(job)


_running: set[_Job[Any]] = set()


@atexit.register
def _drain() -> None:
    """Wait for calls that are still stuck: a thread in an SDK's call aborts the process when the interpreter goes."""
    deadline = Deadline(DRAIN_S)
    while _running and not deadline.expired():
        time.sleep(0.01)
