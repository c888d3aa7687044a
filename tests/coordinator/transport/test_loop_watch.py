"""What the coordinator says of its own time."""

from __future__ import annotations

import asyncio

from kafka_sink.coordinator.transport.loop_watch import LoopWatch


class Scene:
    """A loop without sockets, whose clock the test sets."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.watch = LoopWatch(lambda: self.now_ms)

    def turn(self, took_ms: float, waited_ms: float = 50.0, timeout_ms: float | None = None) -> None:
        looked_ms = self.now_ms
        self.watch.turn_ends(looked_ms)
        self.now_ms += waited_ms
        self.watch.turn_begins(looked_ms, self.now_ms, timeout_ms)
        self.now_ms += took_ms
        self.watch.handled(3, self.now_ms)


def test_a_message_that_came_during_a_long_turn_may_be_late() -> None:
    scene = Scene()
    scene.turn(900.0)
    assert scene.watch.late == 0, "all had come when the turn began"
    scene.turn(200.0, waited_ms=0.0)
    assert scene.watch.late == 3, "they may have come when the long turn had just begun"
    scene.turn(200.0)
    state = scene.watch.state()
    assert (state["late"], state["messages"], state["longest_turn"]) == (3, 9, 0.9)
    assert state["busy"] == 1.1, "the turn that has not ended does not count yet"


def test_a_process_that_was_stopped_while_it_waited_replies_late() -> None:
    scene = Scene()
    scene.turn(1.0, waited_ms=1_000.0, timeout_ms=1_000.0)
    assert scene.watch.late == 0
    scene.turn(1.0, waited_ms=6_000.0, timeout_ms=1_000.0)
    assert (scene.watch.late, scene.watch.state()["longest_turn"]) == (3, 5.0)


def test_time_in_which_the_loop_did_not_look_adds_up() -> None:
    scene = Scene()
    assert scene.watch.stood_ms(60_000.0) == 0.0, "nobody watches this loop"
    scene.turn(90.0, waited_ms=10_000.0, timeout_ms=10_000.0)
    assert scene.watch.stood_ms(scene.now_ms) == 0.0
    scene.turn(700.0)
    assert scene.watch.stood_ms(scene.now_ms) == 600.0, "the turn goes on"
    scene.turn(0.0, waited_ms=6_000.0, timeout_ms=1_000.0)
    assert scene.watch.stood_ms(scene.now_ms) == 600.0 + 4_900.0


def test_a_line_is_logged_once_a_minute_where_a_bound_was_passed() -> None:
    scene = Scene()
    scene.turn(400.0)
    assert scene.watch.line(59_000.0) is None
    assert scene.watch.line(60_000.0) is None, "nothing was late"
    scene.turn(2_500.0)
    scene.turn(1.0, waited_ms=0.0)
    line = scene.watch.line(120_000.0)
    assert line is not None
    assert "for 2.5 s at most" in line
    assert "6 messages" in line
    assert scene.watch.line(120_001.0) is None
    assert scene.watch.state()["longest_turn"] == 2.5, "of the minute before"
    assert scene.watch.line(180_000.0) is None
    assert scene.watch.state()["longest_turn"] == 0.0


def test_the_loop_that_is_watched_counts_a_callback_that_blocks() -> None:
    scene = Scene()
    loop = scene.watch.new_loop()

    async def block() -> None:
        await asyncio.sleep(0)
        scene.now_ms += 50.0
        await asyncio.sleep(0)

    loop.run_until_complete(block())
    loop.close()
    assert scene.watch.state()["longest_turn"] == scene.watch.state()["busy"] == 0.05
