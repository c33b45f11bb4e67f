"""Loaded by the interpreter of a mover that is started with this folder in PYTHONPATH: between the arrival of a chunk
and its checksum, one bit of it changes, if it holds the marker that HURRAYTEST_FLIP names."""

import os
import sys

if "hurray_server.mover" in sys.orig_argv:
    from faults.flipping import flip

    flip(os.environ["HURRAYTEST_FLIP"].encode())
