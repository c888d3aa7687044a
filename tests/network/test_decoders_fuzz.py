"""Every decoder against Kafka's own message schemas: it reads what brokers write, in each version."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from kafka_sink.errors import ProtocolError
from kafka_sink.network import apis
from tests.support.effort import tries
from tests.support.response_checks import CASES, GIVEN, every_version
from tests.support.schema_responses import ResponseWriter


def test_every_api_has_a_case() -> None:
    assert CASES.keys() == apis.APIS.keys()
    for key in CASES:
        for version in every_version(key):
            writer = ResponseWriter(apis.APIS[key].name, version, random.Random(1))
            assert writer.flexible == (version >= apis.APIS[key].first_flexible)


@pytest.mark.parametrize("key", CASES, ids=lambda key: apis.APIS[key].name)
def test_what_brokers_write_is_read_and_nothing_that_is_cut_short(key: int) -> None:
    (first, last), (check, given) = apis.APIS[key].versions, CASES[key]
    decode = apis.DECODERS[key]
    for seed in range(tries(20)):
        chance = random.Random(seed)
        for version in range(first, last + 1):
            writer = ResponseWriter(apis.APIS[key].name, version, chance)
            values, payload = writer.response(**GIVEN, **given)
            check(decode(version, payload, 0), values, version)
            with pytest.raises(ProtocolError, match=r"bytes too many|cannot be read|at most"):
                decode(version, payload + b"\7", 0)
            with pytest.raises(ProtocolError):
                decode(version, payload[: chance.randint(0, len(payload) - 1)], 0)


@pytest.mark.parametrize("key", CASES, ids=lambda key: apis.APIS[key].name)
def test_fuzz_damaged_responses_raise_nothing_but_a_protocol_error(key: int) -> None:
    (first, last), (_, given) = apis.APIS[key].versions, CASES[key]
    decode = apis.DECODERS[key]
    for seed in range(tries(30)):
        chance = random.Random(seed)
        version = chance.randint(first, last)
        _, payload = ResponseWriter(apis.APIS[key].name, version, chance).response(**GIVEN, **given)
        damaged = bytearray(payload)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.choice([0, 1, 0x7F, 0x80, 0xFF])
        with suppress(ProtocolError):
            decode(version, bytes(damaged), 0)
