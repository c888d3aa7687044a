"""Connections to brokers: requests in, responses out, without waiting for any of them."""
