"""Connections to brokers. Requests are sent and responses received without blocking for any of them."""
