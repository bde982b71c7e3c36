"""The producers of an edge that a consumer knows: those it is connected to, those that died, those that refuse it."""

from __future__ import annotations

import select
from collections.abc import Callable

from omni_connector_core.errors import OmniConnectorError, PeerLostError
from omni_connector_core.key import Producer
from omni_connector_shared_memory.interest import Target
from omni_connector_shared_memory.link import Link
from omni_connector_shared_memory.meeting import Address, Meeting
from omni_connector_shared_memory.watch import FolderWatch

__all__ = ["Neighbours"]


class Neighbours:
    """Connects to producers as they appear. Not thread-safe.

    Parameters
    ----------
    meeting
        Where they appear.
    arrived
        Called with the link to each new one.

    Attributes
    ----------
    links
        Connections, by file descriptor.
    """

    def __init__(self, meeting: Meeting, arrived: Callable[[Link], None]) -> None:
        self.links: dict[int, Link] = {}
        self._meeting = meeting
        self._arrived = arrived
        self._lost: dict[Producer, Address] = {}
        self._refused: dict[Address, OmniConnectorError] = {}
        self._epoll: select.epoll | None = None
        self._watch: FolderWatch | None = None

    def open(self, epoll: select.epoll) -> None:
        """Connect to those who are there, and watch for others; everything is registered in `epoll`.

        May be called again after it raised.
        """
        self._meeting.open()
        self._epoll = epoll
        if self._watch is None:
            self._watch = FolderWatch(self._meeting.folder)
            if self._watch.fd >= 0:
                epoll.register(self._watch.fd, select.EPOLLIN)
        self.look_around()

    def noticed(self, fd: int) -> None:
        """Look around if this file, which became readable, is the watch."""
        if self._watch is not None and fd == self._watch.fd:
            self._watch.clear()
            self.look_around()

    def look_seldom(self) -> float | None:
        """Without a watch: look around, and say after how many seconds to do so again."""
        if self._watch is None or self._watch.seldom_s is None:
            return None
        self.look_around()
        return self._watch.seldom_s

    def look_around(self, but: Address | None = None) -> None:
        """Connect to producers that are new, save one."""
        known = {but, *(link.address for link in self.links.values())}
        for address in self._meeting.addresses():
            if address not in known:
                self._connect(address)

    def part(self, link: Link) -> None:
        """Note that a producer is gone."""
        del self.links[link.fd]
        if not link.said_goodbye:
            self._lost[link.address.producer] = link.address
        if link.refusal is not None:
            self._refused[link.address] = link.refusal
        link.close()

    def hopeless(self, target: Target) -> OmniConnectorError | None:
        """Say why nobody who is there, or may come, can have what is wanted; None while there is hope."""
        refusals = [error for address, error in self._refused.items() if target.means(address)]
        lost = [address for address in self._lost.values() if target.means(address)]
        if not (refusals or lost or target.incarnation):
            return None
        self.look_around()  # the news of another one may not have been read yet
        if any(target.means(link.address) for link in self.links.values()):
            return None
        if refusals:
            return refusals[0]
        who = " and ".join(map(str, sorted(lost))) or f"{target.producer} ({target.incarnation})"
        return PeerLostError(f"{who} died or left, and no other is here")

    def absent(self, target: Target) -> str:
        """Say, for an error message, that nobody is there who could have what is wanted; empty if somebody is."""
        if any(target.means(link.address) for link in self.links.values()):
            return ""
        return f"; {target.producer or 'a producer'} of this edge has not appeared in {self._meeting.folder}"

    def close(self) -> None:
        """Leave all."""
        for link in self.links.values():
            link.retire()
        self.links.clear()
        if self._watch is not None:
            self._watch.close()

    def abandon(self) -> None:
        """In a forked child: close the parent's files."""
        for link in tuple(self.links.values()):
            link.abandon()
        if self._watch is not None:
            self._watch.close()

    def _connect(self, address: Address) -> None:
        assert self._epoll is not None
        self._refused.pop(address, None)
        try:
            sock = self._meeting.connect(address)
        except PeerLostError:
            self._lost[address.producer] = address
            self._meeting.sweep()
            return
        except OmniConnectorError as error:
            self._refused[address] = error
            return
        self._lost.pop(address.producer, None)
        link = self.links[sock.fileno()] = Link(address, sock, self._epoll)
        self._arrived(link)
