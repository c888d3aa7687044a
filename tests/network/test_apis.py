"""Every decoder against Kafka's own message schemas: it reads what brokers write, in each version.

Garbage is a ProtocolError or a plausible value, in bounded time and memory.
"""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from kafka_sink.errors import ProtocolError
from kafka_sink.network import apis
from tests.support.effort import tries
from tests.support.response_checks import CASES, GIVEN, cost, every_version
from tests.support.schema_responses import ResponseWriter


def test_every_api_has_a_case() -> None:
    assert CASES.keys() == apis.APIS.keys()
    for key in CASES:
        for version in every_version(key):
            writer = ResponseWriter(apis.APIS[key].name, version, random.Random(1))
            assert writer.flexible == (version >= apis.APIS[key].first_flexible)


EACH_API = pytest.mark.parametrize("key", CASES, ids=lambda key: apis.APIS[key].name)


@EACH_API
def test_fuzz_what_brokers_write_is_read_and_nothing_that_is_cut_short(key: int) -> None:
    (first, last), (check, given) = apis.APIS[key].versions, CASES[key]
    decode, name = apis.DECODERS[key], apis.APIS[key].name
    for seed in range(tries(20)):
        chance = random.Random(seed)
        for version in range(first, last + 1):
            values, payload = ResponseWriter(name, version, chance).response(**GIVEN, **given)
            check(decode(version, payload, 0), values, version)
            with pytest.raises(ProtocolError, match=rf"{name} v\d+ .*(too many|cannot be read|at most)"):
                decode(version, payload + b"\7", 0)
            ends = chance.sample(range(len(payload)), 1) if seed else range(len(payload))
            for end in ends:
                with pytest.raises(ProtocolError, match=rf"{name} v\d+"):
                    decode(version, payload[:end], 0)


@EACH_API
def test_fuzz_damaged_responses_raise_nothing_but_a_protocol_error(key: int) -> None:
    (first, last), (_, given) = apis.APIS[key].versions, CASES[key]
    decode = apis.DECODERS[key]
    for seed in range(tries(60)):
        chance = random.Random(seed)
        version = chance.randint(first, last)
        _, payload = ResponseWriter(apis.APIS[key].name, version, chance).response(**GIVEN, **given)
        damaged = bytearray(payload)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.choice([0, 1, 0x7F, 0x80, 0xFE, 0xFF])
        for garbage in (bytes(damaged), chance.randbytes(chance.randrange(300)), b"\xff" * 300):
            with suppress(ProtocolError):
                decode(version, garbage, 0)


BOMBS = {
    "an endless varint": b"\xff",
    "as many elements as an int has": b"\x7f\xff\xff\xff",
    "tagged fields everywhere": b"\x02\x01\x00",
    "zeros": b"\0",
    "ones": b"\x01",
}


@EACH_API
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_neither_hang_nor_swell(key: int, bomb: str) -> None:
    """Catches: a length of two thousand million in forty bytes, for which memory is allocated."""
    version, decode = apis.APIS[key].versions[1], apis.DECODERS[key]
    _, payload = ResponseWriter(apis.APIS[key].name, version, random.Random(1)).response(**GIVEN)
    for kept in (4, 5, 9, 13):
        for length in (40, 500_000):
            whole = payload[:kept] + BOMBS[bomb] * (length // len(BOMBS[bomb]))
            peak, spent_ms, _ = cost(lambda whole=whole: decode(version, whole, 0))
            assert peak <= 4 * len(whole) + 100_000
            assert spent_ms < 5_000
