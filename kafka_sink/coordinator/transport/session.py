"""The wire protocol between tasks and the coordinator: encrypted frames of JSON.

A frame is a length (4 bytes, big-endian, without itself) and one or more JSON objects in UTF-8, one a line
(see message_format). The first three frames are the challenge in both directions, in clear:

    server -> client   {"version": 3, "nonce": hex}
    client -> server   {"nonce": hex, "proof": HMAC(secret, "client", both nonces)}
    server -> client   {"proof": HMAC(secret, "server", both nonces)}

All later frames are encrypted by AES-256-GCM, and end in its tag of 16 bytes. Each direction of each
connection has a key of its own, HMAC(secret, direction + " key", both nonces), and counts its frames, which
gives the nonces. Nobody on the network can read, add, change, repeat or reorder frames.

Pure: bytes in, values out.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kafka_sink.errors import ProtocolError

VERSION = 3
# The largest frame read from a peer that has not yet proved that it knows the secret.
MAX_HANDSHAKE_BYTES = 512
# Enough for 16,000 topic names of maximum length, or the metadata of some 50,000 partitions.
MAX_FRAME_BYTES = 4 * 1024 * 1024
# The largest frame that the coordinator takes.
MAX_REQUEST_BYTES = 2 * 1024 * 1024
SECRET_BYTES = 32

# json.dumps would make one for each message.
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_LENGTH = struct.Struct(">I")
# AES-GCM's nonce of 12 bytes: a frame's number.
_NONCE = struct.Struct(">4xQ")
_TAG_BYTES = 16
# What encryption adds to a frame's payload.
OVERHEAD_BYTES = _LENGTH.size + _TAG_BYTES
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
        self._held += data

    def next_frame(self) -> bytes | None:
        """The next frame without its length, or None while it is incomplete.

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
    """One end of a connection: the challenge, then encrypted frames. ``role``: "client" or "server".

    Methods raise ProtocolError for invalid data from the other end. Callers then close the connection.
    """

    def __init__(self, secret: bytes, role: str) -> None:
        self._secret = secret
        self._ours, self._theirs = ("client", "server") if role == "client" else ("server", "client")
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._nonces = b""
        # Of both directions; none before the other end has proved itself.
        self._our_key = b""
        self._seal: AESGCM | None = None
        self._open: AESGCM | None = None
        self._sent = self._received = 0
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"Session({self._ours})"

    @property
    def established(self) -> bool:
        """Whether the other end has proved that it knows the secret."""
        return self._open is not None

    # -- challenge ----------------------------------------------------------------------------------

    def greeting(self) -> bytes:
        """The server's first frame."""
        return _frame({"version": VERSION, "nonce": self._nonce.hex()})

    def reply_to_greeting(self, frame: bytes) -> bytes:
        """The client's proof."""
        message = parse(frame)
        if message.get("version") != VERSION:
            raise ProtocolError(
                f"the coordinator uses protocol version {message.get('version')!r} instead of {VERSION}"
            )
        self._nonces = _nonce(message) + self._nonce
        return _frame({"nonce": self._nonce.hex(), "proof": self._proof(self._ours)})

    def reply_to_proof(self, frame: bytes) -> bytes:
        """The server's proof, after verifying the client's."""
        message = parse(frame)
        self._nonces = self._nonce + _nonce(message)
        self._verify(message)
        return _frame({"proof": self._proof(self._ours)})

    def verify_proof(self, frame: bytes) -> None:
        """Verify the server's proof: the client's last step."""
        self._verify(parse(frame))

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
        self._our_key = self._digest(f"{self._ours} key")
        self._seal, self._open = AESGCM(self._our_key), AESGCM(self._digest(f"{self._theirs} key"))

    # -- messages -----------------------------------------------------------------------------------

    def encode(self, message: Message) -> bytes:
        """The next frame. Raises ProtocolError for a message that is too large, and then changes nothing."""
        return self.encode_payload(dump(message))

    def encode_payload(self, payload: bytes) -> bytes:
        """The next frame, with encoded lines. Raises as ``encode``."""
        seal = self._checked_seal(len(payload))
        return _LENGTH.pack(len(payload) + _TAG_BYTES) + seal.encrypt(self._next_nonce(), payload, None)

    def encode_in_pieces(self, start: bytes, end: bytes, piece_bytes: int) -> Iterator[bytes]:
        """The next frame, with a payload in two parts, in pieces that are encrypted when they are taken.

        So peers that are sent the same ``end`` share one copy of it until then. All must be taken before
        another frame is encoded. Raises as ``encode``.
        """
        if len(start) + len(end) <= piece_bytes:
            return iter((self.encode_payload(start + end),))
        self._checked_seal(len(start) + len(end))
        return _in_pieces(self._our_key, self._next_nonce(), start, end, piece_bytes)

    def _checked_seal(self, length: int) -> AESGCM:
        if self._seal is None:
            raise ProtocolError("the challenge is not complete")
        if _TAG_BYTES + length > MAX_FRAME_BYTES:
            raise ProtocolError(
                f"a message of {length} bytes is larger than the bound of {MAX_FRAME_BYTES} bytes"
            )
        return self._seal

    def _next_nonce(self) -> bytes:
        # Two frames under one key and number would give both away.
        if os.getpid() != self._pid:
            raise ProtocolError("a forked process has no connection of its own yet")
        self._sent += 1
        return _NONCE.pack(self._sent)

    def decode(self, frame: bytes) -> Message:
        """The message of the next frame, which holds one."""
        return parse(self.payload(frame))

    def payload(self, frame: bytes) -> bytes:
        """The lines of the next frame. Raises ProtocolError for any frame but the other end's next."""
        if self._open is None:
            raise ProtocolError("the challenge is not complete")
        try:
            payload = self._open.decrypt(_NONCE.pack(self._received + 1), frame, None)
        except InvalidTag:
            raise ProtocolError("a frame's tag is wrong") from None
        self._received += 1
        return payload


def _in_pieces(key: bytes, nonce: bytes, start: bytes, end: bytes, piece_bytes: int) -> Iterator[bytes]:
    """Pieces of less than twice ``piece_bytes``."""
    # Only the coordinator has use for it.
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    encryptor = Cipher(algorithms.AES(key), modes.GCM(nonce)).encryptor()
    piece = _LENGTH.pack(len(start) + len(end) + _TAG_BYTES)
    for part in (memoryview(start), memoryview(end)):
        for at in range(0, len(part), piece_bytes):
            piece += encryptor.update(part[at : at + piece_bytes])
            if len(piece) >= piece_bytes:
                yield piece
                piece = b""
    encryptor.finalize()
    yield piece + encryptor.tag


def _frame(message: Message) -> bytes:
    payload = dump(message)
    return _LENGTH.pack(len(payload)) + payload


def _nonce(message: Message) -> bytes:
    try:
        nonce = bytes.fromhex(message["nonce"])
    except (KeyError, TypeError, ValueError):
        raise ProtocolError("the other end sent no valid nonce") from None
    if len(nonce) != _NONCE_BYTES:
        raise ProtocolError("the other end sent a nonce of the wrong length")
    return nonce


def dump(message: Mapping[str, Any]) -> bytes:
    """JSON without spaces."""
    return _ENCODER.encode(message).encode()


def parse(payload: bytes) -> Message:
    """A JSON object. Raises ProtocolError."""
    try:
        message = json.loads(payload.decode())
    except (ValueError, RecursionError):
        raise ProtocolError("a frame contains invalid JSON") from None
    if not isinstance(message, dict):
        raise ProtocolError("a frame contains JSON that is not an object")
    return message
