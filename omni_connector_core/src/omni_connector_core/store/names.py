"""What objects are called in a store.

::

    <scope>:s:<number>                      a producer's slot, through which consumers find it
    <scope>:n:<number>                      a notice of an abandoned request
    <scope>:w:<number>                      a consumer's witness that the store was not restarted
    <scope>:o:<replica>:<rank>:<incarnation>:     prefix of everything else that a producer owns
        b                                   its heartbeat
        m, r:<mail>                         its mailbox, and an answer
        h, h:d                              somebody asks it to hand over its tickets, and that it has
        a:<request>                         an abandoned request
        k:<request>:<chunk>:<shard>         the descriptor of a key
        d:<generation>                      a payload's bytes
        d:<generation>:<reader>             one read of a payload with several readers

``scope`` encodes namespace and edge. The incarnation is 64 random bits of one open transport, so that no name is ever used
by two of them, and what a dead one left is never taken for something new. Names that are too long for the store are
hashed by `omni_connector_core.key.encoded`, always behind the part that tells producers apart.
"""

from __future__ import annotations

from omni_connector_core.key import Edge, Key, Producer, encoded

__all__ = ["Names", "Owner"]

_LONGEST_OWNER = 56  # ":o:", two numbers of at most 16 digits, 16 hex digits, colons
_ROOM_FOR_KEY = 64


class Names:
    """Names of one namespace and edge.

    Parameters
    ----------
    longest
        The most characters of a name, at least 200.
    """

    def __init__(self, namespace: str, edge: Edge, *, longest: int) -> None:
        self.longest = longest
        self.scope = encoded(namespace, *edge, limit=longest - _LONGEST_OWNER - _ROOM_FOR_KEY)

    def slot(self, number: int) -> str:
        """Name a producer's slot."""
        return f"{self.scope}:s:{number}"

    def notice(self, number: int) -> str:
        """Name a place for a notice."""
        return f"{self.scope}:n:{number}"

    def witness(self, name: str) -> str:
        """Name a consumer's witness."""
        return f"{self.scope}:w:{name}"

    def owner(self, producer: Producer, incarnation: str) -> Owner:
        """Name what one open producer owns."""
        return Owner(f"{self.scope}:o:{producer.replica}:{producer.rank}:{incarnation}:", self.longest)


class Owner:
    """Names of what one open producer owns; all begin with `prefix`."""

    __slots__ = ("_room", "beat", "handed_over", "mailbox", "prefix", "wanted")

    def __init__(self, prefix: str, longest: int) -> None:
        self.prefix = prefix
        self.beat = f"{prefix}b"
        self.mailbox = f"{prefix}m"
        self.wanted = f"{prefix}h"
        self.handed_over = f"{prefix}h:d"
        self._room = longest - len(prefix)

    def answer(self, mail: str) -> str:
        """Name the answer to a mail."""
        return f"{self.prefix}r:{mail}"

    def abandoned(self, request_id: str) -> str:
        """Name the mark of an abandoned request."""
        return self.prefix + encoded("a", request_id, limit=self._room)

    def descriptor(self, key: Key) -> str:
        """Name a key's descriptor."""
        return self.prefix + encoded("k", *key, limit=self._room)

    def data(self, generation: int) -> str:
        """Name a payload."""
        return f"{self.prefix}d:{generation}"

    def reads(self, generation: int, readers: int) -> list[str]:
        """Name the objects that are each good for one read: whoever takes one has read the payload."""
        data = self.data(generation)
        return [data] if readers == 1 else [f"{data}:{reader}" for reader in range(readers)]
