"""Ends the transactions of writes that failed without a word from the driver.

Spark's interrupt, of ``query.stop()`` for one, may meet the start of the Python process for ``abort``, which
then never runs; the transactions would hold readers up until the next run, or until they time out. It is done
as the driver does it: an abort under its claim, which excludes a decision, completes what was decided, and
does nothing where another driver has taken over. With transaction protocol 1 a decision looks like that, and
the next run completes it.
"""

from __future__ import annotations

import logging
import threading
from contextlib import closing
from typing import TYPE_CHECKING

from kafka_sink.clock import wall_ms
from kafka_sink.errors import KafkaSinkError
from kafka_sink.model import WriteTransactions

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions

_log = logging.getLogger(__name__)


class UnfinishedWrites:
    """Of one cluster. Each write takes ``max.block.ms`` at most, as on the driver."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._one_at_a_time = threading.Lock()

    def end(self, transactions: WriteTransactions) -> None:
        """Return at once: a thread ends them, and logs what became of them."""
        thread = threading.Thread(
            target=self._end, args=(transactions,), name="kafka-chunked-unfinished", daemon=True
        )
        thread.start()

    def _end(self, given: WriteTransactions) -> None:
        # Imported here because few applications get here.
        from kafka_sink.transactions import driver
        from kafka_sink.transactions.client import TransactionClient
        from kafka_sink.transactions.operations import ProducerEpoch
        from kafka_sink.transactions.scope import Scope

        scope = Scope(given.prefix, given.topic, given.partitions)
        steps = driver.abort(scope, ProducerEpoch(given.producer_id, given.epoch), wall_ms())
        try:
            with self._one_at_a_time, closing(TransactionClient(self._options)) as client:
                ownership = client.run(steps, self._options.max_block_ms)
        except KafkaSinkError as error:
            became = (
                f"they could not be aborted: {error}. The next run aborts them, or brokers do so after "
                "kafka.transaction.timeout.ms"
            )
        else:
            if ownership is None:
                became = (
                    "they are left to the next run, as another driver has taken over or the batch is decided"
                )
            else:
                became = f"{len(ownership.aborted)} aborted"
                if ownership.completed:
                    became += f", {len(ownership.completed)} committed, as the batch was decided"
        _log.warning(
            "a write with transactional.id.prefix '%s' failed, and its driver did not say that it ends the "
            "transactions: %s",
            given.prefix,
            became,
        )
