"""The Hurray block-paged format and the movement of its bytes.

Knows no daemon, no policy of who may do what, and no command line. The layers, which import-linter holds in full:
messages and data plane, above transports and status, above session machines and payloads, above snapshots, pages and
validation, above the descriptor codec, above errors, limits and element types.
"""
