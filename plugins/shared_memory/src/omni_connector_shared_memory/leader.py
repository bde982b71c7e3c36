"""Several threads wait for several files, and none of them is there just to read.

Of the threads that wait, one (the leader) sleeps on the files, and handles what comes for all; the others sleep until it did.
When the leader has what it waited for, another takes over. So what comes wakes the thread that wants it directly.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import TypeVar

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import ClosedError

__all__ = ["Events", "LeaderFollowers"]

LONGEST_PAUSE_S = 3600.0
"""The system's calls do not take for ever as a number."""

ResultT = TypeVar("ResultT")
Events = list[tuple[int, int]]


class LeaderFollowers:
    """Waits for files in an epoll object. Called with `lock` held, but for `stop` and `close`.

    Parameters
    ----------
    handle
        Handles what epoll reports, with `lock` held.

    Attributes
    ----------
    lock
        Guards this and whatever `handle` and the conditions that are waited for look at.
    epoll
        In which the files are registered; None before `open`.
    """

    def __init__(self, handle: Callable[[Events], None]) -> None:
        self.lock = threading.Lock()
        self.epoll: select.epoll | None = None
        self._handle = handle
        self._changed = threading.Condition(self.lock)
        self._leading = False
        self._followers = 0
        self._closed = False
        self._wake = -1

    def open(self) -> select.epoll:
        """Return the epoll object, opened at the first use, in which the caller registers files."""
        if self._closed:
            raise ClosedError("the connector is closed")
        if self.epoll is None:
            epoll = select.epoll()
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            epoll.register(self._wake, select.EPOLLIN)
            self.epoll = epoll
        return self.epoll

    def until(
        self,
        done: Callable[[], ResultT],
        deadline: Deadline,
        look_again_s: Callable[[], float | None] = lambda: None,
    ) -> ResultT | None:
        """Wait until `done` returns something, and return that; None at the deadline.

        Parameters
        ----------
        look_again_s
            After how many seconds to ask `done` again though nothing came; None: never.

        Raises
        ------
        ClosedError
            `stop` was called.
        """
        while (result := done()) is None:
            if self._closed:
                raise ClosedError("closed while waiting")
            pause_s = deadline.remaining_s()
            if not pause_s:
                return None
            again_s = look_again_s()
            pause_s = min(pause_s, LONGEST_PAUSE_S if again_s is None else again_s)
            if self._leading:
                self._followers += 1
                try:
                    self._changed.wait(pause_s)
                finally:
                    self._followers -= 1
            else:
                self._lead(pause_s)
        return result

    def look(self) -> None:
        """Handle what is there now, unless another thread does that; waits for nothing."""
        if not self._leading and not self._closed and self.epoll is not None:
            events = self.epoll.poll(0)
            if events:
                self._take_in(events)

    def stir(self) -> None:
        """Make all waiting threads look again."""
        self._changed.notify_all()
        if self._leading:
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End all waiting; called without `lock`."""
        with self.lock:
            self._closed = True
            self.stir()
            while self._leading:
                self._changed.wait()

    def close(self) -> None:
        """Close the files; all that a forked child may do."""
        if self.epoll is not None:
            self.epoll.close()
            os.close(self._wake)

    def _lead(self, pause_s: float) -> None:
        assert self.epoll is not None
        self._leading = True
        self.lock.release()
        try:
            events = self.epoll.poll(pause_s)
        finally:
            self.lock.acquire()
            self._leading = False
            if self._followers or self._closed:
                self._changed.notify_all()
        self._take_in(events)

    def _take_in(self, events: Events) -> None:
        for fd, _ in events:
            if fd == self._wake:
                os.eventfd_read(fd)
        self._handle(events)
