"""The configurations of docs/clusters.md and docs/security.md are valid, and mean what the pages say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kafka_sink.options import parse
from kafka_sink.security.settings import SecuritySettings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clusters.md"
# What a reader puts in.
VARIABLES = ["api_key", "api_secret", "client_id", "client_secret", "user", "password", "connection_string"]


def configurations() -> list[tuple[str, dict[str, str]]]:
    """(section, options) of each block that sets them; one that adds to the block before includes that."""
    found: list[Any] = []
    page = PAGE.read_text().partition("\n## Services\n")[2].partition("\n## ")[0]
    for section in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        name, _, text = section.partition("\n")
        names = {variable: f"{variable}-value" for variable in VARIABLES}
        for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
            space: dict[str, object] = dict(names)
            if "|=" in block:
                space["options"] = dict(found[-1][1])
            exec(block, space)
            options = space["options"]
            assert isinstance(options, dict)
            found.append((name, options))
    return found


CONFIGURATIONS = configurations()


def test_the_page_has_all_five_services() -> None:
    names = [name for name, _ in CONFIGURATIONS]
    assert {name: names.count(name) for name in names} == {
        "Confluent Cloud": 2, "Amazon MSK": 2, "Azure Event Hubs": 2, "Aiven": 1, "Redpanda Cloud": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "options"), CONFIGURATIONS)
def test_each_configuration_is_valid(name: str, options: dict[str, str]) -> None:
    if "sasl.oauthbearer.token.provider" in options:
        # "without kafka.sasl.username and .password", as the page says.
        options = {key: text for key, text in options.items() if key not in _LOGIN}
    parsed = parse(options)
    security = SecuritySettings.from_options(parsed.options)
    assert security.tls is not None
    assert security.tls.check_host
    if name == "Aiven":
        assert security.tls.key is not None
    else:
        assert security.sasl is not None
    adapted = [text for text in parsed.warnings if "Event Hubs" in text]
    assert bool(adapted) is (name == "Azure Event Hubs")
    assert len(parsed.warnings) == len(adapted)


_LOGIN = ("kafka.sasl.username", "kafka.sasl.password")


def test_login_module_settings_of_a_page_arrive() -> None:
    confluent = dict(CONFIGURATIONS[1][1])
    sasl = SecuritySettings.from_options(parse(confluent).options).sasl
    assert sasl is not None
    assert sasl.tokens is not None
    assert dict(sasl.tokens.extensions) == {"logicalCluster": "lkc-xxxxx", "identityPoolId": "pool-xxxx"}
    assert sasl.tokens.client_id == "client_id-value"


def test_the_logins_of_the_security_page_are_valid() -> None:
    section = PAGE.with_name("security.md").read_text().partition("## Log in\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```properties\n(.*?)```", section, flags=re.DOTALL)
    tls, mutual, scram, kerberos, oauth, assertion = (
        dict(line.split("=", 1) for line in block.splitlines()) for block in blocks
    )
    without_secret = {name: value for name, value in oauth.items() if ".client.credentials." not in name}
    for login in (tls, {**tls, **mutual}, scram, kerberos, oauth, {**without_secret, **assertion}):
        assert not parse({"kafka.bootstrap.servers": "broker:9093", "topic": "t", **login}).warnings
