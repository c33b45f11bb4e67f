"""Transports: what moves the bytes of a chunk from one process into memory that another has posted.

`base` is the seam; every other module implements it and passes the suite in `hurray_wire.testing.transport_suite`.
"""
