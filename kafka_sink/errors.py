"""Every error this package raises. Messages name the option or column, what was wrong and what to do."""

from __future__ import annotations


class KafkaSinkError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(KafkaSinkError, ValueError):
    """An option is missing, unknown, out of bounds or contradicts another. Raised at planning."""


class SchemaError(KafkaSinkError, ValueError):
    """A column is missing or has a type the sink does not take. Raised at planning."""


class InvalidRowError(KafkaSinkError, ValueError):
    """A row's content cannot be sent: null topic, partition out of range, negative timestamp."""


class RecordTooLargeError(InvalidRowError):
    """One record exceeds max.request.size, buffer.memory or the broker's limit."""


class BufferExhaustedError(KafkaSinkError, TimeoutError):
    """No pool memory within max.block.ms."""


class MetadataTimeoutError(KafkaSinkError, TimeoutError):
    """A topic's metadata did not arrive within max.block.ms."""


class ClusterChangedError(KafkaSinkError):
    """Brokers answer for another cluster than the one that this producer has written to."""


class BrokersUnreachableError(KafkaSinkError, ConnectionError):
    """No broker could be connected to: each address with the step that failed and what to change."""


class ProtocolError(KafkaSinkError):
    """A broker's bytes are not a valid answer; the connection is closed."""


class BrokerVersionError(KafkaSinkError):
    """The broker speaks no version of an API that this sink needs."""


class AuthenticationError(KafkaSinkError):
    """A broker refused the credentials, or the TLS handshake failed. Never carries a secret."""


class DeliveryError(KafkaSinkError):
    """Rows were not acknowledged: the first cause, its topic-partition and the counts."""


class BrokerRefusedError(DeliveryError):
    """A broker answered a batch with an error; ``error_code`` is Kafka's."""

    def __init__(self, message: str, error_code: int = -1) -> None:
        super().__init__(message)
        self.error_code = error_code


class TransactionError(DeliveryError):
    """The transactions of a batch could not be committed; readers of committed rows see none of it."""


class IncompleteBatchError(TransactionError):
    """A batch was decided, and some of its transactions ended otherwise: readers see a part of it."""


class LocalBrokerError(KafkaSinkError):
    """The embedded broker could not be fetched, started or stopped."""


class BufferOwnershipError(KafkaSinkError, RuntimeError):
    """Memory was returned twice, or by somebody who does not own it: a bug of this sink."""


class ExecutorDisconnectedError(KafkaSinkError):
    """Spark's executor hung up while the task was writing: nobody waits for its rows any more."""


class WriteOverError(KafkaSinkError):
    """The driver committed or aborted the write while this attempt was at work: nobody waits for its rows."""


class ProducerClosedError(KafkaSinkError, RuntimeError):
    """The producer was closed while, or before, a row waited for memory."""
