"""Loaded by the interpreter of a process that is started with this folder in PYTHONPATH: its clock is off by as many
seconds as HURRAYTEST_CLOCK_S says."""

import os
import time

_really, _off_s = time.time, float(os.environ["HURRAYTEST_CLOCK_S"])
time.time = lambda: _really() + _off_s
