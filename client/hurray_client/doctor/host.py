"""This host: UCX and what it can do here, RDMA, GPUs, limits of a process, /dev/shm."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from hurray_client.doctor.findings import Finding, Status

PROBE_S: Final = 60.0
"""Longest time to load UCX and CUDA, in a process of their own."""

MEMLOCK_MIN_BYTES: Final = 1 << 30
"""Registered memory is locked: rings, and the arena where a peer may read it. Less than this is of no use."""

SHM_MIN_BYTES: Final = 1 << 30
DESCRIPTORS_MIN: Final = 4096

_VERBS: Final = ("rc", "ud", "dc", "ib")
_CUPY: Final = ("cupy-cuda12x", "cupy-cuda13x")
_PREFER_SYSTEM: Final = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"

_PROBE: Final = """
import json
from hurray_wire.cuda import why_no_cuda
from hurray_wire.errors import HurrayError
from hurray_wire.transport.ucx import loaded_ucx
found = {"ucx": None, "why_no_ucx": None}
try:
    found["ucx"] = loaded_ucx()
except HurrayError as error:
    found["why_no_ucx"] = error.message
found["why_no_cuda"] = why_no_cuda()
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the configuration asks of UCX. `required`: no start without it."""

    net_devices: tuple[str, ...] = ()
    tls: tuple[str, ...] = ()
    required: bool = False

    @property
    def rdma(self) -> bool:
        """Whether RDMA is asked for."""
        named = any(name.startswith(_VERBS) for name in self.tls)
        return named or any(":" in device or _is_rdma(device) for device in self.net_devices)

    @property
    def cuda(self) -> bool:
        """Whether GPUs are."""
        return any(name.startswith("cuda") for name in self.tls)


def look_at_host(wishes: Wishes, *, shm: Path = Path("/dev/shm")) -> Iterator[Finding]:  # noqa: S108 -- looked at only
    """One finding for each check. `shm`: where POSIX shared memory is."""
    probed = _probe()
    yield _look_at_ucx(probed, wishes)
    if probed["ucx"] is not None:
        yield _look_at_rdma(probed["ucx"], wishes)
    yield _look_at_gpu(probed, wishes)
    yield _look_at_memlock(wishes)
    yield _look_at_shm(shm)
    yield _look_at_descriptors()


def _probe() -> dict[str, Any]:
    """In a process of its own: loading UCX and CUDA changes the process that does it."""
    try:
        ran = subprocess.run(  # noqa: S603
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S, check=True
        )
        found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        said = str(getattr(error, "stderr", "") or error).strip().splitlines()
        why = f"loading it ends the process: {said[-1] if said else error}"
        return {"ucx": None, "why_no_ucx": why, "why_no_cuda": why}
    return found


def _look_at_ucx(probed: dict[str, Any], wishes: Wishes) -> Finding:
    ucx = probed["ucx"]
    if ucx is None:
        status = Status.FAILED if wishes.required else Status.NOTE
        return Finding("ucx", status, f"no UCX: {probed['why_no_ucx']}", "pip install 'hurray-transfer[ucx]'")
    what = f"UCX {ucx['version']} from {ucx['path']}, which can use {ucx['transports']}"
    if os.environ.get(_PREFER_SYSTEM, "").lower() == "true" and "site-packages" in ucx["path"]:
        return Finding(
            "ucx",
            Status.WARNING,
            f"the system's UCX was asked for ({_PREFER_SYSTEM}), and the wheel's was loaded: {what}",
            "install the development package of the system's UCX: the loader wants its unversioned .so links",
            ucx,
        )
    return Finding("ucx", Status.OK, what, facts=ucx)


def _look_at_rdma(ucx: dict[str, str], wishes: Wishes) -> Finding:
    devices = sorted(path.name for path in _listed(Path("/sys/class/infiniband")))
    facts: dict[str, Any] = {"devices": devices}
    wanted = Status.FAILED if wishes.rdma or devices else Status.NOTE
    seen = f"devices here: {', '.join(devices)}" if devices else "no RDMA device here"
    if not list(Path(ucx["path"]).parent.glob("ucx/libuct_ib.so*")):
        return Finding(
            "rdma",
            wanted,
            f"this UCX is built without verbs, so there is no RDMA: {ucx['path']} ({seen})",
            f"install UCX 1.19 or newer on the system, with its development package, and set {_PREFER_SYSTEM}=true",
            facts,
        )
    if not devices:
        return Finding("rdma", wanted, "no RDMA device: /sys/class/infiniband has none", facts=facts)
    if not any(name.startswith(_VERBS) for name in ucx["transports"].split(",")):
        return Finding(
            "rdma",
            Status.FAILED,
            f"UCX has verbs and cannot use {', '.join(devices)}",
            "see that /dev/infiniband is there, also in a container, and may be opened; ibv_devinfo shows the ports",
            facts,
        )
    return Finding("rdma", Status.OK, f"UCX has verbs for {', '.join(devices)}", facts=facts)


def _look_at_gpu(probed: dict[str, Any], wishes: Wishes) -> Finding:
    installed = [f"{name} {found}" for name in _CUPY if (found := _version(name)) is not None]
    asks = installed or (["ucx.tls names cuda"] if wishes.cuda else [])
    why = probed["why_no_cuda"]
    if why is None:
        return Finding("gpu", Status.OK, f"a GPU; {', '.join(installed)}")
    if not asks:
        return Finding("gpu", Status.NOTE, "no CUDA install (extra cuda12 or cuda13): host memory only")
    return Finding(
        "gpu",
        Status.FAILED,
        f"installed for CUDA ({', '.join(asks)}), and {why}",
        "nvidia-smi shows driver and GPUs; a container needs the NVIDIA runtime (--gpus all)",
        {"asks": asks},
    )


def _look_at_memlock(wishes: Wishes) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= MEMLOCK_MIN_BYTES:
        return Finding("memlock", Status.OK, f"memory that may be locked: {_limit(soft)}", facts={"bytes": soft})
    return Finding(
        "memlock",
        Status.FAILED if wishes.rdma else Status.NOTE,
        f"memlock is {_limit(soft)}: RDMA cannot register the memory it needs; nothing else locks any",
        "ulimit -l unlimited; LimitMEMLOCK=infinity in the unit; --ulimit memlock=-1 for a container",
        {"bytes": soft},
    )


def _look_at_shm(shm: Path) -> Finding:
    remedy = "mount it larger, or --shm-size for a container, if such processes run here"
    whom = "hurrayd does not use it (memfd); engines and UCX's posix and sysv transports do"
    try:
        stat = os.statvfs(shm)
    except OSError as error:
        return Finding("dev_shm", Status.WARNING, f"{shm} cannot be looked at: {error.strerror}; {whom}", remedy)
    size = stat.f_frsize * stat.f_blocks
    if size < SHM_MIN_BYTES:
        return Finding("dev_shm", Status.WARNING, f"{shm} is tiny, {_limit(size)}: {whom}", remedy, {"bytes": size})
    return Finding("dev_shm", Status.OK, f"{shm} has {_limit(size)}", facts={"bytes": size})


def _look_at_descriptors() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS_MIN:
        return Finding(
            "descriptors",
            Status.WARNING,
            f"a process may have {hard} open files: each peer, and each part of a large arena, takes some",
            "LimitNOFILE in the unit; --ulimit nofile for a container",
            {"hard": hard},
        )
    return Finding("descriptors", Status.OK, f"open files: up to {'any number' if hard < 0 else hard}")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _is_rdma(device: str) -> bool:
    return Path("/sys/class/infiniband", device).exists()


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _limit(nbytes: int) -> str:
    """A size, for people."""
    if nbytes == resource.RLIM_INFINITY:
        return "unlimited"
    value, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"
