"""An hour with 10,000 topics, simulated: what KIP-526's algorithm costs and what it keeps."""

from __future__ import annotations

from benchmarks import metadata_simulation as simulation


def test_sizes_are_those_of_encoded_messages() -> None:
    sizes = simulation.Sizes()
    for count in (0, 1, 2, 126, 127, 128, 300):
        sizes.check(count)


def test_an_hour_of_steady_topics() -> None:
    periods = simulation.WORKLOADS["steady"]
    ours = simulation.simulate("", simulation.Kip526(), 10_000, 3600, periods)
    expiry = simulation.simulate("", simulation.AllAtExpiry(one_by_one=False), 10_000, 3600, periods)
    target = int(10_000 / 300 * 10)
    assert max(topics for _, topics, _, _ in ours.sizes) == target, "no request is larger than the target"
    late = [at for at, *_ in ours.sizes if at > 300]
    assert len(late) / (3600 - 300) < 0.25, "a request of 333 topics each four seconds would do it"
    # Half of max.age instead of all of it: up to twice the bytes, in small responses.
    assert ours.summary["response_bytes"] < 2.1 * expiry.summary["response_bytes"]
    assert ours.summary["largest_response"] < expiry.summary["largest_response"] / 25


def test_no_topic_in_use_gets_older_than_max_age() -> None:
    policy, asked_at, worst = simulation.Kip526(), dict[str, float](), 0.0
    for second in range(1800):
        now_ms = second * 1000.0
        policy.note_use(simulation.unit(second, 3000, (60,)), now_ms)
        for names in policy.requests(now_ms):
            worst = max([worst, *(now_ms - asked_at.get(name, now_ms) for name in names)])
            asked_at.update(dict.fromkeys(names, now_ms))
    assert simulation.MAX_AGE_MS / 2 <= worst <= simulation.MAX_AGE_MS
    assert len(asked_at) == 3000
    assert min(asked_at.values()) > 1_800_000 - simulation.MAX_AGE_MS


def test_topics_out_of_use_are_forgotten_and_asked_for_again() -> None:
    ours = simulation.simulate("", simulation.Kip526(), 400, 3600, (1200,))
    looked_up = sum(topics for _, topics, _, _ in ours.sizes)
    # Three uses, 20 minutes apart: one look-up each, and at most one refresh before the topic is forgotten.
    assert 3 * 400 <= looked_up <= 2 * 3 * 400
