"""Turns security options into TLS contexts and SASL exchanges, for executors, coordinator and planning.
Nothing here touches a broker's socket."""
