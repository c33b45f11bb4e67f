"""Engine processes: started, asked, and ended with all that they have; and prompts for them."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

import hurray_client as ht
from support.daemon import UCX_PORTS, RunningDaemon, eventually, running_daemon
from support.scrape import scrape, series

START_S = 240.0
ANSWER_S = 180.0
BLOCK_SIZE = 32
BLOCKS = 600


class EngineProcess:
    """One engine. `tell` and `hear` are the two halves of `ask`, for engines that shall work at the same time."""

    def __init__(self, options: dict[str, Any], log: Path, env: dict[str, str]) -> None:
        self.log = log
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HURRAY_")}
        environment |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            **env,
        }
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("vllm_engine.py")), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=environment,
                text=True,
                process_group=0,
            )

    def wait_ready(self) -> dict[str, Any]:
        """Until it is up, or says why it does not start."""
        return self.hear(START_S, may_fail=True)

    def tell(self, operation: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": operation, **arguments}) + "\n")
        self.process.stdin.flush()

    def hear(self, timeout_s: float = ANSWER_S, *, may_fail: bool = False) -> dict[str, Any]:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if readable else ""
        assert line, f"the engine does not answer:\n{self.tail()}"
        answer: dict[str, Any] = json.loads(line)
        assert may_fail or "error" not in answer, f"{answer['error']}\n{self.tail()}"
        return answer

    def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        self.tell(operation, **arguments)
        return self.hear()

    def generate(self, requests: Sequence[dict[str, Any]], aborts: dict[str, int] | None = None) -> dict[str, Any]:
        """Answers by id."""
        answers: dict[str, Any] = self.ask("generate", requests=list(requests), aborts=aborts or {})["answers"]
        return answers

    def state(self) -> dict[str, Any]:
        return self.ask("state")

    def logged(self, text: str) -> list[str]:
        """Lines of its log with this text."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if text in line]

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def end(self) -> None:
        if self.process.poll() is None:
            with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                self.tell("stop")
                self.process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


@contextmanager
def engines(folder: Path, env: dict[str, str], **options: dict[str, Any]) -> Iterator[dict[str, EngineProcess]]:
    """Engines by name, started at the same time."""
    started: dict[str, EngineProcess] = {}
    try:
        for name, wanted in options.items():
            own = dict(wanted)
            log = folder / f"{name}-{time.monotonic_ns()}.log"
            started[name] = EngineProcess(own, log, env | own.pop("env", {}))
        yield started
    finally:
        for engine in started.values():
            engine.end()


def up(started: dict[str, EngineProcess]) -> dict[str, EngineProcess]:
    """Once all of them are."""
    for name, engine in started.items():
        assert engine.wait_ready() == {"ready": True}, f"{name}:\n{engine.tail()}"
    return started


def options(model: Path, **changes: Any) -> dict[str, Any]:
    """Of an engine that runs this model."""
    return {
        "model": str(model),
        "served_model_name": "tiny",
        "dtype": "float32",
        "max_model_len": 512,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": BLOCKS,
        "max_num_seqs": 64,
        "seed": 1,
        **changes,
    }


def connector(role: str, nodes: dict[str, str], *, policy: str = "fail", **extra: Any) -> dict[str, Any]:
    """The kv_transfer_config of an engine."""
    return {
        "kv_connector": "HurrayConnector",
        "kv_connector_module_path": "hurray_client.connectors.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"nodes": nodes, **extra},
    }


MIN_MARGIN = 1e-3
"""Between the first and the second choice, in the reference: kernels that add in another order differ by 1e-5."""


def client_env(transport: str = "ucx", **more: str) -> dict[str, str]:
    """What engines find in their environment."""
    ports = {"HURRAY_UCX__FIRST_PORT": str(UCX_PORTS[0]), "HURRAY_UCX__LAST_PORT": str(UCX_PORTS[1])}
    return {"HURRAY_TRANSPORTS": transport, "HURRAY_RETRY_S": "2", **ports, **more}


class Store:
    """A daemon that can be killed, paused, and started again at its address. A context manager."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._listen = "127.0.0.1:0"
        self.daemon = self._start()

    def _start(self) -> RunningDaemon:
        config = f'listen = "{self._listen}"'
        daemon = self._running.enter_context(running_daemon(config, arena_bytes=256 << 20, node="store"))
        self._listen = daemon.address
        return daemon

    def kill(self) -> None:
        """kill -9; what it held is lost."""
        self.daemon.kill()
        self._running.close()

    def start(self) -> None:
        """Again, empty."""
        self.daemon = self._start()

    def pause(self) -> None:
        """Its processes do nothing, and their sockets stay."""
        for pid in (self.daemon.pid, self.daemon.mover_pid):
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Go on."""
        for pid in (self.daemon.pid, self.daemon.mover_pid):
            assert pid is not None
            os.kill(pid, signal.SIGCONT)

    def client(self) -> ht.Client:
        """Of this process."""
        return ht.connect(self.daemon.address, transports=["tcp"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.daemon.process.poll() is None:
            self.resume()
        self._running.close()


@dataclass(frozen=True)
class Trio:
    """The engine without connector, the one that fills caches, the one that is handed them."""

    reference: EngineProcess
    prefill: EngineProcess
    decode: EngineProcess

    def hand_over(self, prompts: dict[str, list[int]], **more: Any) -> dict[str, Any]:
        """Have the prompts computed; what came back as kv_transfer_params."""
        wanted = [
            {"id": name, "prompt": prompt, "max_tokens": 1, "kv": {"do_remote_decode": True}, **more}
            for name, prompt in prompts.items()
        ]
        return {name: answer["kv"] for name, answer in self.prefill.generate(wanted).items()}


def loading(prompts: dict[str, list[int]], handles: dict[str, Any], max_tokens: int = 8) -> list[dict[str, Any]]:
    """Requests that bring handles."""
    return [
        {"id": name, "prompt": prompt, "kv": handles[name], "max_tokens": max_tokens}
        for name, prompt in prompts.items()
    ]


Tokens = dict[tuple[int | None, str], npt.NDArray[np.generic]]
"""A prompt's cache by (layer, role): [tokens, num_heads, head_dim]."""


def replace_snapshot(
    client: ht.Client,
    handle: dict[str, Any],
    *,
    contents: Callable[[Tokens], Tokens] = lambda kept: kept,
    annotations: dict[str, str] | None = None,
    lease_s: float = 60.0,
) -> None:
    """Put something else in the place of what a handle names, and make it name that."""
    snapshot = handle["hurray"]["snapshots"][0]
    with client.get(snapshot["key"], generation=snapshot["generation"]) as got:
        kept = {
            (tensor.layer_index, tensor.role): got.tokens(tensor.layer_index, tensor.role, 0) for tensor in got.tensors
        }
    kept_annotations = client.stat(snapshot["key"]).info.annotations
    page_size, count = handle["hurray"]["block_size"], handle["hurray"]["tokens"]
    pages = -(-count // page_size)
    pools = {}
    for key, rows in contents(kept).items():
        pool = np.zeros((pages * page_size, *rows.shape[1:]), rows.dtype)
        pool[:count] = rows
        pools[key] = pool.reshape(pages, page_size, *rows.shape[1:])
    other = ht.KVSnapshot.from_paged(pools, block_tables=[list(range(pages))], token_counts=[count])
    receipt = client.put(
        snapshot["key"] + "-other", other, lease_s=lease_s, annotations={**kept_annotations, **(annotations or {})}
    )
    snapshot |= {"key": receipt.key, "generation": receipt.generation}


def random_prompts(seed: int, lengths: list[int], *, shared: int = 0) -> dict[str, list[int]]:
    """Prompts of these lengths; the first `shared` tokens are the same in all that are long enough."""
    source = random.Random(seed)
    prefix = [source.randrange(3, 512) for _ in range(shared)]
    prompts = {}
    for number, length in enumerate(lengths):
        tail = [source.randrange(3, 512) for _ in range(length)]
        prompts[f"s{seed}n{number}"] = [*prefix, *tail[len(prefix) :]] if length > shared else tail
    return prompts


def expected(engine: EngineProcess, prompts: dict[str, list[int]], max_tokens: int = 8) -> dict[str, list[int]]:
    """What a single engine answers, by name: but for prompts where it nearly answered something else, which are left
    out. That depends on the reference alone; of all others every token must be equal."""
    answers = engine.generate(
        [{"id": name, "prompt": prompt, "logprobs": 2, "max_tokens": max_tokens} for name, prompt in prompts.items()]
    )
    return {name: answer["tokens"] for name, answer in answers.items() if answer["margin"] > MIN_MARGIN}


def refused(
    engine: EngineProcess, daemon: RunningDaemon, prompts: dict[str, list[int]], handles: dict[str, Any], text: str
) -> None:
    """Each request ends as an error, for this reason; nothing was read of the node, and the engine's cache and its
    blocks are as before."""
    before, seen, read = engine.state(), set(engine.logged(text)), gets(daemon)
    answers = engine.generate(loading(prompts, handles))
    assert [(answer["finish"], answer["tokens"]) for answer in answers.values()] == [("error", [])] * len(prompts)
    assert len(set(engine.logged(text)) - seen) == len(prompts), engine.tail()  # ranks say the same
    assert engine.state() == before
    assert gets(daemon) == read


def gets(daemon: RunningDaemon) -> float:
    """How many gets the node has served: those that came to an Accept, however they ended."""
    running = series("hurray_transfers_running", direction="out")
    eventually(lambda: scrape(daemon.watched, "gauge")[running] == 0, 20, "the end of all gets")
    return sum(
        value
        for (name, labels), value in scrape(daemon.watched, "counter").items()
        if name == "hurray_transfers_total" and ("direction", "out") in labels
    )
