"""Anonymous memory that is handed to another process by its descriptor, and taken from one that is not trusted.

What a mapping reads can vanish under it: a file that shrinks, or a huge page that the system lacks, is a SIGBUS in
whoever maps it. So what arrives is mapped only if it is memory of the kernel's own tmpfs, of a size that seals hold.
The name of a memfd is for people who read /proc; the memory goes with its last descriptor and mapping.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from typing import Final

import numpy as np
import numpy.typing as npt

from hurray_wire.errors import ProtocolViolation

Bytes = npt.NDArray[np.uint8]

# linux/memfd.h, linux/fcntl.h and linux/magic.h: not in Python's modules.
_MFD_NOEXEC_SEAL: Final = 0x0008
_F_SEAL_FUTURE_WRITE: Final = 0x0010
_TMPFS_MAGIC: Final = 0x01021994

SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""What received memory must carry: its size is what it is, and stays so."""

_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def create(name: str, nbytes: int) -> tuple[int, Bytes]:
    """New memory, all of it present: (descriptor, writable array of uint8 [nbytes]).

    It is sealed in its size, and against writing through any mapping but this one. Raises OSError where there is not
    enough memory.
    """
    descriptor = _memfd(name)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SIZE_SEALS | _F_SEAL_FUTURE_WRITE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, np.frombuffer(memory, np.uint8)


def map_received(descriptor: int, nbytes: int) -> Bytes:
    """Memory that a peer sent, as a read-only array of uint8 [nbytes]; the descriptor stays the caller's.

    The peer can still write to it. Raises ProtocolViolation for memory that could vanish or has another size, OSError
    where it cannot be mapped.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolViolation("the peer's descriptor is not a memfd", field="shm.memory") from error
    if seals & SIZE_SEALS != SIZE_SEALS:
        raise _refusal("seals", f"{seals:#x}", f"{SIZE_SEALS:#x} among them")
    if _filesystem(descriptor) != _TMPFS_MAGIC:
        raise _refusal("filesystem", f"{_filesystem(descriptor):#x}", f"{_TMPFS_MAGIC:#x} (tmpfs, no huge pages)")
    size = os.fstat(descriptor).st_size
    if size != nbytes:
        raise _refusal("size", size, nbytes)
    memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    return np.frombuffer(memory, np.uint8)


def _refusal(what: str, offered: object, required: object) -> ProtocolViolation:
    return ProtocolViolation(
        f"the peer's memory is not safe to map: its {what}",
        field=f"shm.memory.{what}",
        offered=offered,
        required=required,
    )


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        # Where the system forbids executable memfds (vm.memfd_noexec) nothing else is given out.
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)  # Linux before 6.3


def _filesystem(descriptor: int) -> int:
    """`f_type` of statfs(2): the first long of its result, which is below 256 bytes everywhere."""
    result = (ctypes.c_long * 32)()
    if _LIBC.fstatfs(descriptor, result):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result[0])
