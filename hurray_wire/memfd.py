"""Anonymous memory that is handed to another process by its descriptor, and taken from one that is not trusted.

What a mapping reads can vanish under it: a file that shrinks, or a huge page that the system lacks, is a SIGBUS in
whoever maps it. So what arrives is mapped only if it is memory of the kernel's own tmpfs, of a size that seals hold.
The name of a memfd is for people who read /proc; the memory goes with its last descriptor and mapping.

Memory that is read or served for long is mapped into a range of addresses that was taken before, memfd beside memfd.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
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

# mmap(2): not in the modules of every Python that is supported.
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000

# madvise(2): likewise.
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14: touch pages, for writing without changing what is in them."""
_MADV_COLLAPSE: Final = 25
"""Linux 6.1: put what is there into huge pages now, whether or not shared memory gets them by itself."""

SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""What received memory must carry: its size is what it is, and stays so."""

HUGE_PAGE_BYTES: Final = 2 << 20
"""Addresses that are taken for long begin at a multiple of this, so that huge pages can be mapped there."""

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def create(name: str, nbytes: int) -> tuple[int, Bytes]:
    """New memory, all of it present, in huge pages where it fills some: (descriptor, writable array of uint8 [nbytes]).

    It is sealed in its size, and against writing through any mapping but this one. Raises OSError where there is not
    enough memory.
    """
    _, memory = take_addresses(nbytes, writable=True)
    descriptor = create_at(memory.ctypes.data, name, nbytes)
    try:
        if nbytes < HUGE_PAGE_BYTES or not populate(memory.ctypes.data, nbytes):
            os.posix_fallocate(descriptor, 0, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, memory


def create_at(address: int, name: str, nbytes: int) -> int:
    """New memory of zero bytes in the place of what is mapped at `address`, writable there: its descriptor.

    Sealed as `create` seals, but not present: it is found page by page as it is touched. Raises OSError; then what was
    mapped there may be gone.
    """
    descriptor = _memfd(name)
    try:
        os.ftruncate(descriptor, nbytes)
        _map_at(address, descriptor, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        _seal(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def populate(address: int, nbytes: int) -> bool:
    """Have shared memory that is mapped there present, in huge pages where the kernel can, its contents unchanged.

    False where the kernel does not (Linux before 5.14, memory is short).
    """
    # Huge pages are made faster of nothing than of what is there, and not at all where nothing is.
    for offset in range(0, nbytes, HUGE_PAGE_BYTES):
        if not advise(address + offset, min(mmap.PAGESIZE, nbytes), _MADV_POPULATE_WRITE):
            return False
    advise(address, nbytes, _MADV_COLLAPSE)
    return advise(address, nbytes, _MADV_POPULATE_WRITE)


def advise(address: int, nbytes: int, advice: int) -> bool:
    """madvise(2), which the kernel may refuse. Through ctypes, which releases the GIL meanwhile; the method of
    mmap.mmap does not."""
    return not _LIBC.madvise(address, nbytes, advice)


def take_addresses(nbytes: int, *, writable: bool) -> tuple[mmap.mmap, Bytes]:
    """`nbytes` of addresses to map memory at, and the array of uint8 [nbytes] over them. All goes, with whatever is
    mapped there by then, when the last array does. Raises OSError."""
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    taken = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=flags, prot=prot)
    whole = np.frombuffer(taken, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    return taken, whole[start : start + nbytes]


def map_received(descriptor: int, nbytes: int) -> Bytes:
    """Memory that a peer sent, as a read-only array of uint8 [nbytes]; the descriptor stays the caller's.

    The peer can still write to it. Raises ProtocolViolation for memory that could vanish or has another size, OSError
    where it cannot be mapped.
    """
    size = _sealed_size(descriptor)
    if size != nbytes:
        raise _refusal("size", size, nbytes)
    _, memory = take_addresses(nbytes, writable=False)
    _map_at(memory.ctypes.data, descriptor, nbytes, mmap.PROT_READ)
    advise(memory.ctypes.data, nbytes, _MADV_POPULATE_READ)
    return memory


def map_received_at(address: int, descriptor: int, nbytes: int) -> None:
    """The first `nbytes` of memory that a peer sent, read-only in the place of what is mapped at `address`.

    Raises as `map_received` does; a size is wrong if it is less.
    """
    size = _sealed_size(descriptor)
    if size < nbytes:
        raise _refusal("size", size, f"at least {nbytes}")
    _map_at(address, descriptor, nbytes, mmap.PROT_READ)


def _sealed_size(descriptor: int) -> int:
    """Bytes of a peer's memory, which its seals hold. Raises ProtocolViolation for what could vanish."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolViolation("the peer's descriptor is not a memfd", field="shm.memory") from error
    if seals & SIZE_SEALS != SIZE_SEALS:
        raise _refusal("seals", f"{seals:#x}", f"{SIZE_SEALS:#x} among them")
    status = os.fstat(descriptor)
    if status.st_dev != _own_device() and _filesystem(descriptor) != _TMPFS_MAGIC:
        raise _refusal("filesystem", f"{_filesystem(descriptor):#x}", f"{_TMPFS_MAGIC:#x} (tmpfs, no huge pages)")
    return status.st_size


def _map_at(address: int, descriptor: int, nbytes: int, prot: int) -> None:
    if _LIBC.mmap(address, nbytes, prot, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _seal(descriptor: int) -> None:
    """In its size, and against every writing but through the mappings that are there."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SIZE_SEALS | _F_SEAL_FUTURE_WRITE)


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


@functools.cache
def _own_device() -> int:
    """Where the kernel keeps memfds like our own: what is there is on tmpfs, and need not be asked."""
    descriptor = _memfd("hurray-device")
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


def _filesystem(descriptor: int) -> int:
    """`f_type` of statfs(2): the first long of its result, which is below 256 bytes everywhere."""
    result = (ctypes.c_long * 32)()
    if _LIBC.fstatfs(descriptor, result):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result[0])
