"""The store: named objects in files. Put your SDK's calls in the place of these.

Only `claim` and `take` must be atomic between processes. Here `link` and `unlink` are: of all callers exactly one succeeds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from omni_connector_core import BackendUnavailableError, Deadline
from omni_connector_core.frame import Frame
from omni_connector_core.store import NewObject, NoRoomError, ObjectStore
from omni_connector_core.transport import Memory

FOR_EVER_S = 10 * 365 * 86400.0


class FileStore(ObjectStore):
    """Objects in the files of a folder that all processes see. System calls: about three an object."""

    longest_name: ClassVar[int] = 240

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        with _errors_as_ours():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sweep()

    def create(self, objects: Sequence[NewObject], *, ttl_s: float, deadline: Deadline) -> None:
        """Write each beside its place, then move them there."""
        with _errors_as_ours():
            written = [(self._write(item.content, ttl_s), self._folder / item.name) for item in objects]
            for temporary, path in written:
                temporary.rename(path)

    def replace(self, name: str, data: bytes, *, ttl_s: float, deadline: Deadline) -> None:
        """Move a new file over the old one: a reader sees the one or the other."""
        with _errors_as_ours():
            self._write(data, ttl_s).rename(self._folder / name)

    def claim(self, name: str, data: bytes, *, ttl_s: float, deadline: Deadline) -> bool:
        """Link a file to the name, which fails when the name is taken."""
        with _errors_as_ours():
            temporary = self._write(data, ttl_s)
            try:
                os.link(temporary, self._folder / name)
            except FileExistsError:
                return False
            finally:
                temporary.unlink()
            return True

    def take(self, names: Sequence[str], *, deadline: Deadline) -> str | None:
        """Unlink the first that is there."""
        with _errors_as_ours():
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    (self._folder / name).unlink()
                    return name
            return None

    def load(self, names: Sequence[str], *, deadline: Deadline) -> list[bytes | None]:
        """Read small files."""
        with _errors_as_ours():
            found: list[bytes | None] = []
            for name in names:
                try:
                    found.append((self._folder / name).read_bytes())
                except FileNotFoundError:
                    found.append(None)
            return found

    def read(self, name: str, nbytes: int, *, shared: bool, deadline: Deadline) -> Memory | None:
        """Read one file into memory of its own. A store that has the bytes in this process shows them instead."""
        with _errors_as_ours():
            memory = (ctypes.c_char * nbytes)()
            try:
                with open(self._folder / name, "rb", buffering=0) as file:
                    view = memoryview(memory).cast("B")
                    while view and (count := file.readinto(view)):
                        view = view[count:]
            except FileNotFoundError:
                return None
            return memory

    def exist(self, names: Sequence[str], *, deadline: Deadline) -> list[bool]:
        """Look for each."""
        return [(self._folder / name).exists() for name in names]

    def remove(self, names: Sequence[str], *, deadline: Deadline) -> None:
        """Unlink each."""
        with _errors_as_ours():
            for name in names:
                (self._folder / name).unlink(missing_ok=True)

    def purge(self, prefix: str, *, deadline: Deadline) -> None:
        """Unlink all that begin so."""
        with _errors_as_ours():
            self.remove([name for name in os.listdir(self._folder) if name.startswith(prefix)], deadline=deadline)

    def probe(self, *, deadline: Deadline) -> str:
        """Write, read and unlink a file."""
        with _errors_as_ours():
            path = self._write(b"probe", 1.0)
            assert path.read_bytes() == b"probe"
            path.unlink()
            return f"wrote and read a file in {self._folder}"

    @property
    def capacity_bytes(self) -> int | None:
        """As much as was allowed; `StoreTransport` keeps count."""
        return self._capacity_bytes

    @property
    def held_bytes(self) -> int:
        """None: what `read` returns is private."""
        return 0

    def close(self) -> None:
        """Nothing is open."""

    def _sweep(self) -> None:
        """Unlink what has expired: the time at which a file was last changed is the time at which it does."""
        now = time.time()
        for entry in os.scandir(self._folder):
            unfinished = entry.name.startswith(".")  # whose time is not set yet
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_mtime + (3600 if unfinished else 0) < now:
                    os.unlink(entry.path)

    def _write(self, content: Frame | bytes, ttl_s: float) -> Path:
        path = self._folder / f".{secrets.token_hex(8)}"
        if isinstance(content, Frame):
            whole = bytearray(content.nbytes)
            content.write_into(whole)  # or hand `content.segments()` to an SDK that gathers
        else:
            whole = bytearray(content)
        try:
            path.write_bytes(whole)
            os.utime(path, (expires_s := time.time() + (ttl_s or FOR_EVER_S), expires_s))
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path


@contextlib.contextmanager
def _errors_as_ours() -> Iterator[None]:
    """Turn the system's errors into omni-connector's, in one place. Do the same with your SDK's."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoomError from error
        raise BackendUnavailableError(f"the folder cannot be used: {error}") from error
