"""How two processes of one host that name the same namespace and edge find each other.

A producer's first put leaves a file that names its control address::

    <$XDG_RUNTIME_DIR or /tmp>/omni-connector-<uid>/<namespace>/<backend:edge>/<replica>-<rank>-<instance>.producer

The folders are 0700 and must belong to this user. The producer holds a lock on the file for as long as it lives, so who can
take the lock knows that it died, and removes the file: there is nothing to clean up after a SIGKILL. A consumer that has
to wait for a producer watches the folder with inotify.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from omni_connector_core.errors import BackendUnavailableError
from omni_connector_core.key import encoded
from omni_connector_core.onesided.messages import Scope
from omni_connector_core.onesided.sockets import raise_if_exhausted

__all__ = ["Advert", "Directory", "Found", "Watch", "sweep"]

_SUFFIX = ".producer"
_NAME_LIMIT = 200  # characters; a file name has at most 255 bytes


class Found(msgspec.Struct, frozen=True):
    """Where a producer listens, as its file tells.

    Attributes
    ----------
    address
        ``host:port`` of its control server.
    instance
        Names the producing connector.
    replica, rank
        Which of the stage's processes it is.
    """

    address: str
    instance: str
    replica: int
    rank: int


@dataclass(frozen=True, slots=True)
class Directory:
    """The folder of one backend, namespace and edge."""

    path: Path

    @classmethod
    def of(cls, scope: Scope) -> Directory:
        """Return a scope's folder, made when missing.

        Raises
        ------
        BackendUnavailableError
            It cannot be made, or belongs to somebody else.
        """
        base = _base()
        namespace = base / encoded(scope.namespace, limit=_NAME_LIMIT)
        path = namespace / encoded(scope.backend, scope.producer_stage, scope.consumer_stage, limit=_NAME_LIMIT)
        for folder in (base, namespace, path):
            _private(folder)
        return cls(path)

    def producers(self) -> tuple[list[Found], list[Found]]:
        """Read who is there, and who died since somebody looked; files of the dead are removed."""
        living: list[Found] = []
        dead: list[Found] = []
        with _our_errors(self.path):
            for entry in sorted(os.listdir(self.path)):
                if entry.endswith(_SUFFIX):
                    _read(self.path / entry, living, dead)
        return living, dead


class Advert:
    """A producer's file, held for as long as the producer lives."""

    def __init__(self, directory: Directory, found: Found) -> None:
        self._path = directory.path / f"{found.replica}-{found.rank}-{found.instance}{_SUFFIX}"
        hidden = directory.path / f".{found.instance}"
        with _our_errors(directory.path):
            self._fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                os.write(self._fd, msgspec.json.encode(found))
                hidden.rename(self._path)  # seen only when it is locked and whole
            except OSError:
                os.close(self._fd)
                hidden.unlink(missing_ok=True)
                raise

    def withdraw(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


class Watch:
    """Wakes who waits for a producer to come: `fd` becomes readable when a file appears in a directory."""

    def __init__(self, directory: Directory) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        moved_to = 0x80  # IN_MOVED_TO
        if self.fd < 0 or libc.inotify_add_watch(self.fd, os.fsencode(directory.path), moved_to) < 0:
            code = ctypes.get_errno()
            self.close()
            raise BackendUnavailableError(
                f"cannot watch {directory.path}: {os.strerror(code)}",
                hint="Raise fs.inotify.max_user_instances and max_user_watches, or the limit on open files (ulimit -n)",
            )

    def changed(self) -> bool:
        """Whether a file appeared since the last call."""
        try:
            return bool(os.read(self.fd, 65536))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Stop watching."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@contextmanager
def _our_errors(path: Path) -> Iterator[None]:
    """Turn what the kernel refuses into an error of ours."""
    try:
        yield
    except OSError as error:
        raise_if_exhausted(error)
        raise BackendUnavailableError(
            f"cannot use {path}: {error.strerror}", hint="Check the folder, or set XDG_RUNTIME_DIR to another one"
        ) from error


def _private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise BackendUnavailableError(
            f"cannot make {folder}: {error.strerror}", hint="Set XDG_RUNTIME_DIR to a folder that this user can write"
        ) from error
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise BackendUnavailableError(
            f"{folder} is not a private folder of this user ({errno.errorcode[errno.EPERM]})",
            hint="Remove it, or set XDG_RUNTIME_DIR to a folder of this user's own",
        )


def _read(path: Path, living: list[Found], dead: list[Found]) -> None:
    """Read one producer's file; it is removed when its producer died."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # which must not look like a producer that left
            raise
        return
    try:
        into = dead
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            into = living
        with suppress(msgspec.DecodeError):  # not a file of ours
            into.append(msgspec.json.decode(os.read(fd, 4096), type=Found))
    finally:
        os.close(fd)


def _base() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"omni-connector-{os.getuid()}"


def sweep() -> None:
    """Remove what the dead left in any namespace of this user."""
    with suppress(OSError):  # somebody else's turn, then
        for path in _base().glob(f"*/*/*{_SUFFIX}"):
            _read(path, [], [])
