"""Real engines, started once for all tests, beside a real daemon over real UCX."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.examples.vllm.model import write_model
from support.daemon import RunningDaemon, running_daemon
from support.vllm_engines import Trio, client_env, connector, engines, options


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    return write_model(folder / "tiny", seed=1)


@pytest.fixture(scope="session")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(arena_bytes=256 << 20, node="store") as running:
        yield running


@pytest.fixture(scope="session")
def trio(folder: Path, model: Path, daemon: RunningDaemon) -> Iterator[Trio]:
    nodes = {"store": daemon.address}
    prefill = connector("kv_producer", nodes, node="store", put_timeout_s=5)
    decode = connector("kv_consumer", nodes, load_timeout_s=5)
    with engines(
        folder,
        client_env(),
        reference=options(model),
        prefill=options(model, kv_transfer_config=prefill),
        decode=options(model, kv_transfer_config=decode),
    ) as started:
        for engine in started.values():
            answer = engine.wait_ready()
            assert answer == {"ready": True}, engine.tail()
        yield Trio(**started, nodes=nodes)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(int(os.environ.get("VLLM_TEST_TIMEOUT", "420"))))
