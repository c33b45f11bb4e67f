"""The demo: `make demo` hands a KV cache from one process to another and shows what is refused on the way."""
