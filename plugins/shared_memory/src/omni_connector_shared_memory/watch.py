"""Notices files that appear in a folder, without asking again and again: inotify, through the C library."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

__all__ = ["FolderWatch"]

IN_MOVED_TO = 0x80
_libc = ctypes.CDLL(None, use_errno=True)


class FolderWatch:
    """Becomes readable when a file is renamed into the folder.

    Attributes
    ----------
    fd
        For an epoll object; -1 when the host has no inotify instance left (a limit per user, 128 by default): then
        `seldom_s` says how often to look instead.
    """

    def __init__(self, folder: Path) -> None:
        self.fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd >= 0 and _libc.inotify_add_watch(self.fd, os.fsencode(folder), IN_MOVED_TO) < 0:
            os.close(self.fd)
            self.fd = -1

    @property
    def seldom_s(self) -> float | None:
        """How long to wait at most before the folder must be looked at; None: until `fd` is readable."""
        return 0.1 if self.fd < 0 else None

    def clear(self) -> None:
        """Forget what was noticed so far."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 1 << 16)

    def close(self) -> None:
        """Stop watching."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
