"""The coordinator process: its sockets, its clusters, one handler per kind of message."""
