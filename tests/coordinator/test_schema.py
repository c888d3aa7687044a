"""Messages: what is declared is what comes out, whatever a peer sends."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import tracemalloc
import zlib
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import pytest

import kafka_sink.coordinator
from kafka_sink.coordinator import schema
from kafka_sink.coordinator.schema import (
    MAX_MESSAGE_BYTES,
    AtMost,
    Channel,
    Count,
    Message,
    Ms,
    NodeId,
    Text,
    Within,
    cut,
    decode,
    deliver,
    encode,
    message,
    receives,
)
from kafka_sink.errors import ProtocolError


@dataclass(frozen=True)
class _Inner:
    name: Text
    ages: Annotated[dict[NodeId, Ms], AtMost(2)]


class _Pair(NamedTuple):
    name: Text
    is_new: bool


@message
class _Sample:
    """One of everything."""

    count: Count
    names: Annotated[tuple[Text, ...], AtMost(3)]
    inner: _Inner
    pairs: Annotated[tuple[_Pair, ...], AtMost(2)] = ()
    counts: Annotated[tuple[Count, ...], AtMost(4)] = ()
    share: Annotated[float, Within(0, 1)] = 0.5
    text: Annotated[str, AtMost(2**20)] = ""
    left_ms: Ms | None = None
    number: int | float = 0


SAMPLE = _Sample(
    3,
    ("a", "b"),
    _Inner("n", {7: 1.5}),
    (_Pair("c", False), _Pair("d", True)),
    (1, 2),
)


def test_a_message_comes_out_as_it_went_in() -> None:
    assert decode(encode(SAMPLE)) == SAMPLE
    assert isinstance(decode(encode(SAMPLE)).pairs[1], _Pair)  # type: ignore[attr-defined]
    for number in (7, 7.5):
        found = decode(encode(_Sample(0, (), _Inner("", {}), number=number)))
        assert isinstance(found, _Sample)
        assert (found.number, type(found.number)) == (number, type(number))
    large = _Sample(0, (), _Inner("", {}), text="é" * 300_000, left_ms=2.0)
    assert len(encode(large)) < 20_000
    assert decode(encode(large)) == large


def test_fields_with_defaults_may_be_missing() -> None:
    assert decode(b'["_Sample",0,[],["n",{}]]') == _Sample(0, (), _Inner("n", {}))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ('-1,[],["n",{}]', "count: not an integer from 0"),
        ('true,[],["n",{}]', "count"),
        ('9223372036854775808,[],["n",{}]', "count"),
        ('0,["a","b","c","d"],["n",{}]', "names: not an array, or longer than 3"),
        ('0,[1],["n",{}]', "names: not a text"),
        ('0,[],["\\ud800",{}]', "inner: name: a text that UTF-8 cannot encode"),
        ('0,[],["n",{"x":1}]', "inner: ages"),
        ('0,[],["n",{"1":NaN}]', "inner: ages: not a number"),
        ('0,[],["n",{"1":1,"2":1,"3":1}]', "inner: ages: not an object, or longer than 2"),
        ('0,[],"n"', "inner: not an array of 2"),
        ('0,[],["n",{}],[[1]]', "pairs: not an array of 2"),
        ('0,[],["n",{}],[["c",1]]', "pairs: is_new: neither true nor false"),
        ('0,[],["n",{}],[],[1,-2]', "counts: not an integer"),
        ('0,[],["n",{}],[],[true]', "counts: not an integer"),
        ('0,[],["n",{}],[],[],1.5', "share: not a number from 0 to 1"),
        ('0,[],["n",{}],[],[],0.5,"",Infinity', "left_ms: not a number"),
        ('0,[],["n",{}],[],[],0.5,"",null,"1"', "number: not a number"),
        ('0,[],["n",{}],[],[],0.5,"",null,1,1', "not an array of 3 to 9 fields"),
        ("0,[]", "not an array of 3 to 9 fields"),
    ],
)
def test_what_is_outside_the_bounds_is_refused_by_field(fields: str, says: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(f'["_Sample",{fields}]'.encode())
    assert str(caught.value).startswith(f"invalid _Sample: {says}")


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"[1]", b'["Nobody"]', b"\xff", b"[" * 100_000, b"z", b"zabc", b'["_Sample"'],
)  # fmt: skip
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


def test_a_message_that_unpacks_to_far_more_is_refused() -> None:
    """Catches: 64 KiB that became 64 MiB of JSON, and ten times that as objects."""
    bomb = b"z" + zlib.compress(b'["_Sample",' + b"0," * 8_000_000 + b"0]", 1)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=f"more than {MAX_MESSAGE_BYTES} bytes"):
            decode(bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * MAX_MESSAGE_BYTES


def test_what_is_too_large_or_no_number_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="larger than the bound"):
        encode(_Sample(0, (), _Inner("", {}), text="x" * MAX_MESSAGE_BYTES))
    with pytest.raises(ProtocolError, match="cannot send _Sample"):
        encode(_Sample(0, (), _Inner("", {1: math.nan})))


def test_a_text_is_cut_to_what_a_field_takes() -> None:
    assert cut("x" * 400) == "x" * 297 + "..."
    assert cut("a\ud800b", 10) == "a?b"


def test_a_text_without_bound_cannot_be_declared() -> None:
    @message
    class _Unbounded:
        text: str

    with pytest.raises(TypeError, match="needs AtMost"):
        decode(b'["_Unbounded","x"]')
    with pytest.raises(TypeError, match="two messages"):
        message(type("_Unbounded", (), {}))
    schema.MESSAGES.pop("_Unbounded")


def test_every_message_of_the_coordinator_has_bounds() -> None:
    for found in pkgutil.walk_packages(kafka_sink.coordinator.__path__, "kafka_sink.coordinator."):
        importlib.import_module(found.name)
    assert len(schema.MESSAGES) > 20
    for name in schema.MESSAGES:
        # Raises TypeError where a bound is missing.
        with pytest.raises(ProtocolError, match="not an array of"):
            decode(json.dumps([name, *range(100)]).encode())


def test_a_message_goes_to_the_method_that_takes_it_and_to_no_other() -> None:
    class Taker(Channel):
        def __init__(self) -> None:
            super().__init__()
            self.taken: list[Message] = []

        @receives(_Sample)
        def on_sample(self, message: _Sample, now_ms: float) -> None:
            self.taken.append(message)

    taker = Taker()
    deliver(taker, SAMPLE, 1.0)
    assert taker.taken == [SAMPLE]
    with pytest.raises(ProtocolError, match="Alive is not for Taker"):
        deliver(taker, schema.Alive(), 1.0)
