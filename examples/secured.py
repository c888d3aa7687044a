"""Write to a cluster that asks for a login over TLS.

    python examples/secured.py broker:9093 login.json authority.pem [topic]

login.json, which only you can read (chmod 600): {"username": "...", "password": "..."}
authority.pem: the certificate of the authority that signed the brokers' certificates. Without
kafka.ssl.truststore.* the system's authorities are trusted, which is right for most cloud services.

Options can be checked before a job runs: kafka-chunked-doctor --help
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

if len(sys.argv) < 4:
    sys.exit(__doc__)
servers, login_file, authority = sys.argv[1:4]
topic = sys.argv[4] if len(sys.argv) > 4 else "secured-example"
login = json.loads(Path(login_file).read_text(encoding="utf-8"))

# Names and values are those of Kafka's Java client, with "kafka." before them.
security = {
    "kafka.security.protocol": "SASL_SSL",
    "kafka.sasl.mechanism": "SCRAM-SHA-512",  # or PLAIN, SCRAM-SHA-256
    "kafka.sasl.username": login["username"],
    "kafka.sasl.password": login["password"],
    # The file must be at the same path on the driver and on all executors. For mutual TLS:
    # kafka.ssl.keystore.type, kafka.ssl.keystore.location, kafka.ssl.key.password.
    "kafka.ssl.truststore.type": "PEM",
    "kafka.ssl.truststore.location": os.path.abspath(authority),
}

# Spark's workers otherwise use the python3 on PATH, which may lack pyarrow and kafka-chunked.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.master("local[2]").appName("secured example").getOrCreate()
(
    spark.range(1_000)
    .select(F.col("id").cast("string").alias("value"))
    .write.format("kafka-chunked")
    .mode("append")
    .options(**security)
    .option("kafka.bootstrap.servers", servers)
    .option("topic", topic)
    .option("topic.create", "true")
    .save()
)
print(f"1,000 rows are in {topic}.")
spark.stop()
