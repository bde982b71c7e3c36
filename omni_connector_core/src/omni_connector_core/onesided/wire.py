"""One control connection: framed messages over a socket that never blocks, authenticated where there is a secret.

========== ========================================= =======================================
by         what                                      bytes
========== ========================================= =======================================
producer   who speaks, whether it wants a secret     magic 8, flag 1, nonce 16
consumer   who speaks, its name, a proof             magic 8, name 16, nonce 16, proof 32
producer   a proof                                   32; zeros: the consumer's was wrong
both       messages                                  length 4, body; with a secret, a tag 16
========== ========================================= =======================================

A proof is an HMAC of nonces and name under the secret: each side shows that it knows it, and none sends it. Every message then
carries a tag under a key of this connection, over its number and its body: nobody between the two can add, change, repeat or drop
one. Messages are not encrypted, and neither are payloads, which the engine moves. Without a secret, proofs are zeros.

A consumer sends its first questions right behind its proof, so a new connection costs one round trip more than an old one. A
message costs one system call at each end, and one wake-up: that of the thread that waits for it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct

from omni_connector_core.nonblocking import NonblockingSocket
from omni_connector_core.onesided.messages import MAX_MESSAGE_NBYTES

__all__ = ["NAME_NBYTES", "DeniedError", "Wire", "WireError"]

_MAGIC = b"omnictl1"
NAME_NBYTES = 16
_NONCE_NBYTES = 16
_PROOF_NBYTES = 32
_TAG_NBYTES = 16
_GREETING_NBYTES = len(_MAGIC) + 1 + _NONCE_NBYTES
_REPLY_NBYTES = len(_MAGIC) + NAME_NBYTES + _NONCE_NBYTES + _PROOF_NBYTES
_NO_PROOF = bytes(_PROOF_NBYTES)
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_READ_NBYTES = (192 << 10) + 4096
"""A message with a frame of its own fits in: it is then read by one call, without a copy."""
_KEEPALIVE_S = 30


class WireError(OSError):
    """The connection is over: closed, or what came is no message."""


class DeniedError(WireError):
    """The other side does not know the secret, wants one, or speaks something else."""


class Wire:
    """A connection's bytes. Reading and writing may be done by two threads, each by one at a time.

    Every method raises `OSError` when the connection is over.

    Parameters
    ----------
    connection
        The socket, which the wire then owns.
    secret
        The shared secret, or None.
    """

    __slots__ = ("_in", "_nonce", "_out", "_receive_key", "_received", "_secret", "_send_key", "_sent", "_socket")

    def __init__(self, connection: socket.socket, secret: bytes | None) -> None:
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S // 3)
        self._socket = NonblockingSocket(connection)
        self._secret = secret
        self._nonce = b""
        self._in = bytearray()
        self._out = bytearray()
        self._send_key = self._receive_key = b""
        self._sent = self._received = 0

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._socket.fd

    @property
    def ended(self) -> bool:
        """Whether the other side has closed it."""
        try:
            return not self._socket.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close it; what the kernel took still goes out."""
        self._socket.close()

    # ---- the handshake

    def greet(self) -> None:
        """At the producer: say who speaks."""
        self._nonce = secrets.token_bytes(_NONCE_NBYTES)
        self._write(_MAGIC + bytes([self._secret is not None]) + self._nonce)

    def reply(self, name: bytes) -> bool:
        """At the consumer: answer the greeting; False while it is not here. Messages may be sent from then on.

        Raises
        ------
        DeniedError
            The producer wants a secret and there is none, or the other way round, or it is somebody else.
        """
        greeting = self._take(_GREETING_NBYTES, _MAGIC)
        if greeting is None:
            return False
        flag, theirs = greeting[len(_MAGIC)], greeting[len(_MAGIC) + 1 :]
        if flag != (self._secret is not None):
            raise DeniedError("one side has a secret, the other has none")
        ours = secrets.token_bytes(_NONCE_NBYTES)
        self._nonce = theirs + ours + name
        self._write(_MAGIC + name + ours + self._proof(b"consumer"))
        self._start(b"consumer", b"producer")
        return True

    def accept(self) -> bytes | None:
        """At the producer: take the consumer's reply and prove ourselves; return its name, None while it is not here.

        Raises
        ------
        DeniedError
        """
        reply = self._take(_REPLY_NBYTES, _MAGIC)
        if reply is None:
            return None
        _, name, theirs, proof = _split(reply, len(_MAGIC), NAME_NBYTES, _NONCE_NBYTES, _PROOF_NBYTES)
        self._nonce += theirs + name
        if not hmac.compare_digest(proof, self._proof(b"consumer")):
            self._write(_NO_PROOF)
            raise DeniedError("a consumer does not know the secret")
        self._write(self._proof(b"producer"))
        self._start(b"producer", b"consumer")
        return name

    def accepted(self) -> bool:
        """At the consumer: check the producer's proof; False while it is not here.

        Raises
        ------
        DeniedError
        """
        proof = self._take(_PROOF_NBYTES)
        if proof is None:
            return False
        if not hmac.compare_digest(proof, self._proof(b"producer")):
            raise DeniedError("the producer does not know the secret, or we do not")
        return True

    def _proof(self, by: bytes) -> bytes:
        if self._secret is None:
            return _NO_PROOF
        return hmac.digest(self._secret, by + self._nonce, hashlib.sha256)

    def _start(self, us: bytes, them: bytes) -> None:
        if self._secret is not None:
            self._send_key, self._receive_key = self._proof(b"key of " + us), self._proof(b"key of " + them)

    def _take(self, nbytes: int, magic: bytes = b"") -> bytes | None:
        """Take bytes of the handshake; what does not begin with the magic is refused before it is whole."""
        if len(self._in) < nbytes:
            self._in += self._read()
        if self._in[: len(magic)] != magic[: len(self._in)]:
            raise DeniedError("it does not speak this control protocol")
        if len(self._in) < nbytes:
            return None
        taken = bytes(self._in[:nbytes])
        del self._in[:nbytes]
        return taken

    # ---- messages

    @property
    def unsent(self) -> int:
        """Bytes that the kernel did not take yet: call `flush` when the socket is writable."""
        return len(self._out)

    def send(self, body: bytes) -> None:
        """Send a message, or as much of it as the kernel takes; the rest stays for `flush`."""
        if self._send_key:
            body += self._tag(self._send_key, self._sent, body)
            self._sent += 1
        self._write(_LENGTH.pack(len(body)) + body)

    def flush(self) -> None:
        """Send what was left over."""
        if self._out:
            try:
                sent = self._socket.send(bytes(self._out[:_READ_NBYTES]))
            except BlockingIOError:
                return
            del self._out[:sent]

    def receive(self, *, read: bool = True) -> memoryview | None:
        """Return the next message that is here, or None.

        Parameters
        ----------
        read
            Ask the kernel when none was read before.
        """
        while True:
            body = self._whole(self._in)
            if body is not None:
                body = memoryview(bytes(body))
                del self._in[: _LENGTH.size + len(body)]
                return self._checked(body)
            data = self._read() if read else b""
            if not data:
                return None
            if not self._in:
                body = self._whole(data)
                if body is not None and len(data) == _LENGTH.size + len(body):
                    return self._checked(body)
            self._in += data

    @staticmethod
    def _whole(data: bytes | bytearray) -> memoryview | None:
        """Return the first message in `data`, if all of it is there."""
        if len(data) < _LENGTH.size:
            return None
        (nbytes,) = _LENGTH.unpack_from(data)
        if nbytes > MAX_MESSAGE_NBYTES:
            raise WireError(f"a message of {nbytes:,} bytes")
        if len(data) < _LENGTH.size + nbytes:
            return None
        return memoryview(data)[_LENGTH.size : _LENGTH.size + nbytes]

    def _checked(self, body: memoryview) -> memoryview:
        if not self._receive_key:
            return body
        message, tag = body[:-_TAG_NBYTES], body[-_TAG_NBYTES:]
        if not hmac.compare_digest(tag, self._tag(self._receive_key, self._received, message)):
            raise WireError("a message with a wrong tag")
        self._received += 1
        return message

    @staticmethod
    def _tag(key: bytes, number: int, body: bytes | memoryview) -> bytes:
        tag = hashlib.blake2b(_NUMBER.pack(number), key=key, digest_size=_TAG_NBYTES)
        tag.update(body)
        return tag.digest()

    def _write(self, data: bytes) -> None:
        if self._out:
            self._out += data
            return
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self._out += data[sent:]

    def _read(self) -> bytes:
        """Read what is here; nothing when nothing is."""
        try:
            data = self._socket.sock.recv(_READ_NBYTES)
        except BlockingIOError:
            return b""
        if not data:
            raise WireError("closed by the other side")
        return data


def _split(data: bytes, *lengths: int) -> list[bytes]:
    parts, start = [], 0
    for length in lengths:
        parts.append(data[start : start + length])
        start += length
    return parts
