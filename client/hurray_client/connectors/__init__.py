"""Connectors: what lets serving engines hand their caches over without code of their own."""
