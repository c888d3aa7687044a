"""Draws the panels of docs/grafana-dashboard.json from the metrics of a real job, without Grafana.

    python tools/draw_dashboard.py prometheus [PICTURE]

The first argument is the command of a Prometheus server. Three brokers and a streaming job run for some
minutes, and one of the brokers is frozen in between. Prometheus reads the job's /metrics and evaluates each
query of the dashboard, so a query that fails or finds nothing is noticed here. Panels stand where Grafana
puts them, in the style of the benchmarks' plots.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from local_kafka import LocalBroker
from local_kafka.node_config import port_is_free

ROOT = Path(__file__).parents[1]
SECONDS = 150
# The queries' own variables. A rate looks back over four readings, as Grafana does.
VARIABLES = {"$__rate_interval": "20s", "$cluster": ".*", "$instance": ".*"}
INTERVAL_S = 5
JOB = """
import sys, time
from pyspark.sql import SparkSession, functions as F
servers, port, folder, seconds = sys.argv[1:]
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
rows = spark.readStream.format("rate").option("rowsPerSecond", 20000).option("numPartitions", 2).load()
rows = rows.select(
    F.when(F.col("value") % 4 == 0, "payments").otherwise("orders").alias("topic"),
    F.col("value").cast("string").alias("key"),
    F.to_json(F.struct("value", "timestamp", F.xxhash64("value").alias("check"))).alias("value"),
)
options = {"kafka.bootstrap.servers": servers, "checkpointLocation": folder, "ui.port": port}
options["kafka.compression.type"] = "lz4"
writer = rows.writeStream.format("kafka-chunked").options(**options).trigger(processingTime="4 seconds")
query = writer.start()
query.awaitTermination(int(seconds))
query.stop()
"""


def free_port(start: int) -> int:
    return next(port for port in range(start, start + 500) if port_is_free(port))


@contextmanager
def running(arguments: list[str], folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    # Spark's workers otherwise use the python3 on PATH.
    environ = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    with (
        (folder / f"{name}.log").open("wb") as log,
        subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=environ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()


def asked(url: str, path: str, **parameters: object) -> Any:
    address = f"{url}{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(address, timeout=10) as response:  # noqa: S310 - a server on this machine
        return json.load(response)["data"]["result"]


def measured(command: str, folder: Path) -> dict[str, list[Any]]:
    """What Prometheus has for each query of the dashboard after the job."""
    live, port = free_port(4100), free_port(9190)
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: {INTERVAL_S}s}}\nscrape_configs:\n"
        f"- {{job_name: kafka-chunked, static_configs: [{{targets: ['127.0.0.1:{live}']}}]}}\n"
    )
    with LocalBroker(brokers=3) as brokers:
        for topic in ("orders", "payments"):
            brokers.create_topic(topic, partitions=4)
        server = [command, f"--web.listen-address=127.0.0.1:{port}", "--config.file=prometheus.yml"]
        job = [sys.executable, "-c", JOB, brokers.bootstrap_servers, str(live), str(folder / "checkpoint")]
        with running(server, folder, "prometheus"), running([*job, str(SECONDS)], folder, "job") as process:
            start = time.time()
            time.sleep(SECONDS * 0.6)
            brokers.freeze(2)
            time.sleep(25)
            brokers.thaw(2)
            if process.wait(600):
                raise RuntimeError(f"the job ended with exit code {process.returncode}")
            return {
                expression: asked(
                    f"http://127.0.0.1:{port}",
                    "/api/v1/query_range",
                    query=with_values(expression),
                    start=start + 20,
                    end=time.time() - 2 * INTERVAL_S,
                    step=INTERVAL_S,
                )
                for panel in panels()
                for expression, _ in targets(panel)
            }


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())["panels"]
    return found


def targets(panel: dict[str, Any]) -> list[tuple[str, str]]:
    return [(target["expr"], target["legendFormat"]) for target in panel["targets"]]


def with_values(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def readable(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.1f} %"
    if unit == "s":
        return f"{value:.3g} s"
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            value, word = value / size, prefix
            break
    else:
        word = ""
    suffix = {"bytes": "B", "Bps": "B/s", "ops": "/s", "reqps": "/s"}.get(unit, "")
    return f"{value:.3g} {word}{suffix}".strip()


def tick(unit: str, value: float, _: object) -> str:
    return readable(value, unit)


def draw(results: dict[str, list[Any]], picture: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    drawn = pyplot.figure(figsize=(15, 17), facecolor="white")
    start = min(series["values"][0][0] for found in results.values() for series in found)
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels())
    for panel in panels():
        place, unit = panel["gridPos"], panel["fieldConfig"]["defaults"].get("unit", "short")
        left, bottom = place["x"] / 24, 1 - (place["y"] + place["h"]) / rows
        box = (left + 0.035, bottom + 0.02, place["w"] / 24 - 0.05, place["h"] / rows - 0.045)
        axes = drawn.add_axes(box)
        axes.set_title(panel["title"], loc="left", fontsize=10, weight="bold")
        if panel["type"] == "stat":
            ((expression, _),) = targets(panel)
            axes.axis("off")
            # The middle of the run: at its end the job stops.
            points = [float(value) for series in results[expression] for _, value in series["values"]]
            text = readable(points[len(points) // 2], unit) if points else "no data"
            axes.text(0, 0.3, text, fontsize=20, color="#2f6fb5", transform=axes.transAxes)
            continue
        for expression, legend in targets(panel):
            for series in results[expression]:
                name = legend
                for label, value in series["metric"].items():
                    name = name.replace("{{" + label + "}}", value)
                times = [(at - start) / 60 for at, _ in series["values"]]
                axes.plot(times, [float(value) for _, value in series["values"]], label=name, linewidth=1.3)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(lambda minutes, _: f"{minutes:g} min")
        axes.yaxis.set_major_formatter(partial(tick, unit))
        axes.tick_params(labelsize=7)
        axes.grid(color="#d0d7de", linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False, loc="best")
    drawn.savefig(picture, dpi=80)


def main() -> int:
    command = sys.argv[1]
    picture = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs" / "images" / "grafana-dashboard.png"
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = measured(command, Path(folder))
        except BaseException:
            for log in Path(folder).glob("*.log"):
                print(f"--- {log.name}", log.read_text(errors="replace")[-3000:], sep="\n", file=sys.stderr)
            raise
    draw(results, picture)
    empty = [expression for expression, found in results.items() if not found]
    print(f"{picture}: {len(results)} queries, of which {len(empty)} found nothing", *empty, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
