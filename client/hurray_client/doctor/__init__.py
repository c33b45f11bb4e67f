"""Why does it not start, why is it slow: what can be found out about this host, its configuration, and a node."""
