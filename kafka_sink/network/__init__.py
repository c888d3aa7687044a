"""Connections to brokers: requests in, responses out, without waiting for any of them."""

from kafka_sink.network import apis

# Before any module of this package imports one of kafka-python's.
apis.install()
