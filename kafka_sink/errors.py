"""The errors of this package. Messages name the option or column, the problem and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class KafkaSinkError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(KafkaSinkError, ValueError):
    """An option is missing, unknown, out of bounds or contradicts another. Raised at planning."""


class MissingTopicError(ConfigurationError):
    """A topic that an option names does not exist, and was not created."""


class SchemaError(KafkaSinkError, ValueError):
    """A column is missing or has an unsupported type. Raised at planning."""


class RegistryError(KafkaSinkError):
    """The schema registry cannot be reached, or answered with an error. Never contains a secret.

    ``is_temporary``: it may respond later. ``is_missing``: it has no such subject, version or schema.
    """

    def __init__(self, message: str, *, is_temporary: bool = False, is_missing: bool = False) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary
        self.is_missing = is_missing


class InvalidRowError(KafkaSinkError, ValueError):
    """A row's content cannot be sent: null topic, partition out of range, negative timestamp.

    ``rows`` marks the invalid rows of the table, where it is known which they are. ``reason`` says what is
    wrong with each of them.
    """

    def __init__(self, message: str, rows: npt.NDArray[np.bool_] | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.rows = rows
        self.reason = reason or message


class TopicRefusedError(InvalidRowError):
    """A topic can never be written: its name is invalid, or access is denied."""

    def __init__(self, message: str, topic: str) -> None:
        super().__init__(message)
        self.topic = topic


class MissingPartitionError(InvalidRowError):
    """Rows name a partition that the topic does not have."""


class RecordTooLargeError(InvalidRowError):
    """One record exceeds max.request.size, buffer.memory or the broker's limit."""


class BufferExhaustedError(KafkaSinkError, TimeoutError):
    """No buffer memory was available within max.block.ms."""


class TooManyDeadLettersError(KafkaSinkError):
    """More rows can never be written than errors.max allows."""


class MetadataTimeoutError(KafkaSinkError, TimeoutError):
    """A topic's metadata did not arrive within max.block.ms."""


class ClusterChangedError(KafkaSinkError):
    """Brokers belong to another cluster than the one to which this producer has written."""


class BrokersUnreachableError(KafkaSinkError, ConnectionError):
    """No broker could be reached. The message lists each address, the step that failed and what to change."""


class ProtocolError(KafkaSinkError):
    """A broker sent an invalid response; the connection is closed."""


class BrokerVersionError(KafkaSinkError):
    """The broker supports no version of an API that this sink can use."""


class AuthenticationError(KafkaSinkError):
    """A broker rejected the credentials, or the TLS handshake failed. Never contains a secret."""


class DeliveryError(KafkaSinkError):
    """Rows were not acknowledged. The message has the first cause, its topic-partition and the counts."""


class BrokerRefusedError(DeliveryError):
    """A broker rejected a batch; ``error_code`` is Kafka's."""

    def __init__(self, message: str, error_code: int = -1) -> None:
        super().__init__(message)
        self.error_code = error_code


class TransactionError(DeliveryError):
    """The transactions of a batch could not be committed; ``read_committed`` consumers see none of its
    rows."""


class IncompleteBatchError(TransactionError):
    """The commit of a batch was decided, but some of its transactions were aborted: some rows are missing."""


class ChangedBatchError(TransactionError):
    """A batch or version that was written before is run again with other rows, or nobody knows whether it was
    written. Nothing was written now."""


class BufferOwnershipError(KafkaSinkError, RuntimeError):
    """Memory was released twice, or by code that does not own it. This is a bug in the sink."""


class ExecutorDisconnectedError(KafkaSinkError):
    """Spark's executor closed its connection while the task was writing, so its rows are no longer needed."""


class WriteOverError(KafkaSinkError):
    """The driver committed or aborted the write while this attempt was running, so its rows are not
    needed."""


class ProducerClosedError(KafkaSinkError, RuntimeError):
    """The producer was closed before or while a row waited for memory."""


def is_final(cause: Exception) -> bool:
    """Of a connection's failure: whether every other connection would fail, too."""
    return isinstance(cause, AuthenticationError | BrokerVersionError)


class IllegalTransitionError(RuntimeError):
    """A move that a state table does not have: a mistake in this package. Nothing was changed."""
