"""The Hurray block-paged format and the movement of its bytes.

Knows no daemon, no policy of who may do what, and no command line. Layers, top first (import-linter holds them):
dataplane > transport, status > session > snapshot, validate, pages > descriptor, quantization > errors, limits, dtypes.
"""
