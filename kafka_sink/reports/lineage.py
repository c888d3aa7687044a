"""OpenLineage events: one for each job or micro-batch, with the topics that it wrote and the offsets there.

OpenLineage's own client sends them and finds the transport by itself: OPENLINEAGE_URL, openlineage.yml and
the like, on the driver. Catalogues differ in what they need: older versions of DataHub take no events without
the facet processing_engine, Marquez none whose jobType lacks an optional field.
"""

from __future__ import annotations

import platform
import re
import sys
from importlib.util import find_spec
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from kafka_sink import spark_application
from kafka_sink.driver import driver_log
from kafka_sink.errors import ConfigurationError
from kafka_sink.printable import printable
from kafka_sink.reports.delivery_report import EndedWrite, partitions_of
from kafka_sink.version import __version__

if TYPE_CHECKING:
    from openlineage.client.event_v2 import OutputDataset, RunEvent

    from kafka_sink.options import SinkOptions

# A stream should not wait for a backend that is down in each micro-batch.
_PAUSE_S = 60.0
_FAILED = "openlineage failed"
_PRODUCER = f"https://pypi.org/project/kafka-chunked/{__version__}"
# In addresses that the client's errors may name.
_LOGIN, _QUERY = re.compile(r"//[^/@\s]*@"), re.compile(r"\?[^\s'\")]*")


def check() -> None:
    """At planning: raises ConfigurationError if the client is not installed."""
    if find_spec("openlineage") is None:
        raise ConfigurationError(
            f"Option 'openlineage.job.name' needs OpenLineage's client, which {sys.executable} on the driver "
            f"does not have: {sys.executable} -m pip install openlineage-python"
        )


def emit(options: SinkOptions, ended: EndedWrite) -> None:
    """Send the event of a write. It takes openlineage.timeout.ms at most; what goes wrong is only logged."""
    if spark_application.happened_within(_FAILED, _PAUSE_S):
        driver_log.warn(
            f"{ended.label}no OpenLineage event, as one failed less than {_PAUSE_S:.0f} s ago in this "
            "application"
        )
        return
    problems: SimpleQueue[str] = SimpleQueue()
    Thread(target=_send, args=(options, ended, problems), name="kafka-chunked-lineage", daemon=True).start()
    try:
        problem = problems.get(timeout=options.openlineage_timeout_ms / 1000)
    except Empty:
        problem = f"it took longer than openlineage.timeout.ms={options.openlineage_timeout_ms}"
    if problem:
        spark_application.remember(_FAILED)
        driver_log.warn(
            f"{ended.label}the write is {ended.outcome}, but its OpenLineage event was not sent: {problem}"
        )


def _send(options: SinkOptions, ended: EndedWrite, problems: SimpleQueue[str]) -> None:
    """Put why the event was not sent, or an empty text."""
    try:
        from openlineage.client import OpenLineageClient

        client = OpenLineageClient()
        if client.transport.kind == "console" and not client.config.transport:
            problems.put(
                "no transport is configured: set OPENLINEAGE_URL or OPENLINEAGE_CONFIG on the driver"
            )
            return
        try:
            client.emit(event(options, ended))
        finally:
            client.close(timeout=options.openlineage_timeout_ms / 1000)
    except Exception as error:  # noqa: BLE001 - of any transport
        text = _QUERY.sub("", _LOGIN.sub("//", f"{type(error).__name__}: {error}"))
        problems.put(printable(text))
    else:
        problems.put("")


def event(options: SinkOptions, ended: EndedWrite) -> RunEvent:
    """The run of a job or micro-batch, which has ended. A write that was aborted has no statistics."""
    from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
    from openlineage.client.facet_v2 import job_type_job, processing_engine_run
    from openlineage.client.uuid import generate_new_uuid

    name, version = _engine()
    engine = processing_engine_run.ProcessingEngineRunFacet(
        version=version, name=name, openlineageAdapterVersion=__version__, producer=_PRODUCER
    )
    kind = job_type_job.JobTypeJobFacet(
        processingType="BATCH" if ended.batch is None else "STREAMING",
        integration=name.upper(),
        jobType="JOB",
        producer=_PRODUCER,
    )
    return RunEvent(
        eventType=RunState.FAIL if ended.outcome == "aborted" else RunState.COMPLETE,
        eventTime=ended.identity["time"],
        run=Run(runId=str(generate_new_uuid()), facets={"processing_engine": engine}),
        job=Job(
            namespace=options.openlineage_job_namespace,
            name=options.openlineage_job_name,
            facets={"jobType": kind},
        ),
        producer=_PRODUCER,
        inputs=[],
        outputs=_outputs(options, ended),
    )


def _engine() -> tuple[str, str]:
    spark = sys.modules.get("pyspark")
    return ("python", platform.python_version()) if spark is None else ("spark", str(spark.__version__))


def _outputs(options: SinkOptions, ended: EndedWrite) -> list[OutputDataset]:
    """A dataset for each topic, named as OpenLineage's own integrations name it: by the first server."""
    from openlineage.client.event_v2 import OutputDataset
    from openlineage.client.facet_v2 import OutputDatasetFacet, output_statistics_output_dataset

    by_topic: dict[str, list[dict[str, Any]]] = {}
    for one in partitions_of(ended.results):
        by_topic.setdefault(one.pop("topic"), []).append(one)
    host, port = options.bootstrap_servers[0]
    namespace = f"kafka://[{host}]:{port}" if ":" in host else f"kafka://{host}:{port}"
    outputs = []
    for topic, partitions in by_topic.items():
        delivery = OutputDatasetFacet(producer=_PRODUCER)
        facets: dict[str, Any] = {
            "kafkaChunked_delivery": delivery.with_additional_properties(partitions=partitions)
        }
        if ended.outcome != "aborted":
            rows, size = (sum(one[name] for one in partitions) for name in ("rows", "bytes"))
            facets["outputStatistics"] = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
                rowCount=rows, size=size, producer=_PRODUCER
            )
        outputs.append(OutputDataset(namespace=namespace, name=topic, outputFacets=facets))
    return outputs
