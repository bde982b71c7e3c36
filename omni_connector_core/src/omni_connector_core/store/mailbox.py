"""The mailbox in which a consumer's `cleanup` leaves a request id for a producer, and waits for the count."""

from __future__ import annotations

import time
from collections.abc import Callable

from omni_connector_core.deadline import Deadline
from omni_connector_core.recent import MEMORY_OF_ENDINGS_S
from omni_connector_core.store.names import Owner
from omni_connector_core.store.objects import ObjectStore
from omni_connector_core.store.records import Count, Mail, pack, unpack

__all__ = ["Mailbox"]

KEPT_S = 60.0
"""So long an answer that nobody fetches stays, seconds."""


class Mailbox:
    """One producer's mailbox, at its end. For one thread."""

    def __init__(self, store: ObjectStore, owner: Owner) -> None:
        self._store = store
        self._owner = owner
        self._answers: dict[str, float] = {}

    def answer(self, cleanup: Callable[[str], int], deadline: Deadline) -> None:
        """Take the mail that is there out, do what it asks for, and answer."""
        (data,) = self._store.load([self._owner.mailbox], deadline=deadline)
        mail = unpack(self._owner.mailbox, data, Mail)
        if mail is not None:
            name = self._owner.answer(mail.id)
            count = pack(name, Count(cleanup(mail.request_id)))
            self._store.claim(name, count, ttl_s=MEMORY_OF_ENDINGS_S, deadline=deadline)
            self._answers[mail.id] = time.monotonic() + KEPT_S
        if data is not None:
            self._store.remove([self._owner.mailbox], deadline=deadline)

    def tidy(self, deadline: Deadline) -> None:
        """Remove answers that nobody fetched."""
        now = time.monotonic()
        old = [mail for mail, until_s in self._answers.items() if until_s <= now]
        if old:
            self._store.remove([self._owner.answer(mail) for mail in old], deadline=deadline)
            for mail in old:
                del self._answers[mail]

    def names(self) -> list[str]:
        """Return the names of all that is, or may be, in the store."""
        return [self._owner.mailbox, *map(self._owner.answer, self._answers)]
