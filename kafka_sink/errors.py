"""The errors of this package. Each message names the option or column, what is wrong, and what to do.

Catch ``KafkaSinkError`` for all of them. Without Spark they arrive as they are; in Spark, an error that a
task raised arrives as text within Spark's own exception.

Examples:
    >>> try:
    ...     kafka_sink.write_arrow(table, options)
    ... except kafka_sink.errors.ConfigurationError as error:
    ...     print(error)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafka_sink.printable import one_line
from kafka_sink.secret import redacted

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The maximum length of an error's message, of which a part may be texts of a peer.
_MAX_MESSAGE = 10_000


class KafkaSinkError(Exception):
    """The base class of all errors of this package. A message is one printable line, whatever it quotes."""

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message, _MAX_MESSAGE))


class _AboutSchemaError(KafkaSinkError):
    """Its message may quote any part of a schema. The schema registry chose that text and has the login."""

    def __init__(self, message: str = "") -> None:
        super().__init__(redacted(message))


class ConfigurationError(KafkaSinkError, ValueError):
    """An option is missing, unknown or out of range, or contradicts another one. Raised at planning."""


class MissingTopicError(ConfigurationError):
    """A topic that an option names does not exist and was not created."""


class SchemaError(_AboutSchemaError, ValueError):
    """A column is missing or has an unsupported type. Raised at planning."""


class RegistryError(_AboutSchemaError):
    """The schema registry cannot be reached, or it returned an error. The message contains no secret.

    ``is_temporary``: the registry may succeed later. ``is_missing``: it does not have the subject, version or
    schema.
    """

    def __init__(self, message: str, *, is_temporary: bool = False, is_missing: bool = False) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary
        self.is_missing = is_missing


class InvalidRowError(KafkaSinkError, ValueError):
    """A row cannot be sent because of its content: a null topic, an invalid partition or timestamp.

    ``rows`` marks the invalid rows of the table, or is None if it is not known which rows are invalid.
    ``reason`` is what is wrong with each of them.
    """

    def __init__(self, message: str, rows: npt.NDArray[np.bool_] | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.rows = rows
        self.reason: str = reason or message


class TopicRefusedError(InvalidRowError):
    """A topic can never be written, because its name is invalid or access is denied."""

    def __init__(self, message: str, topic: str) -> None:
        super().__init__(message)
        self.topic = topic


class MissingPartitionError(InvalidRowError):
    """Rows have a partition that their topic does not have."""


class RecordTooLargeError(InvalidRowError):
    """One record exceeds max.request.size, buffer.memory or the broker's limit."""


class BufferExhaustedError(KafkaSinkError, TimeoutError):
    """No buffer memory was available within max.block.ms."""


class TooManyDeadLettersError(KafkaSinkError):
    """More rows than ``errors.max`` allows can never be written."""


class MetadataTimeoutError(KafkaSinkError, TimeoutError):
    """A topic's metadata did not arrive within max.block.ms."""


class ClusterChangedError(KafkaSinkError):
    """The brokers belong to a different cluster from the one that this producer has written to."""


class BrokersUnreachableError(KafkaSinkError, ConnectionError):
    """No broker could be reached. The message has each address, the failed step and what to change."""


class ProtocolError(KafkaSinkError):
    """A broker sent an invalid response. The connection is closed."""


class BrokerVersionError(KafkaSinkError):
    """The broker does not support any version of an API that this sink can use."""


class AuthenticationError(KafkaSinkError):
    """A broker rejected the credentials, or the TLS handshake failed. The message contains no secret."""


class DeliveryError(KafkaSinkError):
    """Rows were not acknowledged. The message has the first cause, its partition and the counts."""


class BrokerRefusedError(DeliveryError):
    """A broker rejected a batch; ``error_code`` is Kafka's error code."""

    def __init__(self, message: str, error_code: int = -1) -> None:
        super().__init__(message)
        self.error_code = error_code


class TransactionError(DeliveryError):
    """The transactions of a batch could not be committed. ``read_committed`` consumers see no row of it."""


class IncompleteBatchError(TransactionError):
    """The batch was to be committed, but some of its transactions were aborted: some rows are missing."""


class ChangedBatchError(TransactionError):
    """A batch or version that was written before is run again with other rows, or it cannot be determined
    whether it was written. This run wrote nothing."""


class BufferOwnershipError(KafkaSinkError, RuntimeError):
    """Memory was released twice, or by code that does not own it. This is a bug in the sink."""


class ExecutorDisconnectedError(KafkaSinkError):
    """Spark's executor closed its connection while the task was writing, so its rows are no longer needed."""


class WriteOverError(KafkaSinkError):
    """The driver committed or aborted the write while this attempt ran, so its rows are not needed."""


class ProducerClosedError(KafkaSinkError, RuntimeError):
    """The producer was closed before or while a row waited for memory."""


def is_final(cause: Exception) -> bool:
    """Whether a connection failed for a reason that would also fail every other connection."""
    return isinstance(cause, AuthenticationError | BrokerVersionError)


class IllegalTransitionError(RuntimeError):
    """A state change that the state table does not allow: a bug in this package. Nothing was changed."""
