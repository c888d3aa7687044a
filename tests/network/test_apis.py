"""Every decoder against Kafka's own message schemas: it reads what brokers write, in each version.

Garbage is a ProtocolError or a plausible value, in bounded time and memory.
"""

from __future__ import annotations

import itertools
import random
import struct
from contextlib import suppress
from functools import partial

import pytest

from kafka_sink.errors import ProtocolError
from kafka_sink.network import apis, requests
from kafka_sink.records.encoder import MAX_RECORDS_PER_BATCH
from tests.support.effort import tries
from tests.support.network_harness import request, response_to
from tests.support.response_checks import EXPECTED, GIVEN, check, cost, every_version, given_for
from tests.support.schema_responses import FloodWriter, ResponseWriter, list_names, uvarint


def test_every_api_has_a_case() -> None:
    assert {apis.METADATA, *EXPECTED} == apis.APIS.keys()
    for key in apis.APIS:
        for version in every_version(key):
            writer = ResponseWriter(apis.APIS[key].name, version, random.Random(1))
            assert writer.flexible == (version >= apis.APIS[key].first_flexible)


EACH_API = pytest.mark.parametrize("key", apis.APIS, ids=lambda key: apis.APIS[key].name)


@EACH_API
def test_fuzz_what_brokers_write_is_read_and_nothing_that_is_cut_short(key: int) -> None:
    decode, name, given = apis.DECODERS[key], apis.APIS[key].name, given_for(key)
    for seed in range(tries(20)):
        chance = random.Random(seed)
        for version in every_version(key):
            values, payload = ResponseWriter(name, version, chance).response(**given)
            check(key, decode(version, payload, 0), values, version)
            with pytest.raises(ProtocolError, match=rf"{name} v\d+ .*(too many|cannot be read|at most)"):
                decode(version, payload + b"\7", 0)
            ends = chance.sample(range(len(payload)), 1) if seed else range(len(payload))
            for end in ends:
                with pytest.raises(ProtocolError, match=rf"{name} v\d+"):
                    decode(version, payload[:end], 0)


@EACH_API
def test_fuzz_damaged_responses_raise_nothing_but_a_protocol_error(key: int) -> None:
    decode = apis.DECODERS[key]
    for seed in range(tries(60)):
        chance = random.Random(seed)
        version = chance.choice(every_version(key))
        _, payload = ResponseWriter(apis.APIS[key].name, version, chance).response(**given_for(key))
        damaged = bytearray(payload)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.choice([0, 1, 0x7F, 0x80, 0xFE, 0xFF])
        for garbage in (bytes(damaged), chance.randbytes(chance.randrange(300)), b"\xff" * 300):
            with suppress(ProtocolError):
                decode(version, garbage, 0)


# An endless varint; as many elements as an int has; tagged fields everywhere.
BOMBS = (b"\xff", b"\x7f\xff\xff\xff", b"\x02\x01\x00", b"\0", b"\x01")


@EACH_API
def test_bombs_neither_hang_nor_swell(key: int) -> None:
    """Catches: a length of two thousand million in forty bytes, for which memory is allocated."""
    version, decode = apis.APIS[key].versions[1], apis.DECODERS[key]
    _, payload = ResponseWriter(apis.APIS[key].name, version, random.Random(1)).response(**GIVEN)
    for bomb, kept, length in itertools.product(BOMBS, (4, 5, 9, 13), (40, 500_000)):
        whole = payload[:kept] + bomb * (length // len(bomb))
        peak, spent_ms, _ = cost(lambda whole=whole: decode(version, whole, 0))
        assert peak <= 4 * len(whole) + 100_000, (bomb, kept, length)
        assert spent_ms < 5_000, (bomb, kept, length)


# -- what hostile responses cost, and what is refused before it costs any ------------------------------


COUNT = tries(1_500)
# What one byte of a response may cost, in memory and in processor time.
TIMES_ITS_SIZE, MS_A_MIB = 4, 50
# And what an element may that the request has named: there are no more of these than the client's own.
BYTES_ASKED, US_ASKED = 500, 10
# Processor time on a machine that others use.
SLOW = 5
GIVEN_FLOODED = {**GIVEN, "Host": lambda _: "h", "ErrorCode": lambda _: 0}


@EACH_API
def test_fuzz_no_list_of_any_response_costs_more_than_its_bytes_and_what_was_asked_for(key: int) -> None:
    """Catches: 8 MiB of topics without a name took 12 s and 796 MiB; an ApiVersions response cost 28 times
    its size, a list of coordinators 1.4 s a MiB."""
    decode, name = apis.DECODERS[key], apis.APIS[key].name
    for version in sorted(set(apis.APIS[key].versions)):
        for flooded in dict.fromkeys(list_names(name, version)):
            payload = FloodWriter(name, version, flooded, COUNT, 0).response(**GIVEN_FLOODED)[1]
            if len(payload) < COUNT:  # it is in another list, which must not be empty
                payload = FloodWriter(name, version, flooded, COUNT, 1).response(**GIVEN_FLOODED)[1]
            for asked in (0, 2 * COUNT):
                peak, spent_ms, refused = cost(partial(decode, version, payload, asked))
                # Thousands of brokers, and a thousand offsets, may come without a request for each.
                allowed = COUNT if flooded == "Brokers" else 0 if refused else asked
                most = TIMES_ITS_SIZE * len(payload) + BYTES_ASKED * allowed + 100_000
                assert peak <= most, (version, flooded, asked)
                most_ms = MS_A_MIB * len(payload) / 2**20 + US_ASKED * allowed / 1000
                assert spent_ms <= SLOW * most_ms + 20, (version, flooded, asked)


def test_partitions_in_any_order_cost_no_more() -> None:
    rows = list(range(5_000))
    random.Random(1).shuffle(rows)
    lists = uvarint(2) + struct.pack(">i", 1)
    body = b"".join(struct.pack(">hiii", 0, row, row, row) + lists * 2 + b"\1\0" for row in rows)
    head = bytes(4) + b"\0" + bytes(4) + b"\1" + b"\0" + bytes(4) + b"\2"
    topic = b"\0\0" + b"\2t" + bytes(16) + b"\0" + uvarint(len(rows) + 1) + body + bytes(4) + b"\0"
    payload = head + topic + b"\0"
    peak, spent_ms, refused = cost(lambda: requests.decode_metadata(12, payload, 1))
    assert not refused
    assert peak <= TIMES_ITS_SIZE * len(payload) + 100_000
    assert spent_ms <= SLOW * MS_A_MIB * len(payload) / 2**20 + 20
    (found,) = requests.decode_metadata(12, payload, 1).update.topics
    assert [one.leader for one in found.partitions] == sorted(rows)


def test_tagged_fields_without_end_are_refused() -> None:
    tags = uvarint(200_000) + b"\x7f\0" * 200_000
    payload = bytes(4) + tags + bytes(16)
    peak, spent_ms, refused = cost(lambda: requests.decode_init_producer_id(4, payload))
    assert refused
    assert (peak, spent_ms) < (100_000, 50)


def test_topics_that_nobody_asked_for_cost_nothing() -> None:
    nameless = FloodWriter("Metadata", 12, "Topics", 3_000, 0).response(**GIVEN_FLOODED)[1]
    payload = nameless + bytes(8 * 2**20)
    with pytest.raises(ProtocolError, match="has 3000 topics; at most 1005 are expected"):
        requests.decode_metadata(12, payload, 5)
    peak, _, _ = cost(lambda: requests.decode_metadata(12, payload, 5))
    assert peak < 100_000
    body = [requests.encode_metadata(12, ("t",), False)]
    with pytest.raises(ProtocolError, match="has 3000 topics"):
        response_to(request(apis.METADATA, 12, body, asked=1), nameless[4:])


def test_a_response_is_bounded_by_its_request() -> None:
    """Whatever brokers refuse, a response has less than 70 MB for all the records of a request."""
    produced = apis.APIS[apis.PRODUCE]
    assert produced.largest_response(2**20, 2, 10_000) < 8 * 2**20
    assert produced.largest_response(2**20, 2, MAX_RECORDS_PER_BATCH) < 70_000_000
    assert produced.largest_response(1_000, 2, 1) < 2 * 2**20
    assert max(api.largest_response(1_000, 1, 0) for api in apis.APIS.values()) < 65 * 2**20
