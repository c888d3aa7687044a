"""``python -m kafka_sink.options`` prints the options page."""

from __future__ import annotations

from kafka_sink.options.document import document

print(document(), end="")
