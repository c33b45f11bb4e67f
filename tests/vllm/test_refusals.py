"""Caches that do not fit an engine, and handles that are not what they seem: refused by field; nothing is touched."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import hurray_client as ht
from support.daemon import eventually
from support.identities import identified_daemon
from support.vllm_engines import (
    EngineProcess,
    Store,
    Trio,
    client_env,
    connector,
    engines,
    expected,
    loading,
    options,
    random_prompts,
    refused,
    replace_snapshot,
    up,
)


def test_caches_of_other_kinds_are_refused_by_name() -> None:
    script = Path(__file__).parents[1] / "support" / "vllm_supported.py"
    ran = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, timeout=180, check=True)
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "full": "taken",
        "windows treated as full": "taken",
        "MLA": "kv_cache_spec",
        "windows": "kv_cache_spec",
        "chunks": "kv_cache_spec",
        "states": "kv_cache_spec",
        "hybrid": "kv_cache_groups",
        "no cache": "kv_cache_groups",
        "scales per token": "kv_quant_mode",
        "pipeline": "pipeline_parallel_size",
        "context": "decode_context_parallel_size",
        "speculation": "speculative_config",
        "layout asked of a backend that has both": "LBNHC",
        "layout asked of a backend that has one": "LBHNC",
        "scales": {"k_scale.0": "0000003f0000803f", "v_scale.0": "0000803e00000040"},
    }


DIFFERENT = "GEOMETRY_MISMATCH: the snapshot and what is required of it differ in"


@pytest.mark.parametrize("field", ["kv_heads", "dtype", "cache_dtype", "layout", "weights"])
def test_a_cache_of_another_engine_is_refused_by_field(
    trio: Trio, others: dict[str, EngineProcess], store: Store, field: str
) -> None:
    prompts = random_prompts(41, [70])
    handles = trio.hand_over(prompts)
    texts = {
        "kv_heads": "offered=2, required=4",
        "dtype": "offered=float32, required=float16",
        "cache_dtype": "offered=float32, required=float8_e4m3",
        "layout": "offered=CPU_ATTN/vec, HND, halves, keys transposed, required=CPU_ATTN/vec16, HND",
    }
    text = texts.get(field, "offered=files ")
    refused(others[field], store.daemon, prompts, handles, f"{DIFFERENT} {field}")
    assert any(text in line for line in others[field].logged(f"field={field}"))
    with store.client() as client:  # it is still there, for an engine that it fits
        key = handles["s41n0"]["hurray"]["snapshots"][0]["key"]
        assert client.stat(key).info.annotations["kv_heads"] == "2"
    assert trio.decode.generate(loading(prompts, handles))["s41n0"]["finish"] == "length"


FINGERPRINT = {
    "kv_heads",
    "head_size",
    "layers",
    "dtype",
    "cache_dtype",
    "layout",
    "tp_rank",
    "tp_size",
    "model",
    "weights",
    "prompt",
}


def test_each_field_of_the_fingerprint_is_compared(trio: Trio, store: Store) -> None:
    """The same cache each time, and one field of what it says of itself another."""
    fields = dict(zip((f"s49n{number}" for number in range(len(FINGERPRINT))), sorted(FINGERPRINT), strict=True))
    prompts = random_prompts(49, [40] * len(fields))
    handles = trio.hand_over(prompts)
    with store.client() as client:
        for name, field in fields.items():
            kept = client.stat(handles[name]["hurray"]["snapshots"][0]["key"]).info
            assert set(kept.annotations) == FINGERPRINT
            replace_snapshot(client, handles[name], annotations={field: "other"})
    refused(trio.decode, store.daemon, prompts, handles, DIFFERENT)
    for name, field in fields.items():
        (line,) = trio.decode.logged(f"the cache of request {name}-")
        assert f"{DIFFERENT} {field}: " in line or f"{DIFFERENT} {field} " in line, line


def test_other_scales_of_an_fp8_cache_are_refused(others: dict[str, EngineProcess], store: Store) -> None:
    engine, prompts = others["cache_dtype"], random_prompts(50, [40])
    ask = [{"id": "s50n0", "prompt": prompts["s50n0"], "max_tokens": 1, "kv": {"do_remote_decode": True}}]
    handles = {"s50n0": engine.generate(ask)["s50n0"]["kv"]}
    with store.client() as client:
        replace_snapshot(client, handles["s50n0"], annotations={"v_scale.0": "0000003f" * 4})
    refused(engine, store.daemon, prompts, handles, f"{DIFFERENT} v_scale.0")


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(handle: dict[str, Any]) -> None:
        place = handle["hurray"]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


FORGED = {
    "a node that is not configured": (_set("node", value="elsewhere"), "field=node"),
    "an address for a node": (_set("node", value="127.0.0.1:7411"), "field=node"),
    "no node": (_set("node", value=None), "field=node"),
    "a key that nobody has": (_set("snapshots", 0, "key", value="vllm-0-tp0of1"), "KEY_NOT_FOUND"),
    "a key that is none": (_set("snapshots", 0, "key", value="\n"), "field=key"),
    "an earlier generation": (_set("snapshots", 0, "generation", value=1), "KEY_"),
    "a generation that is none": (_set("snapshots", 0, "generation", value=-1), "field=generation"),
    "two ranks": (_set("snapshots", value=[{"key": "a", "generation": 1}] * 2), "field=tp_size"),
    "no ranks": (_set("snapshots", value="x"), "field=snapshots"),
    "more tokens": (_set("tokens", value=71), "field=tokens"),
    "blocks of nothing": (_set("block_size", value=0), "field=block_size"),
    "a cache of other blocks": (_set("block_size", value=64), ""),
    "nothing": (lambda handle: handle.pop("hurray"), "field=hurray"),
}


@pytest.mark.parametrize("forgery", [name for name in FORGED if FORGED[name][1]])
def test_a_forged_handle_is_refused(trio: Trio, store: Store, forgery: str) -> None:
    prompts = random_prompts(42, [70])
    handles = deepcopy(trio.hand_over(prompts))
    change, text = FORGED[forgery]
    change(handles["s42n0"])
    refused(trio.decode, store.daemon, prompts, handles, text)


def test_a_handle_that_lies_about_blocks_brings_the_right_tokens(trio: Trio) -> None:
    prompts = random_prompts(43, [70])
    wanted = expected(trio.reference, prompts)
    handles = deepcopy(trio.hand_over(prompts))
    FORGED["a cache of other blocks"][0](handles["s43n0"])
    answers = trio.decode.generate(loading(prompts, handles))
    for name, tokens in wanted.items():
        assert answers[name]["tokens"] == tokens


def test_the_handle_of_another_prompt_is_refused(trio: Trio, store: Store) -> None:
    prompts, others = random_prompts(44, [70]), random_prompts(45, [70])
    handles = {"s44n0": trio.hand_over(others)["s45n0"]}
    refused(trio.decode, store.daemon, prompts, handles, "differ in prompt")


def test_no_address_out_of_a_request_is_dialled(trio: Trio, store: Store) -> None:
    prompts = random_prompts(46, [70])
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        host, port = server.getsockname()
        handles = deepcopy(trio.hand_over(prompts))
        handles["s46n0"]["hurray"] |= {"node": f"{host}:{port}", "address": f"{host}:{port}"}
        handles["s46n0"] |= {"remote_host": host, "remote_port": port}
        refused(trio.decode, store.daemon, prompts, handles, f"offered={host}:{port}")
        with pytest.raises(BlockingIOError):
            server.accept()


def test_an_expired_handle_is_refused(trio: Trio, store: Store) -> None:
    prompts = random_prompts(47, [70])
    handles = trio.hand_over(prompts)
    with store.client() as client:
        replace_snapshot(client, handles["s47n0"], lease_s=0.01)
        key = handles["s47n0"]["hurray"]["snapshots"][0]["key"]

        def is_gone() -> bool:
            try:
                client.stat(key)
            except ht.KeyExpired:
                return True
            return False

        eventually(is_gone, 20, "the end of the lease")
    refused(trio.decode, store.daemon, prompts, handles, "KEY_EXPIRED")


def test_the_snapshot_of_another_tenant_is_refused(trio: Trio, model: Path, folder: Path, tmp_path: Path) -> None:
    """Tenant b may take what tenant a puts under a/vllm/, and nothing else of a's."""
    grants = """
[[grants]]
tenant = "b"
prefix = "a/vllm/"
may = ["get", "delete"]
"""
    with identified_daemon(tmp_path, grants, node="store") as node:
        nodes = {"store": node.address}

        def tenant(name: str) -> dict[str, str]:
            files = node.tenant(name)
            paths = {
                f"HURRAY_TLS__{field.upper()}": str(getattr(files, field)) for field in ("certificate", "key", "ca")
            }
            return client_env("tls", **paths)

        own = connector("kv_producer", nodes, node="store", key_prefix="a/vllm/")
        private = connector("kv_producer", nodes, node="store")
        decode = connector("kv_consumer", nodes)
        with engines(
            folder,
            {},
            open=options(model, kv_transfer_config=own, env=tenant("a")),
            private=options(model, kv_transfer_config=private, env=tenant("a")),
            decode=options(model, kv_transfer_config=decode, env=tenant("b")),
        ) as started:
            up(started)
            prompts = random_prompts(48, [70])
            wanted = expected(trio.reference, prompts)
            ask = [{"id": "s48n0", "prompt": prompts["s48n0"], "max_tokens": 1, "kv": {"do_remote_decode": True}}]
            handles = {name: started[name].generate(ask)["s48n0"]["kv"] for name in ("open", "private")}
            assert handles["private"]["hurray"]["snapshots"][0]["key"].startswith("a/vllm-"), handles
            refused(started["decode"], node.daemon, prompts, {"s48n0": handles["private"]}, "PERMISSION_DENIED")
            answers = started["decode"].generate(loading(prompts, {"s48n0": handles["open"]}))
            assert {name: answers[name]["tokens"] for name in wanted} == wanted
