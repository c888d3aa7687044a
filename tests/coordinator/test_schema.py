"""Messages: what is declared is what comes out, whatever a peer sends."""

from __future__ import annotations

import importlib
import math
import pkgutil
import zlib
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import pytest
from msgspec import Meta, inspect

import kafka_sink.coordinator
from kafka_sink.coordinator import schema
from kafka_sink.coordinator.schema import (
    MAX_MESSAGE_BYTES,
    Channel,
    Count,
    Message,
    Ms,
    NodeId,
    Structure,
    Text,
    cut,
    decode,
    deliver,
    encode,
    receives,
)
from kafka_sink.errors import ProtocolError
from tests.support.footprint import traced


class _Inner(Structure, frozen=True):
    name: Text
    ages: Annotated[dict[NodeId, Ms], Meta(max_length=2)]


class _Pair(NamedTuple):
    name: Text
    is_new: bool


class _Sample(Message, frozen=True):
    """One of everything."""

    count: Count
    names: Annotated[tuple[Text, ...], Meta(max_length=3)]
    inner: _Inner
    pairs: Annotated[tuple[_Pair, ...], Meta(max_length=2)] = ()
    counts: Annotated[tuple[Count, ...], Meta(max_length=4)] = ()
    share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    text: Annotated[str, Meta(max_length=2**20)] = ""
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
    assert decode(b'_Sample {"count":0,"names":[],"inner":{"name":"n","ages":{}}}') == _Sample(
        0, (), _Inner("n", {})
    )


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("count", "-1", "`int` >= 0"),
        ("count", "true", "`int`, got `bool`"),
        ("count", "1.0", "`int`, got `float`"),
        ("count", "9223372036854775808", "`int` <= 9223372036854775807"),
        ("count", "9" * 4000, "`int` <= "),
        ("count", "null", "`int`"),
        ("names", '["a","b","c","d"]', "`array` of length <= 3"),
        ("names", "[1]", "`str`"),
        ("names", f'["{"x" * 301}"]', "`str` of length <= 300"),
        ("inner.name", '"\\ud800"', ""),
        ("inner.name", '"\\udc00\\ud800"', ""),
        ("inner.name", '"\udced\udca0\udc80"', ""),
        ("inner.ages", '{"x":1}', "`int`"),
        ("inner.ages", '{"1":true}', "`float`"),
        ("inner.ages", '{"1":NaN}', ""),
        ("inner.ages", '{"1":1e999}', ""),
        ("inner.ages", '{"1":' + "9" * 400 + "}", ""),
        ("inner.ages", '{"1":1,"2":1,"3":1}', "`object` of length <= 2"),
        ("inner.ages", "[]", "`object`"),
        ("inner.else", "1", "unknown field `else`"),
        ("else", "1", "unknown field `else`"),
        ("x" * 100_000, "1", "unknown field `xxx"),
        ("else", "[" * 100_000, ""),
        ("pairs", '[["c"]]', "`array` of length 2"),
        ("pairs", '[["c",true,1]]', "`array` of length 2"),
        ("pairs", '[["c",1]]', "`bool`"),
        ("counts", "[1,-2]", "`int` >= 0"),
        ("share", "1.5", "`float` <= 1.0"),
        ("left_ms", "Infinity", ""),
        ("left_ms", "-0.1", "`float` >= 0.0"),
        ("number", '"1"', "`int | float`"),
    ],
)
def test_values_outside_their_bounds_are_rejected_by_field(field: str, value: str, says: str) -> None:
    """``says``: "" where it is not JSON, which the whole message is refused for."""
    outer, _, name = field.rpartition(".")
    inner = {"name": '"n"', "ages": "{}"} | ({name: value} if outer else {})
    fields = {"count": "0", "names": "[]", "inner": _json(inner)} | ({} if outer else {name: value})
    with pytest.raises(ProtocolError) as caught:
        decode(f"_Sample {_json(fields)}".encode(errors="surrogateescape"))
    text = str(caught.value)
    assert text.startswith("invalid _Sample: ")
    assert says in text
    assert name[:3] in text or not says
    assert len(text) < 250, "what a peer sent is cut"


def _json(fields: dict[str, str]) -> str:
    return "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"


def test_the_last_of_two_equal_keys_counts() -> None:
    twice = b'_Sample {"count":0,"count":1,"names":[],"inner":{"name":"n","ages":{"1":1,"1":2,"01":3}}}'
    with pytest.raises(ProtocolError):
        decode(twice)
    assert decode(twice.replace(b',"01":3', b"")) == _Sample(1, (), _Inner("n", {1: 2.0}))


def test_invalid_messages_are_rejected() -> None:
    for data in (
        b"", b" ", b"{}", b"[]", b"Nobody {}", b"\xff {}", b"[" * 100_000, b"\0", b"\0abc", b"_Sample",
        b"_Sample ", b"_Sample []", b"_Sample null", b'_Sample {"count":0', b"Alive {}x", b"Alive {} {}",
    ):  # fmt: skip
        with pytest.raises(ProtocolError):
            decode(data)


def test_a_message_that_unpacks_to_far_more_is_refused() -> None:
    """Catches: 64 KiB that became 64 MiB of JSON, and ten times that as objects."""
    bomb = b"\0" + zlib.compress(b'_Sample {"counts":[' + b"0," * 8_000_000 + b"0]}", 1)
    with traced() as memory, pytest.raises(ProtocolError, match=f"more than {MAX_MESSAGE_BYTES:,} bytes"):
        decode(bomb)
    assert memory.peak < 3 * MAX_MESSAGE_BYTES


def test_messages_that_are_too_large_or_not_text_are_not_sent() -> None:
    with pytest.raises(ProtocolError, match="and a message may have"):
        encode(_Sample(0, (), _Inner("", {}), text="x" * MAX_MESSAGE_BYTES))
    with pytest.raises(ProtocolError, match="cannot send _Sample"):
        encode(_Sample(0, (), _Inner("\ud800", {})))


def test_invalid_numbers_are_rejected_on_arrival() -> None:
    for number in (math.nan, math.inf):
        with pytest.raises(ProtocolError, match=r"inner\.ages"):
            decode(encode(_Sample(0, (), _Inner("", {1: number}))))


def test_a_text_is_cut_to_what_a_field_takes() -> None:
    assert cut("x" * 400) == "x" * 297 + "..."
    assert cut("a\ud800b", 10) == "a?b"


def test_a_name_cannot_be_declared_twice() -> None:
    with pytest.raises(TypeError, match="two messages"):
        type("_Sample", (Message,), {})


def test_every_message_of_the_coordinator_has_bounds() -> None:
    class Unbounded(Message, frozen=True):
        pairs: dict[str, Annotated[tuple[int, ...], Meta(max_length=1)]]

    schema.MESSAGES.pop("Unbounded")
    assert len(list(_without_bound(inspect.type_info(Unbounded)))) == 3
    for found in pkgutil.walk_packages(kafka_sink.coordinator.__path__, "kafka_sink.coordinator."):
        importlib.import_module(found.name)
    kinds = [one for one in schema.MESSAGES.values() if one.__module__.startswith("kafka_sink.")]
    assert len(kinds) > 20
    for kind in kinds:
        assert not list(_without_bound(inspect.type_info(kind))), kind


def _without_bound(one: inspect.Type) -> Iterator[inspect.Type]:
    """What is of any length, any number or any type in this type, which must refuse unknown fields."""
    if isinstance(one, (inspect.StructType, inspect.NamedTupleType)):
        if isinstance(one, inspect.StructType) and not one.forbid_unknown_fields:
            yield one
        parts: list[Any] = [field.type for field in one.fields]
    elif isinstance(one, inspect.UnionType):
        parts = list(one.types)
    else:
        parts = [getattr(one, name) for name in ("item_type", "key_type", "value_type") if hasattr(one, name)]
        bound = "le" if isinstance(one, (inspect.IntType, inspect.FloatType)) else "max_length"
        if not isinstance(one, (inspect.BoolType, inspect.NoneType)) and getattr(one, bound, None) is None:
            yield one
    for part in parts:
        yield from _without_bound(part)


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
    with pytest.raises(ProtocolError, match="Taker does not accept Alive"):
        deliver(taker, schema.Alive(), 1.0)
