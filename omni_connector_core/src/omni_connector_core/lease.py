"""Tells when memory that was handed out is used by nobody any more.

What `weakref.finalize` does, without its class, its order of creation and its hook at exit, which a transfer would pay for.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["watch"]


class _Lease(weakref.ref[Any]):
    __slots__ = ("ended", "what")
    ended: Callable[[Any], None]
    what: Any


_leases: dict[int, _Lease] = {}
"""All of this process, by id: while a view lives, so does its lease, whoever else forgets it."""

# a forked child has copies of the views, but their leases are its parent's to end
os.register_at_fork(after_in_child=_leases.clear)


def watch(memory: Any, ended: Callable[[Any], None], what: Any) -> None:
    """Call ``ended(what)`` when an object is garbage collected; not at exit, nor in a forked child.

    Parameters
    ----------
    memory
        The object; views keep it alive.
    ended
        Runs as a finalizer, in any thread at any point: it takes no lock and does not raise.
    """
    lease = _Lease(memory, _end)
    lease.ended = ended
    lease.what = what
    _leases[id(lease)] = lease


def _end(lease: Any) -> None:
    del _leases[id(lease)]
    lease.ended(lease.what)
