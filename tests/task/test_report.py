"""What a task reports to the live view, within the bounds of a message."""

from __future__ import annotations

from kafka_sink.task.report import first_dead_letters


def test_a_report_names_few_of_many_topics_with_dead_letters() -> None:
    many = {(f"t{number}", "E"): 1 for number in range(1_000)}
    few = first_dead_letters(many)
    assert sum(one.rows for one in few) == 1_000
    assert few[-1] == ("", "", 981)


def test_rows_may_name_topics_that_no_message_takes() -> None:
    (one,) = first_dead_letters({("x" * 300, "InvalidTopicError"): 3})
    assert (len(one.topic), one.rows) == (249, 3)
