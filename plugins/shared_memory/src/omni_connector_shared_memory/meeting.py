"""Where the processes of an edge meet: a folder with a socket and a lock file for each living producing end.

A producer holds a `flock` on its lock file for as long as it lives; the kernel drops it with the process, however that ends.
So who is dead can be told for certain, and what the dead left is removed by whoever comes next. The socket gets its
final name only when it accepts connections. Files that are not ours, or whose owner lives, are never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pwd
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from omni_connector_core.errors import BackendUnavailableError, PeerLostError
from omni_connector_core.key import Edge, Producer, encoded

__all__ = ["Address", "Meeting", "Place"]

_NAME = re.compile(r"([0-9a-f]{20})-(\d+)-(\d+)-([0-9a-f]{16})\.(sock|lock|new)")
_LONGEST_PATH = 100
BACKLOG = 4096


class Address(NamedTuple):
    """One life of one producing end; several may carry the same replica and rank."""

    producer: Producer
    incarnation: str

    def __str__(self) -> str:
        return f"{self.producer} ({self.incarnation})"


class Meeting:
    """The meeting place of one edge. Opens nothing until it is used.

    Parameters
    ----------
    runtime_dir
        The folder, or None for the default (see the option).
    namespace, edge
        Whose meeting it is; their hash is in every file name.
    """

    def __init__(self, runtime_dir: str | None, namespace: str, edge: Edge) -> None:
        default = os.environ.get("OMNI_CONNECTOR_RUNTIME_DIR") or f"/tmp/omni-connector-{os.getuid()}"
        self.folder = Path(runtime_dir or default)
        name = encoded(namespace, *edge).encode()
        self._prefix = hashlib.blake2b(name, digest_size=10).hexdigest()

    def open(self) -> None:
        """Make sure that the folder is there, ours, and closed to others.

        Raises
        ------
        BackendUnavailableError
            It is somebody else's, or may be written by others.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.folder.lstat()
        except OSError as error:
            raise self._unusable(str(error.strerror)) from error
        if not stat.S_ISDIR(status.st_mode):
            raise self._unusable("it is not a folder")
        if status.st_uid != os.getuid():
            raise self._unusable(f"permission denied: it belongs to user {_user(status.st_uid)}")
        if status.st_mode & 0o022:
            raise self._unusable("other users may write to it")

    def claim(self, address: Address) -> Place:
        """Become a producer of the edge."""
        lock_path = self._path(address, "lock")
        while True:
            lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_still(lock, lock_path):
                    return Place(lock, lock_path)
            os.close(lock)  # between our open and our lock somebody took it for a dead producer's

    def addresses(self) -> list[Address]:
        """List the producers that have a socket, dead ones included."""
        matches = (_NAME.fullmatch(name) for name in self._names())
        return sorted(
            Address(Producer(int(match[2]), int(match[3])), match[4])
            for match in matches
            if match and match[1] == self._prefix and match[5] == "sock"
        )

    def connect(self, address: Address) -> socket.socket:
        """Connect to a producer.

        Raises
        ------
        PeerLostError
            It is dead, or left.
        BackendUnavailableError
            Permission is denied, or this process may open no more files.
        """
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        except OSError as error:
            raise BackendUnavailableError(
                f"no socket to talk to {address}: {error.strerror}", hint="Raise the limit on open files"
            ) from error
        try:
            with _short(self._path(address, "sock")) as path:
                sock.connect(path)
        except PermissionError as error:
            sock.close()
            raise BackendUnavailableError(
                f"permission denied to talk to {address}: it runs as another user", hint="Run both stages as one user"
            ) from error
        except OSError as error:
            sock.close()
            raise PeerLostError(f"{address} does not answer: {error.strerror}") from error
        return sock

    def sweep(self) -> None:
        """Remove what dead producers left, on this edge and all others."""
        for name in self._names():
            match = _NAME.fullmatch(name)
            if match and match[5] == "lock":
                self._remove_if_dead(self.folder / name)

    def _remove_if_dead(self, lock_path: Path) -> None:
        try:
            lock = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # it left by itself
            return
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_still(lock, lock_path):
                    Place(lock, lock_path).remove()
        finally:
            os.close(lock)

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unusable(str(error.strerror)) from error

    def _path(self, address: Address, suffix: str) -> Path:
        (replica, rank), incarnation = address
        return self.folder / f"{self._prefix}-{replica}-{rank}-{incarnation}.{suffix}"

    def _unusable(self, reason: str) -> BackendUnavailableError:
        return BackendUnavailableError(
            f"the runtime folder {self.folder} cannot be used: {reason}",
            hint="Set runtime_dir, or OMNI_CONNECTOR_RUNTIME_DIR, to a folder of this user's with mode 0700",
        )


class Place:
    """A producer's place in the meeting, held until `leave`.

    Parameters
    ----------
    lock
        The lock file, locked.
    lock_path
        Its name, from which the socket's are made.
    """

    def __init__(self, lock: int, lock_path: Path) -> None:
        self._lock = lock
        self._lock_path = lock_path
        self._new_path = lock_path.with_suffix(".new")
        self._path = lock_path.with_suffix(".sock")

    def listen(self) -> socket.socket:
        """Open the socket; consumers can connect as soon as its name is there."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            with _short(self._new_path) as path:
                sock.bind(path)
            os.chmod(self._new_path, 0o600)
            sock.listen(BACKLOG)
            os.rename(self._new_path, self._path)
        except OSError:
            sock.close()
            raise
        return sock

    def remove(self) -> None:
        """Remove the files; the lock's last, so that what is left can always be swept."""
        for path in (self._new_path, self._path, self._lock_path):
            path.unlink(missing_ok=True)

    def leave(self) -> None:
        """Remove the files and give up the lock."""
        self.remove()
        os.close(self._lock)

    def abandon(self) -> None:
        """Close the lock file in a forked child, in which the place is the parent's."""
        os.close(self._lock)


def _is_still(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Name a socket in fewer than 108 characters, which is all that the kernel takes."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)
