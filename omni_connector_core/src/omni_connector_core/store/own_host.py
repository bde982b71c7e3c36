"""Folders through which processes of one user, host and pid namespace meet, and what the dead leave in them.

::

    /dev/shm/omni-connector-<uid>/<kind>-<pid namespace>/<pid>-<started>-<anything>

An entry's name tells whose it is, and one that is still being made begins with a dot; it goes with its process, or when the
next one comes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from omni_connector_core.liveness import Process, this_process

__all__ = ["folder_for", "open_folder", "owned_name", "require_private"]


def folder_for(kind: str, host: str) -> Path:
    """Return the folder of a kind, whether it exists or not."""
    return Path(f"/dev/shm/omni-connector-{os.getuid()}/{kind}-{host.rpartition('/')[2]}")


def owned_name(process: Process, rest: str) -> str:
    """Name an entry of a process."""
    return f"{process.pid}-{process.started}-{rest}"


def open_folder(kind: str) -> Path:
    """Make this host's folder of a kind where it is missing, and remove what dead processes left in it.

    Raises
    ------
    OSError
        It cannot be made, or is not this user's alone.
    """
    host = this_process().host
    folder = folder_for(kind, host)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
        require_private(path)
    _sweep(folder, host)
    return folder


def require_private(path: Path) -> None:
    """Raise OSError unless a folder is this user's alone: who may write there could truncate what is mapped."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} is not a folder of this user's alone")


def _sweep(folder: Path, host: str) -> None:
    for entry in os.scandir(folder):
        pid, _, rest = entry.name.removeprefix(".").partition("-")
        started, _, _ = rest.partition("-")
        if pid.isdigit() and started.isdigit() and Process(host, int(pid), int(started)).dead():
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
