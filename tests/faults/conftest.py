"""The environment of clients, as in the SDK's tests."""

from __future__ import annotations

import os

from sdk.ports import WIDE_PORTS

for _name in [name for name in os.environ if name.startswith("HURRAY_")]:
    del os.environ[_name]
os.environ.update(WIDE_PORTS)
