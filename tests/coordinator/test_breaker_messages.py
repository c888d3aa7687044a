"""The bounds of the breaker's messages."""

from __future__ import annotations

import pytest

from kafka_sink.coordinator.breaker_messages import MAX_TARGETS, MAX_WAITING, MuteChanges, OwnMute, Waiting
from kafka_sink.coordinator.schema import MAX_TEXT, Message, decode, encode
from kafka_sink.errors import ProtocolError
from kafka_sink.model import TopicPartition

LONGEST = TopicPartition("t" * 249, 2**31 - 1)


def test_the_largest_message_of_a_task_fits() -> None:
    targets = (LONGEST,) * MAX_TARGETS
    muted = (OwnMute(LONGEST, "\U0001d11e" * MAX_TEXT, 1.5),) * MAX_TARGETS
    message = MuteChanges(muted, targets, targets, targets)
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "wrong",
    [
        Waiting((TopicPartition("t" * 250, 0),), ()),
        Waiting((TopicPartition("t", -1),), ()),
        Waiting((), (-1,)),
        Waiting((), (LONGEST,) * (MAX_WAITING + 1)),
    ],
)
def test_targets_that_make_no_sense_and_too_many_are_rejected(wrong: Message) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(wrong))
