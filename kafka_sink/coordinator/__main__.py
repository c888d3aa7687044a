"""``python -m kafka_sink.coordinator``: started by the launcher, which sends all settings through stdin."""

import sys

from kafka_sink.coordinator.process.supervisor import main

if __name__ == "__main__":
    sys.exit(main())
