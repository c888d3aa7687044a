"""Varints of single numbers, as in Protocol Buffers, Avro and Kafka: seven bits in each byte, the lowest bits
first. Signed numbers are zigzag-encoded: 0, -1, 1, -2 become 0, 1, 2, 3.
"""

from __future__ import annotations

from functools import lru_cache

_ONE_BYTE = [bytes([value]) for value in range(0x80)]
# The longest varint of 64 bits.
MAX_BYTES = 10


def unsigned(value: int) -> bytes:
    # Most numbers take one or two bytes, and a request has one or two numbers for each batch.
    if value <= 0x7F:
        return _ONE_BYTE[value]
    if value <= 0x3FFF:
        return bytes((value & 0x7F | 0x80, value >> 7))
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@lru_cache(maxsize=4096)
def signed(value: int) -> bytes:
    return unsigned((value << 1) ^ (value >> 63))


def read_unsigned(
    data: bytes | bytearray | memoryview, at: int, max_bytes: int = MAX_BYTES
) -> tuple[int, int]:
    """The number at position ``at``, and the position after it. Raises IndexError at the end of the data, and
    ValueError for a varint of more than ``max_bytes``."""
    value = 0
    for index in range(max_bytes):
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise ValueError(f"a varint has more than {max_bytes} bytes")


def read_signed(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int]:
    value, at = read_unsigned(data, at)
    return (value >> 1) ^ -(value & 1), at
