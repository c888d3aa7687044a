"""The options of the sink. They are declared in one table and checked before any work starts."""

from __future__ import annotations

from kafka_sink.options.parse import parse, texts
from kafka_sink.options.table import OptionSpec, ParsedOptions, SinkOptions
from kafka_sink.options.values import HostPort, topic_problem

__all__ = ["HostPort", "OptionSpec", "ParsedOptions", "SinkOptions", "parse", "texts", "topic_problem"]
