"""Connections to brokers: requests in, responses out, without waiting for any of them."""

from kafka_sink.network import lazy_kafka

# Before any module of this package imports one of kafka-python's.
lazy_kafka.install()
