"""Runs the benchmark: starts the processes, runs every case once a round, and keeps what each came to.

Rounds are interleaved: each runs all cases, every other one in reverse, so that what drifts on the machine drifts for
all, and only ratios within a round are compared.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from hurray_client.bench.peers import PeerKind, peer_kinds
from hurray_client.bench.processes import BenchError, Usage, Worker, reset_peak, usage
from hurray_client.bench.workloads import (
    FULL,
    MIB,
    PLOT_PREFIX,
    SOURCE_COUNT,
    Scale,
    Workload,
    catalogue,
    plot_workloads,
)
from hurray_wire.errors import InvalidRequest

CHECKSUM: Final = "xxh3_64"
NO_CHECKSUM: Final = "none"

CALL_RATE: Final = 500.0
"""Calls a second beside `stat_load` and `echo_load`."""

HELD_KEY: Final = "bench/held"
STAT_KEY: Final = "bench/stat"

_TIMED: Final = {"paged": "from_paged", "sequences_100k": "index"}
"""What an engine times of a workload beside transfers."""

_UNCHECKED_ALWAYS: Final = ("paged", "adjacent")
_START_TOGETHER_S: Final = 0.05
_LOAD_S: Final = 0.1
_EXTRA_BYTES: Final = 64 * MIB
"""Arena beyond what snapshots need: index buffers, gaps, fragments."""


@dataclass(frozen=True, slots=True)
class CaseKey:
    """What was run: a workload over a transport of ours, or by a baseline."""

    workload: str
    subject: str
    """A transport, or a baseline."""
    checksum: str | None
    """None: not ours to choose."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a case. CPU and memory of source and target; None where they were not measured."""

    seconds: float
    nbytes: int
    """Bytes of distinct pages that were moved."""
    values: Mapping[str, float] = field(default_factory=dict)
    """More that the case has to say."""
    source: Cost | None = None
    target: Cost | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """What one side used. `beyond_bytes`: peak memory beyond what it had before, and beyond the snapshot it took."""

    cpu_s: float
    peak_bytes: int
    beyond_bytes: int


@dataclass(frozen=True, slots=True)
class Case:
    """Something to run once a round. `run` returns a Sample, or raises BenchError."""

    key: CaseKey
    run: Callable[[], Sample]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `workloads`, `transports`: those only; empty: all. `peers`: other engines, too, where installed."""

    scale: Scale = FULL
    workloads: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    plot: bool = False
    peers: bool = True

    def chosen(self) -> dict[str, Workload]:
        """The workloads, by name. Raises InvalidRequest for a name that is none."""
        known = catalogue(self.scale)
        for name in self.workloads:
            if name not in known:
                raise InvalidRequest("no such workload", field="workload", offered=name, required=", ".join(known))
        chosen = {name: item for name, item in known.items() if not self.workloads or name in self.workloads}
        return chosen | plot_workloads() if self.plot else chosen


@dataclass(slots=True)
class Outcome:
    """All samples, by case; one entry a round, None where the round did not come to it."""

    plan: Plan
    transports: tuple[str, ...] = ()
    ucx: str = ""
    version: str = ""
    rounds: int = 0
    seconds: float = 0.0
    samples: dict[CaseKey, list[Sample | None]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Baselines and transports that were not run, and why."""
    failed: dict[str, str] = field(default_factory=dict)
    """Cases that raised, and what. They are not run again."""
    facts: dict[str, float] = field(default_factory=dict)
    """Figures that are not a transfer's."""


class Progress(Protocol):
    """Who is told how far the run is."""

    def step(self, text: str, rounds: float = 0.0) -> None:
        """Something begins, after so many rounds."""

    def rounds(self, done: int, total: int) -> None:
        """So many rounds are over."""


def run(plan: Plan, progress: Progress) -> Outcome:
    """Run the benchmark. Raises InvalidRequest for a plan that cannot be, BenchError where nothing can be run."""
    began = time.monotonic()
    outcome = Outcome(plan)
    with tempfile.TemporaryDirectory(prefix="hurray-bench-") as folder, ExitStack() as stack:
        stage = _Stage(plan, outcome, stack, Path(folder), progress)
        cases = [*stage.baselines(), *stage.ours()]
        cases.sort(key=lambda case: _place(case.key, plan))
        _run_rounds(cases, outcome, progress, began)
    outcome.seconds = time.monotonic() - began
    return outcome


def _place(key: CaseKey, plan: Plan) -> tuple[int, int]:
    """Workload by workload; what it is compared with most before it, the rest after it: as near in time as may be."""
    first = key.subject in ("memcpy", "gather", "socket", "echo")
    return list(plan.chosen()).index(key.workload), 0 if first else 1 if key.checksum is not None else 2


def _run_rounds(cases: Sequence[Case], outcome: Outcome, progress: Progress, began: float) -> None:
    scale = outcome.plan.scale
    live = list(cases)

    def late() -> bool:
        return scale.budget_s is not None and time.monotonic() - began > scale.budget_s

    for case in cases:
        outcome.samples[case.key] = []
    warmed = set()
    for case in cases:
        if case.key.subject not in warmed:  # whose first run connects, and takes its memory
            warmed.add(case.key.subject)
            progress.step(f"warming up: {_name(case.key)}")
            _try(case, live, outcome)
    for number in range(scale.rounds):
        # The first round is run whatever it takes: without it there is nothing to say.
        if number and late():
            break
        progress.rounds(number, scale.rounds)
        turn = list(live) if number % 2 == 0 else list(reversed(live))
        for place, case in enumerate(turn):
            if number and late():
                break
            progress.step(_name(case.key), number + place / len(turn))
            sample = _try(case, live, outcome)
            if sample is not None:
                row = outcome.samples[case.key]
                row += [None] * (number - len(row))
                row.append(sample)
        outcome.rounds = number + 1
    progress.rounds(outcome.rounds, outcome.rounds)


def _try(case: Case, live: list[Case], outcome: Outcome) -> Sample | None:
    try:
        return case.run()
    except BenchError as error:
        outcome.failed[_name(case.key)] = str(error)
        live.remove(case)
        return None


def _name(key: CaseKey) -> str:
    return " ".join(filter(None, (key.workload, key.subject, key.checksum)))


@contextmanager
def _metered(pids: Sequence[int], taken_bytes: int = 0) -> Iterator[Callable[[], Cost]]:
    """What the processes use in the block; asked after it. `taken_bytes`: what they must take for the snapshot."""
    reset_peak(pids)
    before = usage(pids)
    after: list[Usage] = []
    yield lambda: Cost(
        after[0].cpu_s - before.cpu_s,
        after[0].peak_bytes,
        max(0, after[0].peak_bytes - before.rss_bytes - taken_bytes),
    )
    after.append(usage(pids))


def _together(costs: Sequence[Cost]) -> Cost:
    """Of several that do the same, each with a snapshot of its own: in sum, but for what one needs beside that."""
    return Cost(
        sum(cost.cpu_s for cost in costs),
        sum(cost.peak_bytes for cost in costs),
        max(cost.beyond_bytes for cost in costs),
    )


class _Stage:
    """The processes of one run, and the cases that they can run."""

    def __init__(self, plan: Plan, outcome: Outcome, stack: ExitStack, folder: Path, progress: Progress) -> None:
        self._plan = plan
        self._outcome = outcome
        self._stack = stack
        self._progress = progress
        self._folder = str(folder)
        self._chosen = plan.chosen()
        self._paged = catalogue(plan.scale)["paged"]
        progress.step("starting hurrayd")
        node = stack.enter_context(Worker("node")).ask("start", folder=self._folder, arena_bytes=self._arena_bytes())
        self._address: str = node["address"]
        self._node_pids: list[int] = node["pids"]
        progress.step("starting the engine")
        self._engine = stack.enter_context(Worker("engine"))
        found = self._engine.ask(
            "open",
            address=self._address,
            folder=self._folder,
            memory_bytes=max(item.nbytes for item in self._chosen.values()),
            scratch_bytes=self._chosen["get_into"].nbytes if "get_into" in self._chosen else 0,
            seed=0,
        )
        outcome.ucx, outcome.version = found["ucx"], found["version"]
        outcome.transports = tuple(
            kind for kind in found["transports"] if not plan.transports or kind in plan.transports
        )
        for kind in plan.transports:
            if kind not in found["transports"]:
                outcome.skipped[kind] = "the node does not offer this transport"
        self._others: list[Worker] = []

    def _arena_bytes(self) -> int:
        """What the largest step needs, beside the snapshot that is held for gets."""
        most = max(item.nbytes * (SOURCE_COUNT if item.action == "concurrent" else 1) for item in self._chosen.values())
        held = self._paged.nbytes if any(item.action in ("get", "get_into") for item in self._chosen.values()) else 0
        return most + most // 8 + held + _EXTRA_BYTES

    # --- ours -------------------------------------------------------------------------------------------------------

    def ours(self) -> Iterator[Case]:
        """Every workload over every transport that the node offers."""
        if any(item.action in ("get", "get_into") for item in self._chosen.values()) and self._outcome.transports:
            kind = self._outcome.transports[0]
            self._put(self._paged, kind, CHECKSUM, HELD_KEY, lease_s=3600.0)
        for item in self._chosen.values():
            if item.name in _TIMED:
                times = self._engine.ask(_TIMED[item.name], workload=item.to_dict())
                self._outcome.facts |= {name.removesuffix("_s") + "_ms": 1e3 * value for name, value in times.items()}
            for kind in self._outcome.transports:
                yield from self._cases(item, kind)

    def _cases(self, item: Workload, kind: str) -> Iterator[Case]:
        checked = CaseKey(item.name, kind, CHECKSUM)
        match item.action:
            case "put":
                yield Case(checked, lambda: self._run_put(item, kind, CHECKSUM))
                if item.name in _UNCHECKED_ALWAYS or (
                    self._plan.scale.every_checksum and not item.name.startswith(PLOT_PREFIX)
                ):
                    key = CaseKey(item.name, kind, NO_CHECKSUM)
                    yield Case(key, lambda: self._run_put(item, kind, NO_CHECKSUM))
            case "tiny":
                yield Case(checked, lambda: self._run_tiny(item, kind, CHECKSUM))
                yield Case(CaseKey(item.name, kind, NO_CHECKSUM), lambda: self._run_tiny(item, kind, NO_CHECKSUM))
            case "concurrent":
                self._need_others(item)
                yield Case(checked, lambda: self._run_concurrent(item, kind))
            case "stats_beside" if kind == self._outcome.transports[0]:
                self._need_others(None)
                yield Case(checked, lambda: self._run_beside(item, kind, "begin_stats", key=STAT_KEY))
            case "echoes_beside" if kind == self._outcome.transports[0]:
                self._need_others(None)
                port = self._stack.enter_context(Worker("baseline")).ask("echo_serve")["port"]
                yield Case(checked, lambda: self._run_beside(item, kind, "begin_echoes", port=port))
            case "get":
                yield Case(checked, lambda: self._run_get(item, kind))
            case "get_into":
                yield Case(checked, lambda: self._run_get_into(item, kind))
            case "get_held" if kind == "shm":  # elsewhere it is the same copy at another size
                yield Case(checked, lambda: self._run_get_held(item, kind))

    def _need_others(self, item: Workload | None) -> None:
        """Engines beside the first: sources of their own, or only callers."""
        count = SOURCE_COUNT - len(self._others) if item is not None else 1 - len(self._others)
        self._progress.step("starting more engines")
        added = [self._stack.enter_context(Worker("engine")) for _ in range(count)]
        size = catalogue(self._plan.scale)["concurrent"].nbytes if "concurrent" in self._chosen else 0
        for seed, worker in enumerate(added, 1):
            worker.tell(
                "open", address=self._address, folder=self._folder, memory_bytes=size, scratch_bytes=0, seed=seed
            )
        for worker in added:
            worker.answer()
        self._others += added

    def _put(self, item: Workload, kind: str, checksum: str, key: str, **more: Any) -> dict[str, Any]:
        return self._engine.ask("put", workload=item.to_dict(), transport=kind, checksum=checksum, key=key, **more)

    def _run_put(self, item: Workload, kind: str, checksum: str) -> Sample:
        key = f"bench/{item.name}"
        with _metered(self._engine.pids) as source, _metered(self._node_pids) as target:
            done = self._put(item, kind, checksum, key)
        self._engine.ask("delete", key=key)
        values = {"wire_bytes": done["wire_bytes"]}
        return Sample(done["seconds"], item.nbytes, values, source(), target())

    def _run_tiny(self, item: Workload, kind: str, checksum: str) -> Sample:
        count = self._plan.scale.tiny_count
        with _metered(self._engine.pids) as source, _metered(self._node_pids) as target:
            done = self._engine.ask("put_many", workload=item.to_dict(), transport=kind, checksum=checksum, count=count)
        return Sample(done["seconds"], item.nbytes, {"count": count}, source(), target())

    def _run_concurrent(self, item: Workload, kind: str) -> Sample:
        sources = self._others[:SOURCE_COUNT]
        at = time.monotonic() + _START_TOGETHER_S
        keys = [f"bench/concurrent/{number}" for number in range(len(sources))]
        with ExitStack() as stack, _metered(self._node_pids) as target:
            costs = [stack.enter_context(_metered(worker.pids)) for worker in sources]
            for worker, key in zip(sources, keys, strict=True):
                worker.tell("put", workload=item.to_dict(), transport=kind, checksum=CHECKSUM, key=key, at=at)
            done, errors = [], []
            for worker in sources:
                try:
                    done.append(worker.answer())
                except BenchError as error:
                    errors.append(error)
        for worker, key in zip(sources, keys, strict=True):
            with suppress(BenchError):
                worker.ask("delete", key=key)
        if errors:
            raise errors[0]
        began = min(item["began"] for item in done)
        finished = [item["ended"] - began for item in done]
        return Sample(
            max(finished),
            item.nbytes * len(sources),
            {"spread": max(finished) / min(finished)},
            _together([cost() for cost in costs]),
            target(),
        )

    def _run_beside(self, item: Workload, kind: str, begin: str, **what: Any) -> Sample:
        caller, small = self._others[0], catalogue(self._plan.scale)["tiny"]
        self._put(small, kind, CHECKSUM, STAT_KEY)
        caller.ask(begin, rate=CALL_RATE, **what)
        try:
            time.sleep(_LOAD_S)
            sample = self._run_put(item, kind, CHECKSUM)
        finally:
            rate = caller.ask("end_calls")["rate"]
            self._engine.ask("delete", key=STAT_KEY)
        return Sample(sample.seconds, sample.nbytes, {"call_rate": rate}, sample.source, sample.target)

    def _run_get(self, item: Workload, kind: str, key: str = HELD_KEY) -> Sample:
        with _metered(self._node_pids) as source, _metered(self._engine.pids, item.nbytes) as target:
            done = self._engine.ask("get", key=key, transport=kind)
        values = {name: done[name] for name in ("read_seconds", "wire_bytes", "mapped_bytes")}
        return Sample(done["seconds"], item.nbytes, values, source(), target())

    def _run_get_into(self, item: Workload, kind: str) -> Sample:
        with _metered(self._node_pids) as source, _metered(self._engine.pids) as target:
            done = self._engine.ask("get_into", workload=item.to_dict(), key=HELD_KEY, transport=kind)
        return Sample(done["seconds"], item.nbytes, {"wire_bytes": done["wire_bytes"]}, source(), target())

    def _run_get_held(self, item: Workload, kind: str) -> Sample:
        key = f"bench/{item.name}"
        self._put(item, kind, NO_CHECKSUM, key)
        try:
            return self._run_get(item, kind, key)
        finally:
            self._engine.ask("delete", key=key)

    # --- others -----------------------------------------------------------------------------------------------------

    def baselines(self) -> Iterator[Case]:
        """What the machine and others can do with the pages of `paged`, and an echo beside `tiny`."""
        moving = [item for item in self._chosen.values() if item.action != "tiny"]
        if not moving and "tiny" not in self._chosen:
            return
        self._progress.step("starting the baselines")
        source, target = (self._stack.enter_context(Worker("baseline")) for _ in range(2))
        source.tell("open", workload=self._paged.to_dict(), role="source")
        target.tell("open", workload=self._paged.to_dict(), role="target")
        for worker in (source, target):
            worker.answer()
        if "tiny" in self._chosen:
            source.ask("echo_connect", **target.ask("echo_serve"))
            count = self._plan.scale.tiny_count
            yield self._pair_case("tiny", "echo", source, target, "echo_many", count=count)
        if not moving:
            return
        # Beside the workload they are compared with most, so that they are run next to it.
        beside = "paged" if "paged" in self._chosen else moving[0].name
        for name in ("memcpy", "gather"):
            yield self._pair_case(beside, name, source, None, name)
        source.ask("socket_connect", **target.ask("socket_serve"))
        yield self._pair_case(beside, "socket", source, target, "socket_send")
        if "paged" in self._chosen:
            yield from self._stream(source, target)
            yield from self._perftest(source)
            for peer in peer_kinds():
                yield from self._peer(peer)

    def _stream(self, source: Worker, target: Worker) -> Iterator[Case]:
        try:
            source.ask("stream_connect", **target.ask("stream_serve"))
        except BenchError as error:
            self._outcome.skipped["stream_writer"] = str(error)
        else:
            yield self._pair_case("paged", "stream_writer", source, target, "stream_send")

    def _perftest(self, source: Worker) -> Iterator[Case]:
        nbytes = self._paged.nbytes
        try:
            source.ask("perftest", nbytes=MIB)
        except BenchError as error:
            self._outcome.skipped["ucx_perftest"] = str(error)
        else:
            key = CaseKey("paged", "ucx_perftest", None)
            yield Case(key, lambda: Sample(source.ask("perftest", nbytes=nbytes)["seconds"], nbytes))

    def _peer(self, peer: PeerKind) -> Iterator[Case]:
        if not (self._plan.peers and peer.installed):
            why = f"{peer.module} is not installed (extra bench-peers)" if self._plan.peers else "peers were left out"
            self._outcome.skipped[peer.name] = why
            return
        self._progress.step(f"starting {peer.name}")
        source, target = (self._stack.enter_context(Worker(peer.kind, peer.env)) for _ in range(2))
        try:
            source.tell("open", workload=self._paged.to_dict(), role="source")
            there = target.ask("open", workload=self._paged.to_dict(), role="target")
            source.answer()
            source.ask("connect", other=there)
            _send_to(source, target)
            if source.ask("digest") != target.ask("digest"):
                raise BenchError("what arrived is not what was sent")
        except BenchError as error:
            self._outcome.skipped[peer.name] = str(error)
            return
        finally:
            source.pause()
            target.pause()

        def move() -> Sample:
            target.resume()
            source.resume()
            try:
                with _metered(source.pids) as source_cost, _metered(target.pids) as target_cost:
                    seconds = _send_to(source, target)
            finally:
                source.pause()
                target.pause()
            return Sample(seconds, self._paged.nbytes, {}, source_cost(), target_cost())

        yield Case(CaseKey("paged", peer.name, None), move)

    def _pair_case(
        self, workload: str, name: str, source: Worker, target: Worker | None, method: str, **arguments: Any
    ) -> Case:
        """A baseline of which one call at the source is all there is to do. Its first run is checked, not counted."""
        checked = method == "socket_send"
        nbytes = 0 if name == "echo" else self._paged.nbytes

        def move() -> Sample:
            nonlocal checked
            with _metered(source.pids) as source_cost, _metered(target.pids if target else ()) as target_cost:
                done = source.ask(method, **arguments)
            if checked and target is not None:
                checked = False
                if source.ask("digest") != target.ask("digest"):
                    raise BenchError("what arrived is not what was sent")
            return Sample(done["seconds"], nbytes, {}, source_cost(), target_cost() if target else None)

        return Case(CaseKey(workload, name, None), move)


def _send_to(source: Worker, target: Worker) -> float:
    """Seconds from the beginning at the source to the end at the target, or at the source if that is later."""
    target.tell("await_end")
    try:
        sent = source.ask("send")
    finally:
        ended = target.answer()["ended"]
    return float(max(sent["ended"], ended) - sent["began"])
