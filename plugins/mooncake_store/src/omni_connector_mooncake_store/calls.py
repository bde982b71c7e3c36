"""Calls into an SDK that may take longer than the caller has time.

A call whose longest duration fits into the deadline runs in the caller's thread. Any other runs in a helper thread, which the
caller leaves at its deadline; when the call ends at last, `late` sees its result. A hand-over costs about 50 us.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import BackendUnavailableError, ClosedError

__all__ = ["Calls"]

ResultT = TypeVar("ResultT")


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
    """Runs calls, and knows how many are under way. Thread-safe. A call must not raise: an SDK returns codes."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[_Job[object] | None]] = []
        self._running = 0
        self._closing = False
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)

    def run(
        self,
        call: Callable[[], ResultT],
        *,
        longest_s: float,
        deadline: Deadline,
        late: Callable[[ResultT], None] = lambda _: None,
    ) -> ResultT:
        """Run `call` and return its result by the deadline.

        Parameters
        ----------
        longest_s
            The longest that the call takes, by the SDK's own limits.
        late
            Called with the result in the helper thread, when the caller had left.

        Raises
        ------
        BackendUnavailableError
            It was still running at the deadline.
        """
        with self._lock:
            if self._closing:
                raise ClosedError("the connector is closed")
            self._running += 1
        if deadline.remaining_s() >= longest_s:
            try:
                return call()
            finally:
                self._end()
        job = _Job(call, late)
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = SimpleQueue()
            threading.Thread(target=self._work, args=[worker], name="omni-connector-call", daemon=True).start()
        worker.put(job)  # type: ignore[arg-type]
        if not job.bell.acquire(timeout=deadline.remaining_s()):
            with job.lock:
                job.abandoned = not job.ended
            if job.abandoned:
                raise BackendUnavailableError(f"no answer within {deadline.timeout_s:g} s")
        return job.result

    def _work(self, queue: SimpleQueue[_Job[object] | None]) -> None:
        while (job := queue.get()) is not None:
            job.run()
            del job
            self._end(queue)

    def _end(self, worker: SimpleQueue[_Job[object] | None] | None = None) -> None:
        with self._lock:
            self._running -= 1
            if worker is not None:
                if self._closing:
                    worker.put(None)
                else:
                    self._idle.append(worker)
            if not self._running:
                self._quiet.notify_all()

    def close(self, deadline: Deadline) -> bool:
        """End the helper threads; whether all calls had ended by the deadline."""
        with self._lock:
            self._closing = True
            for worker in self._idle:
                worker.put(None)
            self._idle.clear()
            return self._quiet.wait_for(lambda: not self._running, deadline.remaining_s())
