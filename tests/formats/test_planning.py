"""Schemas that planning has found are noted for the next writes; columns without a schema are named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from kafka_sink.errors import RegistryError, SchemaError
from kafka_sink.formats import planning
from kafka_sink.options import parse
from kafka_sink.spark_application import SparkApplication, planning_for
from tests.support.http_server import Server
from tests.support.planned_formats import COLUMNS, KINDS, options, planned


@pytest.fixture(autouse=True)
def _notes(tmp_path: Path) -> Iterator[None]:
    """Where an application keeps what it has found."""
    with planning_for(SparkApplication(str(tmp_path), None, {})):
        yield


@pytest.fixture
def known(fake: Server) -> Server:
    """A registry that has any schema."""
    fake.respond = lambda _: (200, {}, b'{"id": 5, "version": 1}')
    return fake


def test_a_query_goes_on_with_its_schemas_and_asks_no_more(known: Server) -> None:
    """Catches: a micro-batch that fails because of the registry, or asks it again."""
    made = options(schema__registry__url=known.url)
    first = planned(made, "query")
    assert len(known.requests) == 1
    assert planned(made, "query") == first
    assert len(known.requests) == 1
    planned(made, "another")
    assert len(known.requests) == 2


def test_a_note_of_another_version_does_not_count(known: Server, tmp_path: Path) -> None:
    """Catches: a KeyError in every micro-batch after the package was replaced."""
    made = options(schema__registry__url=known.url)
    first = planned(made, "query")
    (note,) = tmp_path.iterdir()
    note.write_text('{"schemas": {}}')
    assert planned(made, "query") == first
    assert len(known.requests) == 2


@pytest.mark.parametrize("status", [429, 503])
def test_a_write_goes_on_with_the_schemas_of_the_one_before_with_a_warning(
    known: Server, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    made = options(schema__registry__url=known.url)
    first = planned(made)
    known.respond = lambda _: (status, {}, b"")
    assert planned(made) == first
    assert "The write continues with the schemas of the previous write" in caplog.text
    with pytest.raises(RegistryError):
        planned(options(schema__registry__url=known.url, topic="new"))


def test_topics_share_one_schema(known: Server, tmp_path: Path) -> None:
    """Catches: a note of a megabyte for a thousand topics, and as much for every task."""
    topics = ",".join(f"shared-{number}" for number in range(20))
    plain = {"kafka.bootstrap.servers": "127.0.0.1:1", "value.format": "avro"}
    made = parse(plain | {"schema.registry.url": known.url, "schema.registry.topics": topics}).options
    columns = [*COLUMNS, ("topic", "string")]
    kinds = pa.schema([*KINDS, ("topic", pa.string())])
    found = planning.plan(made, columns, lambda: kinds, "query")
    assert found is not None
    assert len(found.parts[0].schemas) == 20
    assert len({id(one.schema) for _, one in found.parts[0].schemas}) == 1
    assert planning.plan(made, columns, lambda: kinds, "query") == found
    (note,) = tmp_path.iterdir()
    assert note.stat().st_size < 4_000


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ([("id", "bigint"), ("id", "int")], "two columns 'id'"),
        ([("id", "array<struct<a:variant>>")], "variant>>, which has no schema"),
        ([("id", "interval year")], "which pyarrow does not have"),
        ([("key", "string")], "there is no column for the value"),
    ],
)
def test_columns_that_have_no_schema(columns: list[tuple[str, str]], said: str) -> None:
    made = options(schema__registry__url="http://127.0.0.1:1")
    with pytest.raises(SchemaError, match=said):
        planning.plan(made, columns, lambda: KINDS, None)
