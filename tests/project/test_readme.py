"""What README and the first pages tell people to type exists. Its quickstart runs in test_packaging.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kafka_sink.options.table import SPECS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_PAGES = "".join(
    (ROOT / name).read_text(encoding="utf-8")
    for name in (
        "docs/quickstart.md",
        "docs/install.md",
        "docs/how-it-works.md",
        "packages/local_kafka/README.md",
    )
)
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_readme_has_its_purpose_then_the_demo_and_the_calls() -> None:
    commands = [line.split("#")[0].strip() for line in blocks("sh")[0].splitlines()]
    assert commands == ["make demo"]
    before, _, after = README.partition("```sh")
    assert len(before) < 500
    assert after.index("kafka_sink.write_arrow") < after.index("## Quickstart") < after.index("make test")


def test_every_make_target_it_names_exists() -> None:
    named = set(re.findall(r"\bmake ([a-z]+)", README))
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
    assert named
    assert named <= targets


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!https://)([^)#]+)\)", README))))
def test_every_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_every_variable_they_name_is_read_by_the_code() -> None:
    folders = (ROOT / "kafka_sink", ROOT / "packages")
    source = "".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    named = set(re.findall(r"\bKAFKA_CHUNKED_[A-Z_]+", README + FIRST_PAGES))
    # An administrator's variables are made from the names of the coordinator's options.
    made = {
        "KAFKA_CHUNKED_" + spec.name.upper().replace(".", "_")
        for spec in SPECS
        if spec.name.startswith(("coordinator.", "ui."))
    }
    assert named
    assert all(name in made or f'"{name}"' in source for name in named)
