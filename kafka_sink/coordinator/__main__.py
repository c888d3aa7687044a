"""``python -m kafka_sink.coordinator``: started by the launcher, told everything through stdin."""

import sys

from kafka_sink.coordinator.server.process import main

if __name__ == "__main__":
    sys.exit(main())
