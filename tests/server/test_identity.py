"""Who a certificate makes the caller, and who is nobody."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from hurray_server.grants import Grant, Grants, Right
from hurray_server.identity import CertifiedCallers
from hurray_server.principal import Principal, TenantNames
from hurray_wire.credentials import TENANT_URI
from hurray_wire.errors import PermissionDenied, Unauthenticated
from transport.certificates import Authority


class Connection:
    """As gRPC shows it. `certificate`: PEM, None for a connection without."""

    def __init__(self, certificate: bytes | None) -> None:
        self._certificate = certificate

    def peer(self) -> str:
        return "ipv4:10.0.0.9:1"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {} if self._certificate is None else {"x509_pem_cert": [self._certificate]}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


def caller(certificate: bytes | None, *, pattern: str = TENANT_URI, now: datetime | None = None) -> Principal:
    grants = Grants([Grant("ops", "", frozenset([Right.ADMIN]))])
    clock = {} if now is None else {"now": lambda: now}
    return CertifiedCallers(TenantNames(pattern), grants, **clock).principal(Connection(certificate))


def issued(authority: Authority, name: str, **options: Any) -> bytes:
    return authority.issue(name, **options).certificate.read_bytes()


def test_a_tenant_is_named_by_its_uri_or_else_by_its_common_name(authority: Authority) -> None:
    by_uri = caller(issued(authority, "other", uris=["spiffe://hurray/tenant/a", "https://a.example/"]))
    assert (by_uri.tenant, by_uri.identity, by_uri.admin) == ("a", "spiffe://hurray/tenant/a", False)
    by_name = caller(issued(authority, "ops"))
    assert (by_name.tenant, by_name.identity, by_name.admin) == ("ops", "ops", True)
    own_form = caller(
        issued(authority, "x", spiffe="spiffe://cluster.local/ns/a/sa/engine"),
        pattern="spiffe://cluster.local/ns/{tenant}/sa/engine",
    )
    assert own_form.tenant == "a"


@pytest.mark.parametrize(
    "options",
    [
        {"uris": ["spiffe://hurray/tenant/a", "spiffe://hurray/tenant/b"]},
        {"uris": ["spiffe://hurray/tenant/a", "spiffe://hurray/tenant/a"]},
        {"uris": ["spiffe://hurray/node/a"]},
        {"uris": ["spiffe://elsewhere/tenant/a"]},
        {"uris": ["spiffe://hurray/tenant/a/b"]},
        {"uris": ["spiffe://hurray/tenant/"]},
        {"uris": ["spiffe://hurray/tenant/a%2fb"]},
        {"uris": ["spiffe://hurray/tenant/a\n"]},
        {"uris": ["spiffe://hurray/tenant/a\0"]},
        {"common_name": None, "hosts": ["a.example"]},
        {"common_name": None, "uris": ["https://a.example"]},
        {"common_name": "a/b"},
        {"common_name": "a b"},
        {"common_name": "-a"},
        {"common_name": "x" * 64},
    ],
)
def test_a_certificate_that_is_no_tenants_is_refused_by_name(authority: Authority, options: dict[str, Any]) -> None:
    with pytest.raises(Unauthenticated) as caught:
        caller(issued(authority, "a", **options))
    assert caught.value.field == "certificate"
    assert caught.value.details["required"]


def test_a_connection_without_a_certificate_or_with_nonsense_is_refused() -> None:
    for certificate in (None, b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        with pytest.raises(Unauthenticated):
            caller(certificate)


def test_a_certificate_ends_with_its_time_though_the_connection_stays(authority: Authority) -> None:
    certificate = issued(authority, "a")
    caller(certificate)
    with pytest.raises(Unauthenticated, match="expired"):
        caller(certificate, now=datetime.now(UTC) + timedelta(days=2))


def test_keys_without_a_slash_are_the_callers_own(authority: Authority) -> None:
    principal = caller(issued(authority, "a"))
    assert principal.key("x") == "a/x"
    assert principal.key("b/x") == "b/x"
    assert principal.key("/x") == "/x"
    principal.require(Right.GET, "a/x")
    for key in ("b/x", "ab/x", "/x", "a", ""):
        with pytest.raises(PermissionDenied):
            principal.require(Right.GET, key)
    assert principal.listable("") == ("a/",)
    assert principal.listable("re") == ("a/re",)
    with pytest.raises(PermissionDenied):
        principal.listable("b/")
    with pytest.raises(PermissionDenied):
        principal.require_admin()


@pytest.mark.parametrize("pattern", ["", "{tenant}", "https://x/{tenant}", "spiffe://x/", "spiffe://{tenant}/{tenant}"])
def test_a_pattern_that_names_no_tenant_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="SPIFFE"):
        TenantNames(pattern)


def test_a_certificate_is_parsed_once(authority: Authority, tmp_path: Path) -> None:
    certificate = issued(authority, "a")
    callers = CertifiedCallers(TenantNames(TENANT_URI), Grants())
    first = callers.principal(Connection(certificate))
    assert callers.principal(Connection(certificate)) == first
    assert callers._holder.cache_info().misses == 1
