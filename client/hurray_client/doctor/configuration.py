"""A configuration of hurrayd and this host: certificates, ports, the advertised address; before hurrayd starts here, or
while it runs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from hurray_client.doctor.calls import ask, connects, dialled, split
from hurray_client.doctor.findings import Finding, Status, failed_by
from hurray_client.doctor.host import Wishes
from hurray_client.info import NodeInfo
from hurray_wire.credentials import Credentials, read_credentials
from hurray_wire.errors import HurrayError, Unauthenticated

CHECK_S: Final = 60.0
EXPIRES_SOON: Final = timedelta(days=14)

_LISTENING: Final = "0A"
"""TCP_LISTEN, as /proc/net/tcp has it."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What hurrayd makes of its configuration (`hurrayd --check --json`)."""

    error: str | None = None
    advertise: str | None = None
    sockets: dict[str, tuple[str, int]] = field(default_factory=dict)
    credentials: dict[str, Credentials] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    ucx: dict[str, Any] = field(default_factory=dict)

    @property
    def wishes(self) -> Wishes:
        """What it asks of UCX."""
        if "ucx" not in self.kinds:
            return Wishes()
        return Wishes(tuple(self.ucx["net_devices"]), tuple(self.ucx["tls"]), "ucx" in self.required)


def read_configuration(path: Path | None) -> Configuration:
    """As hurrayd reads it, environment included. `path`: the file; None: the one it reads unasked."""
    arguments = [_hurrayd(), "--check", "--json", *([] if path is None else ["--config", str(path)])]
    try:
        ran = subprocess.run(arguments, capture_output=True, text=True, timeout=CHECK_S, check=False)  # noqa: S603
        found = json.loads(ran.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return Configuration(error=f"hurrayd cannot be asked: {error}")
    wrong = found.pop("error")
    return Configuration(
        error=None if wrong is None else wrong["message"],
        advertise=found.get("advertise"),
        sockets={name: (host, port) for name, (host, port) in found.get("sockets", {}).items()},
        credentials={
            section: Credentials(*(Path(files[name]) for name in ("certificate", "key", "ca")))
            for section, files in found.get("credentials", {}).items()
        },
        kinds=tuple(found.get("kinds", ())),
        required=tuple(found.get("required", ())),
        left_out=found.get("left_out", {}),
        ucx=found.get("ucx", {}),
    )


def look_at_configuration(configuration: Configuration, tls: Credentials | None) -> Iterator[Finding]:
    """One finding for each check, or several. `tls`: by which the node may be called where it runs."""
    if configuration.error is None:
        yield Finding("configuration", Status.OK, f"transports {', '.join(configuration.kinds)}")
    else:
        yield Finding("configuration", Status.FAILED, configuration.error, "hurrayd --check says the same")
    for kind, why in configuration.left_out.items():
        yield Finding("transports", Status.NOTE, f"{kind} is left out: {why}")
    for section, files in configuration.credentials.items():
        yield look_at_certificate(section, files)
    if "listen" not in configuration.sockets:
        return
    node, finding = _look_for_node(configuration, tls)
    yield finding
    if node is not None:
        yield from look_at_unusable(node)
    if finding.status is Status.FAILED:
        return
    runs = finding.check == "node"
    if not runs:
        yield from _look_at_ports(configuration)
    if configuration.advertise is not None:
        yield _dial_back(configuration, configuration.advertise, node, runs, tls)


def look_at_unusable(node: NodeInfo) -> Iterator[Finding]:
    """A finding for each transport that the node has and cannot use."""
    for kind, why in node.unusable_transports.items():
        what = f"{node.node} has {kind} and cannot use it: {why}"
        remedy = "by itself once nothing is held; to end its mover helps at once, and loses what is held"
        yield Finding("transports", Status.WARNING, what, remedy, {"transport": kind})


def look_at_certificate(section: str, files: Credentials) -> Finding:
    """Whether it can be used now, and for how long."""
    try:
        pem = read_credentials(files, section=section)
    except HurrayError as error:
        return failed_by("certificates", error)
    now, facts = datetime.now(UTC), {"certificate": str(files.certificate), "not_after": pem.not_after.isoformat()}
    until = f"{pem.not_after:%Y-%m-%d %H:%M:%S}Z"
    remedy = "issue it anew; a changed file is read again without a restart"
    if now > pem.not_after:
        what = f"{section}.certificate has expired: {files.certificate} was valid until {until}"
        return Finding("certificates", Status.FAILED, what, remedy, facts)
    if now < pem.not_before:
        what = f"{section}.certificate is not valid yet: {files.certificate}, from {pem.not_before:%Y-%m-%d %H:%M:%S}Z"
        return Finding("certificates", Status.FAILED, what, "see the clock of this host", facts)
    if now + EXPIRES_SOON > pem.not_after:
        what = f"{section}.certificate expires soon: {files.certificate}, {until}"
        return Finding("certificates", Status.WARNING, what, remedy, facts)
    return Finding("certificates", Status.OK, f"{section}.certificate is {pem.identity}'s, until {until}", facts=facts)


# --- ports --------------------------------------------------------------------------------------------------------


def _look_for_node(configuration: Configuration, tls: Credentials | None) -> tuple[NodeInfo | None, Finding]:
    """Whether hurrayd runs where it is to listen. A finding on the check "node" says so, one on "ports" that it does
    not, or that something else is there."""
    place = configuration.sockets["listen"]
    target = dialled(place)
    if place[1] == 0 or not connects(place):
        return None, _look_at_port("listen", place)
    try:
        node = ask(target, tls)
    except Unauthenticated as error:
        return None, Finding("node", Status.NOTE, f"a node runs at {target}, and does not talk to us: {error.message}")
    except HurrayError as error:
        facts = {"field": "listen", "offered": target, "error": str(error)}
        what = f"port {place[1]} is taken{_taken_by(place[1])}: what answers at {target} is no hurrayd"
        return None, Finding("ports", Status.FAILED, what, "stop it, or choose another listen", facts)
    ready = "ready" if node.ready else "not ready: draining, or its data plane is not up"
    status = Status.OK if node.ready else Status.WARNING
    return node, Finding(
        "node", status, f"{node.node} runs at {target}, {ready}; transports {', '.join(node.transports)}"
    )


def _look_at_ports(configuration: Configuration) -> Iterator[Finding]:
    for name, place in configuration.sockets.items():
        if name != "listen":
            yield _look_at_port(f"{name}.listen", place)
    if "ucx" in configuration.kinds:
        first, last = configuration.ucx["first_port"], configuration.ucx["last_port"]
        free = [port for port in range(first, last + 1) if _cannot_bind(("", port)) is None]
        if free:
            yield Finding("ports", Status.OK, f"ucx: {len(free)} ports of {first}-{last} are free")
        else:
            what = f"ucx: every port of {first}-{last} is taken"
            yield Finding("ports", Status.FAILED, what, "a larger range: each process that uses UCX takes one port")


def _look_at_port(field_: str, place: tuple[str, int]) -> Finding:
    host, port = place
    error = _cannot_bind(place)
    shown = f"{host}:{port}"
    facts = {"field": field_, "offered": shown}
    if error is None:
        return Finding("ports", Status.OK, f"{field_}: {shown} is free", facts=facts)
    if error.errno == errno.EADDRINUSE:
        what = f"{field_}: port {port} is taken{_taken_by(port)}"
        return Finding("ports", Status.FAILED, what, "stop it, or choose another port", facts)
    if error.errno == errno.EADDRNOTAVAIL:
        what = f"{field_}: {host} is no address of this host"
        return Finding("ports", Status.FAILED, what, "ip address shows which there are", facts)
    return Finding(
        "ports", Status.FAILED, f"{field_}: {shown} cannot be listened at: {error.strerror or error}", "", facts
    )


def _cannot_bind(place: tuple[str, int]) -> OSError | None:
    host, port = place
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else one that has just ended counts
            probe.bind((host, port))
            probe.listen(1)
    except OSError as error:
        return error
    return None


def _taken_by(port: int) -> str:
    """Whose it is, for people; "" where that cannot be seen."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(descriptor) in inodes:
                process = descriptor.parents[1]
                name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
                return f" by {name} (pid {process.name})"
    return ""


# --- the advertised address ---------------------------------------------------------------------------------------


def _dial_back(
    configuration: Configuration, advertised: str, node: NodeInfo | None, runs: bool, tls: Credentials | None
) -> Finding:
    """Whether what peers are told leads here: to the node that runs, or to a socket that listens in its place."""
    listen = configuration.sockets["listen"]
    host, _ = split(advertised)
    facts = {"field": "advertise", "offered": advertised}
    remedy = "advertise must be an address by which other hosts reach this one"
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        what = f"the advertised address {advertised} cannot be looked up: {error.strerror}"
        return Finding("advertise", Status.FAILED, what, remedy, facts)
    shown = f"{advertised} ({', '.join(found)})"
    if node is not None:
        try:
            reached = ask(advertised, tls).incarnation == node.incarnation
        except HurrayError as error:
            what = f"the advertised address {shown} is not reached: {error.message}"
            return Finding("advertise", Status.FAILED, what, remedy, facts)
        what = f"the advertised address {shown} leads to another node"
    elif runs:
        reached, what = connects(split(advertised)), f"the advertised address {shown} is not reached"
    else:
        reached, what = _leads_here(listen, split(advertised)), f"the advertised address {shown} is not reached"
    if not reached:
        return Finding("advertise", Status.FAILED, what, remedy, facts)
    local = all(address.startswith("127.") or address == "::1" for address in found)
    if local and not listen[0].startswith("127."):
        what = f"the advertised address {shown} is loopback: other hosts reach themselves by it"
        return Finding("advertise", Status.FAILED, what, remedy, facts)
    return Finding("advertise", Status.OK, f"the advertised address {shown} leads back here", facts=facts)


def _leads_here(listen: tuple[str, int], advertised: tuple[str, int]) -> bool:
    try:
        with socket.create_server(listen, family=socket.AF_INET6 if ":" in listen[0] else socket.AF_INET) as server:
            server.settimeout(0)
            if not connects(advertised):
                return False
            server.accept()[0].close()
    except OSError:
        return False
    return True


def _hurrayd() -> str:
    beside = Path(sys.executable).with_name("hurrayd")
    return str(beside) if beside.exists() else shutil.which("hurrayd") or str(beside)
