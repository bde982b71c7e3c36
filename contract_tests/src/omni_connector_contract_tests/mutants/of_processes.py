"""Mutants that are wrong between processes: about death, standstill and what arrives from outside.

They are derived from the files of the package that `omni-connector new` writes, and need its folder in the module path.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from omni_connector_my_backend.files import FileStore
from omni_connector_my_backend.options import MyBackendOptions
from omni_connector_my_backend.transport import MyBackendTransport

from omni_connector_contract_tests.mutants.registry import caught_by
from omni_connector_core import Deadline, ForkedError, Key, PeerLostError, TransferTimeoutError
from omni_connector_core.frame import Frame
from omni_connector_core.metadata import Where
from omni_connector_core.store import NewObject
from omni_connector_core.transport import Memory

caught = functools.partial(caught_by, options="omni_connector_my_backend.options:MyBackendOptions")


@caught("TestDeath::test_a_waiting_consumer_learns_within_seconds_that_the_producer_died")
class MournsNobody(MyBackendTransport):
    """A consumer that waits does not care whether the producer lives."""

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        while True:
            try:
                return super()._get(key, where, deadline=deadline)
            except PeerLostError:
                if deadline.expired():
                    raise TransferTimeoutError("not there") from None


@caught("TestDeath::test_another_producer_is_waited_for_when_one_dies")
class OneDeathEndsEveryWait(MyBackendTransport):
    """When any producer dies, whoever waits for any is told that his is lost."""

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        while (memory := self._poll(key, where)) is None:
            if any(slot.process.dead() for slot in self._consumer(deadline).directory.scan(deadline).values()):
                raise PeerLostError("some producer died")
            if deadline.expired():
                raise TransferTimeoutError("not there")
            threading.Event().wait(0.01)
        return memory


class _OtherFiles(MyBackendTransport):
    """Uses another kind of file store."""

    files: type[FileStore] = FileStore

    def _connect(self, *, deadline: Deadline) -> FileStore:
        store = super()._connect(deadline=deadline)
        options = cast(MyBackendOptions, self.options)
        return self.files(store._folder, options.capacity_bytes)


class _Unswept(FileStore):
    def purge(self, prefix: str, *, deadline: Deadline) -> None:
        """Leave everything."""


@caught("TestDeath::test_what_dead_processes_left_is_swept_by_the_next_start")
class SweepsNothing(_OtherFiles):
    """What a dead process left stays for ever."""

    files = _Unswept


class _Torn(FileStore):
    def _write(self, content: Frame | bytes, ttl_s: float) -> Path:
        path = super()._write(content, ttl_s)
        if isinstance(content, Frame) and content.nbytes > 300_000:
            raw = bytearray(path.read_bytes())
            raw[-100_000:] = bytes(100_000)
            path.write_bytes(raw)
        return path


@caught("TestDeath::test_a_producer_killed_while_it_puts_delivers_whole_payloads_or_errors")
class ShowsUnfinishedPayloads(_OtherFiles):
    """The end of a large payload is announced, and not written."""

    files = _Torn


class _Mapped(FileStore):
    shown: list[Memory] = []  # noqa: RUF012 - on purpose: one memory for all

    def read(self, name: str, nbytes: int, *, shared: bool, deadline: Deadline) -> Memory | None:
        """Read into the memory of the read before."""
        memory = super().read(name, nbytes, shared=shared, deadline=deadline)
        if memory is None or nbytes < 100_000:
            return memory
        if not self.shown or len(self.shown[0]) < nbytes:
            self.shown[:] = [(ctypes.c_char * nbytes)()]
        ctypes.memmove(self.shown[0], memory, nbytes)
        return (ctypes.c_char * nbytes).from_buffer(self.shown[0])


@caught("TestDeath::test_what_was_got_stays_when_the_producer_dies")
class ReusesWhatAConsumerHolds(_OtherFiles):
    """Every large payload is read into the same memory, whoever still looks at it."""

    files = _Mapped


class _Indelible(FileStore):
    def take(self, names: Sequence[str], *, deadline: Deadline) -> str | None:
        """Say that it was taken, and leave it."""
        return next((name for name in names if (self._folder / name).exists()), None)


@caught("TestReads::test_a_payload_is_read_once")
class TakesNothing(_OtherFiles):
    """Reads do not remove what they read."""

    files = _Indelible


@caught("TestStandstill::test_a_stopped_producer_costs_the_consumer_no_more_than_its_deadline")
class AsksTheProducer(MyBackendTransport):
    """A get first asks the producer's process, and waits for its answer as long as that takes."""

    _asked: socket.socket | None = None

    def _address(self) -> str:
        return f"\0{self.context.namespace}-asked"

    def _put(self, key: Key, frame: Frame, **options: Any) -> dict[str, Any]:
        if self._asked is None:
            self._asked = socket.socket(socket.AF_UNIX)
            self._asked.bind(self._address())
            self._asked.listen()
            threading.Thread(target=self._answer, args=(self._asked,), daemon=True).start()
        return super()._put(key, frame, **options)

    @staticmethod
    def _answer(server: socket.socket) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            client.sendall(b"here")
            client.close()

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self._address())
            client.recv(4)
        return super()._get(key, where, deadline=deadline)

    def _close(self) -> None:
        if self._asked is not None:
            self._asked.shutdown(socket.SHUT_RDWR)
            self._asked.close()
        super()._close()


@caught("TestHostileBytes::test_random_and_hostile_bytes_on_every_socket_do_nothing")
class RunsWhatItReceives(AsksTheProducer):
    """A control socket unpickles what arrives."""

    @staticmethod
    def _answer(server: socket.socket) -> None:
        import pickle

        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with contextlib.suppress(Exception):
                pickle.loads(client.recv(65536))
            client.close()

    def _get(self, key: Key, where: Where, *, deadline: Deadline) -> Memory:
        return super(AsksTheProducer, self)._get(key, where, deadline=deadline)


@caught("TestHostileBytes::test_random_and_hostile_bytes_on_every_socket_do_nothing")
class DiesOfWhatItReceives(RunsWhatItReceives):
    """A control socket that receives garbage ends the process."""

    @staticmethod
    def _answer(server: socket.socket) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            if client.recv(65536)[:1] == b"\xff":
                os.kill(os.getpid(), signal.SIGKILL)
            client.close()


@caught("TestThreads::test_a_forked_child_gets_a_clear_error_and_harms_nobody")
class WorksInAForkedChild(MyBackendTransport):
    """A forked child uses its parent's connector as if it were its own."""

    def _check(self, key: Key | None, needed: Any) -> None:
        with contextlib.suppress(ForkedError):
            super()._check(key, needed)


class _Racing(FileStore):
    def create(self, objects: Sequence[NewObject], *, ttl_s: float, deadline: Deadline) -> None:
        """Announce a payload before it is there."""
        super().create(objects[1:], ttl_s=ttl_s, deadline=deadline)
        threading.Timer(0.02, super().create, (objects[:1],), {"ttl_s": ttl_s, "deadline": deadline}).start()


@caught("TestTransfer::test_put_returns_when_the_payload_can_be_fetched")
class AnnouncesTooEarly(_OtherFiles):
    """A payload is announced, and `put` returns, before its bytes are there."""

    files = _Racing
