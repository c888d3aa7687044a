"""From security options to a TLS context and a SASL exchange: the one place for executors, coordinator and
planning alike. Nothing here touches a broker's socket."""
