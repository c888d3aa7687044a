"""Does to real brokers, and to the proxies before them, what a schedule says."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from local_kafka import LocalBroker
from tests.chaos.schedule import BROKER_FAULTS, Event, Fault
from tests.support.proxy import PRODUCE, REQUEST, RESPONSE, Proxy, ProxyCluster

_TRICKLE_MS = 5.0
# A frozen broker's clients must have something in flight when it dies.
_FROZEN_S = 0.3


class Injector:
    """Runs tracks of events; ``done`` counts what was injected. Call ``heal`` at the end, in any case."""

    def __init__(self, cluster: LocalBroker, proxies: ProxyCluster) -> None:
        self.done: Counter[Fault] = Counter()
        self._cluster = cluster
        self._proxies = proxies
        self._stopped = threading.Event()

    def run(self, events: Sequence[Event]) -> None:
        """Returns when the last event is over. One thread per track."""
        for event in events:
            self._stopped.wait(event.after_ms / 1000)
            if self._stopped.is_set():
                return
            if event.fault in BROKER_FAULTS:
                self._strike_broker(event)
            else:
                self._strike_wire(self._proxies[event.broker], event)
            self.done[event.fault] += 1

    def heal(self) -> None:
        """Ends running faults of the wire; every broker runs afterwards."""
        self._stopped.set()
        for proxy in self._proxies:
            _mend(proxy)
        for broker in range(len(self._proxies.proxies)):
            if self._cluster.is_running(broker):
                self._cluster.thaw(broker)
            else:
                self._cluster.start(broker)

    def _strike_broker(self, event: Event) -> None:
        cluster, broker = self._cluster, event.broker
        if event.fault is Fault.STOP:
            cluster.stop(broker, 60)
        elif event.fault is Fault.FREEZE:
            cluster.freeze(broker)
        else:
            if event.fault is Fault.FREEZE_KILL:
                cluster.freeze(broker)
                self._stopped.wait(_FROZEN_S)
            cluster.kill(broker)
        self._stopped.wait(event.lasts_ms / 1000)
        if event.fault is Fault.FREEZE:
            cluster.thaw(broker)
        else:
            cluster.start(broker)

    def _strike_wire(self, proxy: Proxy, event: Event) -> None:
        fault, amount = event.fault, event.amount
        strikes: dict[Fault, Callable[[], object]] = {
            Fault.CUT: proxy.cut,
            Fault.CUT_REQUEST: lambda: proxy.cut_after(amount, REQUEST),
            Fault.CUT_RESPONSE: lambda: proxy.cut_after(amount, RESPONSE),
            Fault.SWALLOW: lambda: proxy.swallow(PRODUCE, amount),
            Fault.DELAY: lambda: proxy.slow(delay_ms=amount),
            Fault.TRICKLE: lambda: proxy.slow(trickle_bytes=amount, trickle_ms=_TRICKLE_MS),
            Fault.STALL: proxy.freeze,
            # Responses pass, so that whatever is in flight in the end has not been delivered.
            Fault.LOSE: lambda: proxy.freeze(REQUEST),
            Fault.REFUSE: lambda: (proxy.refuse(), proxy.cut()),
        }
        strikes[fault]()
        self._stopped.wait(event.lasts_ms / 1000)
        if fault is Fault.LOSE:
            # What waits before the proxy is never delivered.
            proxy.cut()
        _mend(proxy)


def _mend(proxy: Proxy) -> None:
    proxy.slow()
    proxy.thaw()
    proxy.accept()
