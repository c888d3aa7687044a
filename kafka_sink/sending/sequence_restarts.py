"""A partition's sequences change: they restart after its leader refused them (KIP-360), or close a gap."""

from __future__ import annotations

import logging

from kafka_sink.errors import DeliveryError
from kafka_sink.sending.batch_completion import BatchCompletion
from kafka_sink.sending.producer_identity import ProducerIdentity

_log = logging.getLogger(__name__)


def restart_sequences(identity: ProducerIdentity, completion: BatchCompletion) -> None:
    """Restarts every partition that asked for it and has nothing in flight.

    A batch that may have been written fails: under a new sequence it could be written twice.
    """
    for partition in identity.restarts_due():
        unresolved = identity.unresolved(partition)
        for batch in unresolved:
            last = f"{batch.last_error}; " if batch.last_error is not None else ""
            reason = "the leader lost its state of this producer, and the batch may have been written"
            completion.fail(batch, DeliveryError(f"{last}{partition}: {reason}"))
        if not unresolved:
            identity.restart(partition)
            _log.warning("the sequences of %s restart, because its leader refused them", partition)


def close_sequence_gaps(identity: ProducerIdentity, completion: BatchCompletion) -> None:
    """Renumbers the batches behind dropped records in every partition that has nothing in flight.

    A batch that may have been written fails: under a new sequence it could be written twice.
    """
    for partition in identity.gaps_due():
        unresolved = [batch for batch in identity.after_gap(partition) if batch.possibly_written]
        for batch in unresolved:
            last = f"{batch.last_error}; " if batch.last_error is not None else ""
            reason = "records before this batch were refused, and the batch may have been written"
            completion.fail(batch, DeliveryError(f"{last}{partition}: {reason}"))
        if not unresolved:
            identity.close_gap(partition)
