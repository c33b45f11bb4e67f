"""hurrayctl as people and programs run it: output, JSON, exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hurray_client as ht
from hurray_client.cli.main import app
from hurray_wire.hrry import load_hrry, save_hrry
from sdk.ports import WIDE_PORTS
from sdk.snapshots import assert_same_tokens, make_snapshot
from support.daemon import RunningDaemon, environment

MANIFEST = Path(__file__).parents[1] / "format" / "vectors" / "manifest.json"


def command(*arguments: str | Path) -> Any:
    """hurrayctl --json in a process of its own, as people and programs start it; what it printed."""
    done = subprocess.run(
        [Path(sys.executable).with_name("hurrayctl"), *map(str, arguments), "--json"],
        capture_output=True,
        env=environment(**WIDE_PORTS, HURRAY_TRANSPORTS="ucx"),
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def hurrayctl(*arguments: str | Path, status: int = 0, stdin: bytes | None = None, **env: str) -> str:
    """The same command in this process, which takes a tenth of the time: check its status, return what it printed."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, env=env)
    assert done.exit_code == status, (done.exit_code, done.output, done.exception)
    return done.stdout or done.stderr


def as_json(*arguments: str | Path, status: int = 0, **env: str) -> Any:
    return json.loads(hurrayctl(*arguments, "--json", status=status, **env))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_hrry(tmp_path / "in.hrry", make_snapshot())
    return tmp_path / "in.hrry"


def test_a_snapshot_there_and_back(daemon: RunningDaemon, client: ht.Client, file: Path, tmp_path: Path) -> None:
    target = ("-t", daemon.address)
    receipt = command("put", file, "-k", "cli/1", *target, "--lease", "30", "-a", "model=tiny")
    assert (receipt["key"], receipt["transport"], receipt["dirty_dead_slot_count"]) == ("cli/1", "ucx", 0)
    assert receipt["stages"][0]["stage"] == "reserve"

    (listed,) = command("ls", "cli/", *target)
    stat = command("stat", "cli/1", *target)
    assert listed["generation"] == stat["generation"] == receipt["generation"]
    assert stat["annotations"] == {"model": "tiny"}
    assert stat["token_counts"] == [10, 7, 0]
    assert [tensor["kv_role"] for tensor in stat["tensors"]] == ["key", "value"] * 2

    lease = command("renew", "cli/1", "--lease", "60", *target)
    assert lease["expire_time"] > receipt["expire_time"]
    got = command("get", "cli/1", "-o", tmp_path / "out.hrry", *target)
    assert got["generation"] == receipt["generation"]
    assert_same_tokens(load_hrry(tmp_path / "out.hrry"), make_snapshot())

    assert command("rm", "cli/1", *target) == [{"key": "cli/1", "generation": receipt["generation"]}]
    assert command("ls", *target) == []
    assert command("node", *target)["node"] == "test"


def test_for_people(daemon: RunningDaemon, client: ht.Client, file: Path, tmp_path: Path) -> None:
    env = {"HURRAY_TARGET": daemon.address}
    shown = hurrayctl("put", file, "-k", "cli/[red]2", "--no-checksum", **env)
    assert "cli/[red]2" in shown
    assert "pages" in shown
    assert "none" in shown
    shown = hurrayctl("ls", **env)
    assert "cli/[red]2" in shown
    assert "17" in shown
    assert "float16" in hurrayctl("stat", "cli/[red]2", **env)
    assert "ucx" in hurrayctl("get", "cli/[red]2", "-o", tmp_path / "o.hrry", "--consume", "--wait", "1", **env)
    shown = hurrayctl("stat", "cli/[red]2", status=3, **env)
    assert shown.startswith("KEY_DELETED: ")
    assert "arena.free_bytes" in hurrayctl("node", **env)


def test_failures_have_statuses(daemon: RunningDaemon, client: ht.Client, file: Path, tmp_path: Path) -> None:
    target = ("-t", daemon.address)
    error = as_json("get", "cli/none", "-o", tmp_path / "o.hrry", *target, status=3)["error"]
    assert (error["reason"], error["code"], error["details"]["key"]) == ("KEY_NOT_FOUND", "NOT_FOUND", "cli/none")
    assert not (tmp_path / "o.hrry").exists()
    as_json("put", file, "-k", "cli/3", *target)
    assert as_json("put", file, "-k", "cli/3", *target, status=1)["error"]["reason"] == "KEY_EXISTS"
    as_json("put", file, "-k", "cli/3", "--overwrite", *target)
    error = as_json("put", file, "-k", "x\ny", *target, status=1)["error"]
    assert error["details"]["field"] == "key"
    shm = ("--require-transport", "shm")
    assert as_json("put", file, "-k", "cli/4", *shm, *target)["transport"] == "shm"
    error = as_json("put", file, "-k", "cli/5", *shm, *target, status=1, HURRAY_SHM__PATH="/nowhere/x")["error"]
    assert error["reason"] == "CAPABILITY_MISMATCH"
    assert "/nowhere/x" in error["message"]
    error = as_json("ls", "-t", "127.0.0.1:1", "--timeout", "0.5", status=4)["error"]
    assert error["details"]["stage"] == "connect"
    assert as_json("put", file, "-k", "k", "--token-counts", "six", *target, status=1)["error"]["code"] == (
        "INVALID_ARGUMENT"
    )
    as_json("ls", *target, HURRAY_RETRY_S="-1", status=1)


def test_wrong_command_lines_are_status_2(tmp_path: Path) -> None:
    hurrayctl("frobnicate", status=2)
    hurrayctl("put", tmp_path / "missing.hrry", "-k", "k", status=2)
    hurrayctl("get", "k", status=2)


@pytest.mark.parametrize(
    "command", ["put", "get", "ls", "stat", "rm", "renew", "node", "drain", "inspect", "conformance", "doctor"]
)
def test_help_of_every_command(command: str) -> None:
    shown = hurrayctl(command, "--help")
    assert "--json" in shown
    assert "Usage: hurrayctl" in shown


def test_inspect(client: ht.Client, tmp_path: Path) -> None:
    client.put("cli/inspect", make_snapshot())
    data = client.stat("cli/inspect").descriptors[0].encode()
    (tmp_path / "descriptor.bin").write_bytes(data)
    shown = hurrayctl("inspect", tmp_path / "descriptor.bin")
    assert "page_size" in shown
    assert hurrayctl("inspect", "-", stdin=data.hex().encode()) == shown
    assert as_json("inspect", tmp_path / "descriptor.bin")["valid"] is True
    (tmp_path / "broken.bin").write_bytes(b"XXXX" + data[4:])
    assert "H1" in hurrayctl("inspect", tmp_path / "broken.bin", status=1)
    assert as_json("inspect", tmp_path / "broken.bin", status=1)["error"]["rule"] == "H1"
    as_json("inspect", tmp_path / "missing.bin", status=1)


def test_conformance(tmp_path: Path) -> None:
    lines = hurrayctl("conformance", MANIFEST).splitlines()
    assert lines[-1].endswith(" passed, 0 failed")
    manifest = json.loads(MANIFEST.read_bytes())
    right = manifest["valid"][:2]
    wrong = {**right[0], "id": "not so", "decoded": {**right[0]["decoded"], "page_size": 77}}
    manifest.update(valid=[*right, wrong], invalid=[], semantic=[])
    (tmp_path / "wrong.json").write_text(json.dumps(manifest))
    lines = hurrayctl("conformance", tmp_path / "wrong.json", status=1).splitlines()
    assert lines[-1] == "2 passed, 1 failed"
    assert lines[0].startswith("not so")
    assert as_json("conformance", tmp_path / "wrong.json", status=1)["failed"] == 1
    (tmp_path / "none.json").write_text("[]")
    hurrayctl("conformance", tmp_path / "none.json", status=1)
