"""Loaded by the interpreter of a process that is started with this folder in PYTHONPATH: it speaks the version of the
protocol that HURRAYTEST_PROTOCOL_VERSION names."""

import os

from hurray_wire import messages

messages.PROTOCOL_VERSION = int(os.environ["HURRAYTEST_PROTOCOL_VERSION"])
