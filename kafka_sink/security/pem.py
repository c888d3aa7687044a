"""PEM texts taken apart as leniently as Java does: line ends may have become spaces in an option."""

from __future__ import annotations

import base64
import binascii
import re
from typing import NamedTuple

_BLOCK = re.compile(
    rb"-{3,}BEGIN (?P<label>[A-Z0-9 ]+?)-{3,}(?P<body>.*?)-{3,}END (?P=label)-{3,}", re.DOTALL
)
_HEADERS = re.compile(rb"^\s*(?:[A-Za-z-]+:[^\n]*\r?\n)+\s*\n")


class Block(NamedTuple):
    """``label`` as CERTIFICATE; ``pem`` in the form that every reader takes."""

    label: str
    pem: bytes

    def __repr__(self) -> str:
        return f"Block({self.label})"


def blocks(text: bytes) -> list[Block]:
    """All blocks in their order. Raises ValueError for a block whose body is no base64."""
    found = [_block(match) for match in _BLOCK.finditer(text)]
    for one in found:
        # Here, so that no frame of the error's traceback holds a key.
        if not one.pem:
            raise ValueError(f"its {one.label} block is not base64")
    return found


def _block(match: re.Match[bytes]) -> Block:
    """Without its ``pem`` where the body is no base64."""
    label, body = match["label"].strip(), match["body"]
    if headers := _HEADERS.match(body):
        # The older form of encrypted keys: Proc-Type and DEK-Info need their lines.
        head, body = headers.group().strip() + b"\n\n", body[headers.end() :]
    else:
        head = b""
    packed = b"".join(body.split())
    try:
        base64.b64decode(packed, validate=True)
    except binascii.Error:
        return Block(label.decode(), b"")
    lines = b"\n".join(packed[at : at + 64] for at in range(0, len(packed), 64))
    pem = b"-----BEGIN " + label + b"-----\n" + head + lines + b"\n-----END " + label + b"-----\n"
    return Block(label.decode(), pem)
