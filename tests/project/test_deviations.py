"""docs/design.md says where the sink differs from the four documents, one line a deviation."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "design.md"
# One that is gone from here was brought in line with its document; a new one needs its line and its reason.
DEVIATIONS = {
    "KAFKA-20576": """
        default strategy; full beyond batch.size; one buffer type; batches above batch.size; projected
        size; chunks by compressed size; full by size only; one chunk size; growth without exception;
        closing in the sender; blocking for the new record; BufferExhaustedException in the future;
        split memory; growth bound; pool for the producer's life; no copy; benchmarks
    """,
    "KIP-526": """
        eviction; target with max.age; refresh by each producer; urgent at once; fixed backoff;
        announced topics
    """,
    "KIP-693": """
        configs; time; view in Cluster; always avoid muted; failure rate of messages; decided by one
        producer; reset by writes; inflight full; keyed rows move
    """,
    "Deep diving": """
        lock per queue; old formats; future per record; abortOnNewBatch; closed under the lock
    """,
}


def test_each_deviation_has_its_line_and_no_other_document_is_differed_from() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Where we differ from the four documents")[2]
    section = section.partition("\n## ")[0]
    assert re.findall(r"^\*\*(.+)\*\*$", section, re.MULTILINE) == list(DEVIATIONS)
    for document, deviations in DEVIATIONS.items():
        lines = section.partition(f"**{document}**\n")[2].partition("\n**")[0]
        named = re.findall(r"^- `([^`]+)`: \S", lines, re.MULTILINE)
        assert sorted(named) == sorted(" ".join(deviations.split()).split("; ")), document
