"""Changes a bit of what has arrived, before anything looks at it."""

from __future__ import annotations

from typing import Any

import numpy as np

from hurray_wire.checksum import Hash


def flip(marker: bytes) -> None:
    """From now on, in this process: one bit of each chunk that holds the marker is wrong when its checksum is taken."""
    whole = Hash.__call__

    def flipped(self: Hash, buffer: Any) -> int:
        at = bytes(buffer).find(marker)
        if at >= 0:
            np.asarray(buffer)[at] ^= 1
        return whole(self, buffer)

    Hash.__call__ = flipped  # type: ignore[method-assign]
