"""That kafka-python's package is whole for everyone else in the process, and that tasks do not pay for it."""

from __future__ import annotations

import pytest

from tests.support.commands import printed_by


def test_planning_a_micro_batch_loads_no_client_of_brokers() -> None:
    """Catches: 0.1 s more for each planning process of a stream, which asks brokers once a minute."""
    code = """
        import sys, kafka_sink.spark.planning
        print("kafka.protocol" in sys.modules, "kafka_sink.network.client" in sys.modules)
    """
    assert printed_by(code).split() == ["False", "False"]


def test_tasks_do_not_import_kafka_pythons_clients() -> None:
    code = """
        import sys
        import kafka_sink.task.producer_cache, kafka_sink.spark.datasource
        slow = ("kafka.admin", "kafka.consumer", "kafka.net", "kafka.producer")
        print(sorted(name for name in sys.modules if name.startswith(slow)))
        print("kafka.protocol.admin" in sys.modules, "kafka.protocol.consumer" in sys.modules)
    """
    assert printed_by(code) == "[]\nFalse False"


@pytest.mark.parametrize(
    "use",
    [
        "from kafka import KafkaProducer, TopicPartition; assert TopicPartition('t', 1).partition == 1",
        "import kafka; assert kafka.KafkaAdminClient.__name__ == 'KafkaAdminClient' and kafka.__version__",
        "from kafka import *; assert KafkaConsumer",
        "import kafka.errors; assert kafka.errors.KafkaError",
        "import kafka.admin; assert kafka.admin.NewTopic and kafka.KafkaConsumer",
        "from kafka.consumer.group import KafkaConsumer",
        "import kafka; assert not hasattr(kafka, 'no_such_name')",
        "import kafka, inspect, os; assert os.path.exists(inspect.getfile(kafka)) and kafka.__path__",
        "import kafka, importlib; importlib.reload(kafka); assert kafka.KafkaProducer",
    ],
)
def test_users_find_the_whole_package(use: str) -> None:
    assert printed_by(f"import kafka_sink.network.client\n{use}\nprint('good')") == "good"


def test_a_package_that_was_imported_before_stays() -> None:
    code = """
        import kafka
        before = kafka
        import kafka_sink.network.client
        import kafka as after
        print(before is after, type(after).__name__)
    """
    assert printed_by(code) == "True module"


def test_threads_that_ask_first_at_once_all_find_it() -> None:
    code = """
        import threading
        import kafka_sink.network.client
        found, start = [], threading.Barrier(8)
        def ask():
            start.wait()
            from kafka import KafkaProducer
            found.append(KafkaProducer)
        threads = [threading.Thread(target=ask) for _ in range(8)]
        [one.start() for one in threads]
        [one.join() for one in threads]
        import kafka
        print(len(found), len(set(found)), kafka._lock.acquire(blocking=False))
    """
    assert printed_by(code) == "8 1 True", "and nobody holds the lock any more"


def test_a_thread_that_holds_the_package_up_does_not_stop_another_for_ever() -> None:
    """Catches: a deadlock with a thread that imports a module below, which the package's code waits for."""
    code = """
        import threading
        import kafka_sink.network.client
        import kafka_sink.network.apis as lazy_kafka
        import kafka
        lazy_kafka._MAX_WAIT_S = 0.1
        held, leave = threading.Event(), threading.Event()
        def hold():
            with kafka._lock:
                held.set()
                leave.wait(30)
        one = threading.Thread(target=hold)
        one.start()
        held.wait()
        print(hasattr(kafka, "KafkaProducer"), end=" ")
        leave.set()
        one.join()
        print(hasattr(kafka, "KafkaProducer"))
    """
    assert printed_by(code) == "False True"


def test_a_package_that_cannot_be_imported_lacks_its_names_and_says_why() -> None:
    code = """
        import kafka_sink.network.client
        import kafka
        loader = kafka.__spec__.loader
        whole = loader.exec_module
        loader.exec_module = lambda _: __import__("no_such")
        try:
            kafka.KafkaProducer
        except AttributeError as error:
            print(type(error.__cause__).__name__, "No module named 'no_such'" in str(error), end=" ")
        print(getattr(kafka, "KafkaProducer", None), end=" ")
        loader.exec_module = whole
        print(hasattr(kafka, "KafkaProducer"))
    """
    assert printed_by(code) == "ModuleNotFoundError True None True"
