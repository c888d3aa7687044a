"""The wire protocol between tasks and the coordinator: authenticated frames of JSON.

A frame is a length (4 bytes, big-endian, without itself), a tag (16 bytes) and one or more JSON objects in
UTF-8, one a line (see lines). The first three frames are the challenge in both directions. Their tags are
zeros:

    server -> client   {"version": 2, "nonce": hex}
    client -> server   {"nonce": hex, "proof": HMAC(secret, "client", both nonces)}
    server -> client   {"proof": HMAC(secret, "server", both nonces)}

In all later frames the tag is an HMAC of direction, frame number and payload, under a key of this connection.
Nobody on the network can add, change, repeat or reorder frames. Frames are not encrypted, because no message
carries a secret.

Pure: bytes in, values out.
"""

from __future__ import annotations

import hmac
import json
import secrets
import struct
from typing import Any

from kafka_sink.errors import ProtocolError

VERSION = 2
# The largest frame read from a peer that has not yet proved that it knows the secret.
MAX_HANDSHAKE_BYTES = 512
# Enough for 16,000 topic names of maximum length, or the metadata of some 50,000 partitions.
MAX_FRAME_BYTES = 4 * 1024 * 1024
SECRET_BYTES = 32

_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_TAG_BYTES = 16
_NO_TAG = bytes(_TAG_BYTES)
_NONCE_BYTES = 16

Message = dict[str, Any]


class FrameReader:
    """Splits a stream of bytes into frames. ``max_bytes`` bounds the next frame; callers may raise it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held = bytearray()

    @property
    def held(self) -> int:
        """Bytes received that ``next_frame`` has not returned yet."""
        return len(self._held)

    @property
    def has_frame(self) -> bool:
        """Whether a complete frame is available."""
        if len(self._held) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(self._held)
        return bool(len(self._held) >= _LENGTH.size + length)

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._held += data

    def next_frame(self) -> bytes | None:
        """Tag and payload of the next frame, or None while it is incomplete.

        Raises ProtocolError for a frame that is too large or too small, as soon as its length is known.
        """
        if len(self._held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._held)
        if not _TAG_BYTES < length <= self.max_bytes:
            raise ProtocolError(
                f"a frame has {length} bytes; allowed are {_TAG_BYTES + 1} to {self.max_bytes}"
            )
        end = _LENGTH.size + length
        if len(self._held) < end:
            return None
        frame = bytes(self._held[_LENGTH.size : end])
        del self._held[:end]
        return frame


class Session:
    """One end of a connection: the challenge, then tagged frames. ``role``: "client" or "server".

    Methods raise ProtocolError for invalid data from the other end. Callers then close the connection.
    """

    def __init__(self, secret: bytes, role: str) -> None:
        self._secret = secret
        self._ours, self._theirs = ("client", "server") if role == "client" else ("server", "client")
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._nonces = b""
        self._key: bytes | None = None
        self._sent = self._received = 0

    def __repr__(self) -> str:
        return f"Session({self._ours})"

    @property
    def established(self) -> bool:
        """Whether the other end has proved that it knows the secret."""
        return self._key is not None

    # -- challenge ----------------------------------------------------------------------------------

    def greeting(self) -> bytes:
        """The server's first frame."""
        return _frame(_NO_TAG, {"version": VERSION, "nonce": self._nonce.hex()})

    def reply_to_greeting(self, frame: bytes) -> bytes:
        """The client's proof."""
        message = _plain(frame)
        if message.get("version") != VERSION:
            raise ProtocolError(
                f"the coordinator uses protocol version {message.get('version')!r} instead of {VERSION}"
            )
        self._nonces = _nonce(message) + self._nonce
        return _frame(_NO_TAG, {"nonce": self._nonce.hex(), "proof": self._proof(self._ours)})

    def reply_to_proof(self, frame: bytes) -> bytes:
        """The server's proof, after verifying the client's."""
        message = _plain(frame)
        self._nonces = self._nonce + _nonce(message)
        self._verify(message)
        return _frame(_NO_TAG, {"proof": self._proof(self._ours)})

    def verify_proof(self, frame: bytes) -> None:
        """Verify the server's proof: the client's last step."""
        self._verify(_plain(frame))

    def _proof(self, role: str) -> str:
        return self._digest(role).hex()

    def _digest(self, label: str) -> bytes:
        return hmac.digest(self._secret, label.encode() + b"\0" + self._nonces, "sha256")

    def _verify(self, message: Message) -> None:
        proof = message.get("proof")
        if not isinstance(proof, str) or not proof.isascii():
            raise ProtocolError("the other end sent no proof")
        if not hmac.compare_digest(proof, self._proof(self._theirs)):
            raise ProtocolError("the other end does not know the secret")
        self._key = self._digest("session")

    # -- messages -----------------------------------------------------------------------------------

    def encode(self, message: Message) -> bytes:
        """The next frame. Raises ProtocolError for a message that is too large, and then changes nothing."""
        return self.encode_payload(_dump(message))

    def encode_payload(self, payload: bytes) -> bytes:
        """The next frame, with encoded lines. Raises as ``encode``."""
        return b"".join(self.encode_parts(payload, b""))

    def encode_parts(self, start: bytes, end: bytes) -> tuple[bytes, bytes]:
        """The next frame, with a payload in two parts. The second part is returned as it is, so that peers
        which receive the same content share one copy. Raises as ``encode``."""
        length = len(start) + len(end)
        if _TAG_BYTES + length > MAX_FRAME_BYTES:
            raise ProtocolError(
                f"a message of {length} bytes is larger than the bound of {MAX_FRAME_BYTES} bytes"
            )
        tag = self._tag(self._ours, self._sent, start, end)
        self._sent += 1
        return _LENGTH.pack(_TAG_BYTES + length) + tag + start, end

    def decode(self, frame: bytes) -> Message:
        """The message of the next frame, which holds one, after verifying its tag."""
        return parse(self.payload(frame))

    def payload(self, frame: bytes) -> bytes:
        """The lines of the next frame, after verifying its tag."""
        payload = frame[_TAG_BYTES:]
        if not hmac.compare_digest(frame[:_TAG_BYTES], self._tag(self._theirs, self._received, payload)):
            raise ProtocolError("a frame's tag is wrong")
        self._received += 1
        return payload

    def _tag(self, role: str, number: int, payload: bytes, end: bytes = b"") -> bytes:
        if self._key is None:
            raise ProtocolError("the challenge is not complete")
        head = role.encode() + b"\0" + _NUMBER.pack(number)
        if not end:
            return hmac.digest(self._key, head + payload, "sha256")[:_TAG_BYTES]
        digest = hmac.new(self._key, head, "sha256")
        digest.update(payload)
        digest.update(end)
        return digest.digest()[:_TAG_BYTES]


def _frame(tag: bytes, message: Message) -> bytes:
    payload = _dump(message)
    return _LENGTH.pack(len(tag) + len(payload)) + tag + payload


def _plain(frame: bytes) -> Message:
    return parse(frame[_TAG_BYTES:])


def _nonce(message: Message) -> bytes:
    try:
        nonce = bytes.fromhex(message["nonce"])
    except (KeyError, TypeError, ValueError):
        raise ProtocolError("the other end sent no valid nonce") from None
    if len(nonce) != _NONCE_BYTES:
        raise ProtocolError("the other end sent a nonce of the wrong length")
    return nonce


def _dump(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def parse(payload: bytes) -> Message:
    """A JSON object. Raises ProtocolError."""
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError):
        raise ProtocolError("a frame contains invalid JSON") from None
    if not isinstance(message, dict):
        raise ProtocolError("a frame contains JSON that is not an object")
    return message
