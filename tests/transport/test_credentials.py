"""Credentials: what is refused at the start, by field, and what a change on disk does."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hurray_wire.credentials import Credentials, Pem, WatchedCredentials, read_credentials
from hurray_wire.errors import Misuse
from transport.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.parametrize("name", ["certificate", "key", "ca"])
@pytest.mark.parametrize("content", [None, b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAAAA\n", b"x" * (2 << 20)])
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, authority: Authority, name: str, content: bytes | None
) -> None:
    path = tmp_path / "bad.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Misuse) as caught:
        read_credentials(replace(authority.tenant("a"), **{name: path}), section="tls.data")
    assert caught.value.field == f"tls.data.{name}"
    assert str(path) in caught.value.message


def test_files_that_do_not_belong_together_are_refused(authority: Authority) -> None:
    a, b = authority.tenant("a"), authority.tenant("b")
    with pytest.raises(Misuse) as caught:
        read_credentials(replace(a, key=b.key))
    assert caught.value.field == "tls.key"
    with pytest.raises(Misuse) as caught:
        read_credentials(authority.issue("nobody", common_name=None))
    assert caught.value.field == "tls.certificate"
    read_credentials(authority.issue("expired", expired=True))
    with pytest.raises(Misuse, match="not valid now"):
        read_credentials(authority.issue("expired", expired=True)).require_valid("tls")


def test_a_change_that_fits_is_taken_and_one_that_does_not_is_said_once(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own").mkdir()
    own = Credentials(tmp_path / "own" / "c", tmp_path / "own" / "k", authority.path)

    def install(path: Path, made: Path) -> None:
        shutil.copy(made, tmp_path / "staged")
        (tmp_path / "staged").replace(path)

    old, new = authority.tenant("a"), authority.tenant("b")
    install(own.certificate, old.certificate)
    install(own.key, old.key)
    built: list[Pem] = []

    def build(pem: Pem) -> str:
        built.append(pem)
        return pem.identity

    watched = WatchedCredentials(own, build)
    assert watched.current() == watched.current() == "spiffe://hurray/tenant/a"
    assert len(built) == 1
    install(own.certificate, new.certificate)
    with caplog.at_level(logging.ERROR):
        assert watched.current() == watched.current() == "spiffe://hurray/tenant/a"
    (record,) = caplog.records
    assert "tls.key" in record.getMessage()
    install(own.key, new.key)
    assert watched.current() == watched.current() == "spiffe://hurray/tenant/b"
    own.key.unlink()
    with caplog.at_level(logging.ERROR):
        assert watched.current() == watched.current() == "spiffe://hurray/tenant/b"
    assert len(caplog.records) == 2
    install(own.key, new.key)
    assert watched.current() == "spiffe://hurray/tenant/b"
    assert len(built) == 3
