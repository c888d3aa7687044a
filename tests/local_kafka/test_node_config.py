from __future__ import annotations

import socket
from pathlib import Path

import pytest

from local_kafka.errors import LocalBrokerError
from local_kafka.node_config import (
    format_properties,
    free_port,
    plan_nodes,
    port_is_free,
    random_id,
    server_properties,
)


def test_free_ports_are_distinct_and_below_the_ephemeral_range(tmp_path: Path) -> None:
    nodes = plan_nodes(tmp_path, 3, None, {"TLS": "SSL"})
    ports = [port for node in nodes for port in node.ports.values()]
    assert len(ports) == len(set(ports)) == 9
    assert all(20_000 <= port < 32_000 for port in ports)
    base = next(p for p in range(20_000, 32_000, 10) if all(port_is_free(p + i) for i in range(3)))
    asked = plan_nodes(tmp_path, 3, base, {})
    assert [node.ports["BROKER"] for node in asked] == [base, base + 1, base + 2]


def test_an_asked_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        assert not port_is_free(taken)
        with pytest.raises(LocalBrokerError, match=f"port {taken} is taken"):
            plan_nodes(tmp_path, 1, taken, {})


def test_a_taken_port_is_never_chosen() -> None:
    base = next(port for port in range(20_000, 32_000) if port_is_free(port))
    assert free_port(set(), (base, base + 1)) == base
    with pytest.raises(LocalBrokerError, match="no free port"):
        free_port({base}, (base, base + 1))


def test_replication_fits_the_cluster_and_the_callers_properties_win(tmp_path: Path) -> None:
    factors = ("default", "offsets.topic", "transaction.state.log")
    for brokers, replicas, in_sync in ((1, "1", "1"), (3, "3", "2")):
        nodes = plan_nodes(tmp_path, brokers, None, {"TLS": "SSL"})
        values = server_properties(
            nodes[0],
            nodes,
            auto_create_topics=False,
            extra_listeners={"TLS": "SSL"},
            properties={"num.partitions": "7"},
        )
        assert {values[f"{one}.replication.factor"] for one in factors} == {replicas}
        assert values["transaction.state.log.min.isr"] == values["min.insync.replicas"] == in_sync
        assert (values["num.partitions"], values["auto.create.topics.enable"]) == ("7", "false")
        assert "TLS:SSL" in values["listener.security.protocol.map"]
        assert f"TLS://{nodes[0].address('TLS')}" in values["advertised.listeners"]
        assert "CONTROLLER" not in values["advertised.listeners"]


def test_ids_are_22_characters_and_no_option() -> None:
    ids = [random_id() for _ in range(500)]
    assert len(set(ids)) == 500
    assert all(len(text) == 22 and not text.startswith("-") for text in ids)


def test_names_and_values_of_other_scripts_and_with_equals_signs_are_read_back_by_java() -> None:
    text = format_properties({"user_a=b": "p\\w=ä€ \U0001f511\n", "a": "x\ny"})
    assert text == "user_a\\=b=p\\\\w=\\u00e4\\u20ac \\ud83d\\udd11\\n\na=x\\ny\n"
    assert text.isascii()
