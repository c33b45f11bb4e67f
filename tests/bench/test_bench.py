"""The benchmark, once and small, so that it cannot rot; and what it makes of samples. No time is asserted."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from hurray_client.bench import plot, report, shown
from hurray_client.bench.processes import BenchError, Worker, usage
from hurray_client.bench.runner import CHECKSUM, NO_CHECKSUM, CaseKey, Cost, Outcome, Plan, Sample, run
from hurray_client.bench.workloads import FULL, MIB, QUICK, Scale, caches, catalogue, page_order, plot_workloads, tables
from hurray_client.cli.main import app
from hurray_wire.errors import InvalidRequest, Unsupported
from hurray_wire.memory import aligned_empty
from hurray_wire.snapshot import KVSnapshot
from hurray_wire.validate import pages_needed

TINY = Scale(
    paged_bytes=4 * MIB, large_bytes=8 * MIB, source_bytes=2 * MIB, num_seqs=64, tiny_count=2, rounds=2, budget_s=None
)

NAMES = [
    *("paged", "adjacent", "small_tensors", "tiny", "large", "sequences_100k", "concurrent", "get", "get_into"),
    "shared_prefix",
]
NAMES_OF_LOWER = ["concurrent_spread", "tiny_put_vs_echo", "per_tensor_us", "shm_get_ms", "index_validation_ms"]
RATIOS = [
    *("tcp_put_vs_socket", "tcp_put_vs_nixl_tcp", "tcp_put_vs_mooncake", "socket_put_vs_socket", "shm_put_vs_memcpy"),
    *("shm_put_vs_nixl", "large_vs_small", "concurrent_vs_single", "concurrent_spread", "tiny_put_vs_echo"),
    *("per_tensor_us", "shm_get_ms"),
]


class Steps:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []

    def step(self, text: str, rounds: float = 0.0) -> None:
        assert text
        assert rounds < 2

    def rounds(self, done: int, total: int) -> None:
        self.done.append((done, total))


@pytest.fixture(scope="module")
def ran() -> tuple[Outcome, Steps]:
    steps = Steps()
    return run(Plan(TINY, peers=False), steps), steps


def test_every_workload_is_run_over_every_transport(ran: tuple[Outcome, Steps]) -> None:
    outcome, steps = ran
    assert not outcome.failed
    assert outcome.transports == ("shm", "tcp", "ucx")
    assert steps.done == [(0, 2), (1, 2), (2, 2)]
    for transport in outcome.transports:
        for name in NAMES:
            assert len(outcome.samples[CaseKey(name, transport, CHECKSUM)]) == 2, (name, transport)
        for name in ("paged", "adjacent", "small_tensors", "tiny", "large", "sequences_100k", "shared_prefix"):
            assert CaseKey(name, transport, NO_CHECKSUM) in outcome.samples
    for name in ("memcpy", "gather", "socket", "stream_writer"):
        assert len(outcome.samples[CaseKey("paged", name, None)]) == 2
    assert len(outcome.samples[CaseKey("tiny", "echo", None)]) == 2
    for peer in ("nixl", "nixl_polled", "nixl_tcp", "nixl_tcp_polled", "nixl_tcp_segments", "mooncake"):
        assert outcome.skipped[peer] == "peers were left out"


def test_json_has_all_that_is_promised(ran: tuple[Outcome, Steps]) -> None:
    outcome, _ = ran
    found: dict[str, Any] = json.loads(json.dumps(report.to_json(outcome)))
    assert set(RATIOS) <= set(found["ratios"])
    for name, value in found["ratios"].items():
        assert (value is None) == bool(found["ratio_details"][name]["reason"]), name
        assert value is None or np.isfinite(value)
    measured = ["tcp_put_vs_socket", "large_vs_small", "concurrent_vs_single", "concurrent_spread", "tiny_put_vs_echo"]
    assert all(
        found["ratios"][name] is not None
        for name in [*measured, "per_tensor_us", "stat_load_vs_quiet", "echo_load_vs_quiet"]
    )
    assert found["ratios"]["concurrent_spread"] >= 1
    assert found["rounds"] == found["ratio_details"]["tcp_put_vs_socket"]["rounds"] == 2
    assert found["machine"]["cores"] >= 1
    rows = {
        (row["workload"], row.get("transport") or row["baseline"], row["checksum"]): row for row in found["results"]
    }
    paged = rows["paged", "ucx", CHECKSUM]
    assert paged["bytes"] == 4 * MIB
    assert paged["rounds"] == 2
    assert 0 < paged["seconds"]["min"] <= paged["seconds"]["median"] <= paged["seconds"]["max"]
    assert paged["gigabytes_per_second"]["median"] > 0
    for side in ("source", "target"):
        assert paged["cpu_s_per_gb"][side] > 0
        assert paged["peak_rss_bytes"][side] > 4 * MIB
        assert paged["beyond_snapshot_bytes"][side] >= 0
        assert found["most_beyond_snapshot"][side]["bytes"] >= paged["beyond_snapshot_bytes"][side]
    assert rows["tiny", "echo", None]["gigabytes_per_second"] is None


def test_shared_pages_cross_once(ran: tuple[Outcome, Steps]) -> None:
    outcome, _ = ran
    shared = catalogue(TINY)["shared_prefix"]
    (first, _) = outcome.samples[CaseKey("shared_prefix", "ucx", CHECKSUM)]
    assert first is not None
    index_bytes = first.values["wire_bytes"] - shared.nbytes
    assert 0 < index_bytes < 0.01 * shared.nbytes


def test_table_for_people(ran: tuple[Outcome, Steps]) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(shown.tables(report.to_json(ran[0])))
    text = console.export_text()
    for word in ("shared_prefix", "ucx unchecked", "GB/s", "tcp_put_vs_socket", "2 rounds", "most memory beyond"):
        assert word in text
    assert "FAILED" not in text
    marked = [line for line in text.splitlines() if line.rstrip().endswith("lower")]
    assert [name for name in NAMES_OF_LOWER if not any(line.split()[0] == name for line in marked)] == []
    assert not any("_vs_socket" in line for line in marked)


def test_pages_get_the_figures_where_they_mark_it(ran: tuple[Outcome, Steps], tmp_path: Path) -> None:
    kept, page = tmp_path / "run.json", tmp_path / "page.md"
    found = report.to_json(ran[0], "hurrayctl bench --json") | {"settings": {"HURRAY_CPUS": "0-1"}}
    kept.write_text(json.dumps(found))
    marked = "".join(f"{name}:\n\n<!-- bench {name} -->\nold\n<!-- /bench -->\n\n" for name in shown.BLOCKS)
    page.write_text(f"# Figures\n\n{marked}the end\n")
    for _ in range(2):  # it is there to be done again
        assert CliRunner().invoke(app, ["bench", "--from", str(kept), "--page", str(page)]).exit_code == 0
    text = page.read_text()
    assert text.startswith("# Figures\n\n")
    assert text.endswith("<!-- /bench -->\n\nthe end\n")
    assert "old" not in text
    assert "\n- `HURRAY_CPUS=0-1 hurrayctl bench --json`: 2 rounds" in text
    assert "libucp" not in text
    assert "| `tcp_put_vs_socket` | " in text
    assert "| shared_prefix | shm unchecked | " in text
    (row,) = [line for line in text.splitlines() if line.startswith("| shm | ")]
    assert all(re.fullmatch(r"[\d.]+|[\d.]+\+[\d.]+", cell) for cell in row.strip("| ").split(" | ")[1:])

    shown_again = CliRunner().invoke(app, ["bench", "--from", str(kept), "--json"])
    assert json.loads(shown_again.stdout)["ratios"] == report.to_json(ran[0])["ratios"]
    for text, field in (("nothing marked", "page"), ("<!-- bench pie -->\n<!-- /bench -->", "page")):
        page.write_text(text)
        refused = CliRunner().invoke(app, ["bench", "--from", str(kept), "--page", str(page), "--json"])
        assert (refused.exit_code, json.loads(refused.stdout)["error"]["details"]["field"]) == (1, field)
        assert page.read_text() == text
    kept.write_text("{}")
    for arguments in (["--from", str(kept)], ["--page", str(page)], ["--from", str(kept), "--quick"]):
        refused = CliRunner().invoke(app, ["bench", *arguments, "--json"])
        assert (refused.exit_code, json.loads(refused.stdout)["error"]["reason"]) == (1, "INVALID_REQUEST")


def test_the_page_and_the_decision_mark_where_figures_go() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for page, blocks in {
        docs / "performance.md": set(shown.BLOCKS),
        next((docs / "adr").glob("*-transports-and-their-order.md")): {"transports"},
    }.items():
        assert set(re.findall(r"<!-- bench (\w+) -->", page.read_text())) == blocks


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["bench", "--quick", "--workload", "tiny", "--transport", "ucx", "--rounds", "1"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {row["workload"] for row in found["results"]} == {"tiny"}
    assert found["ratios"]["tiny_put_vs_echo"] > 0
    assert found["ratio_details"]["tcp_put_vs_socket"]["reason"]
    assert "round 1 of 1" in done.stderr

    refused = CliRunner().invoke(app, ["bench", "--workload", "sorted", "--json"])
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)["error"]["details"]["field"] == "workload"

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused = CliRunner().invoke(app, ["bench", "--plot", str(tmp_path / "x.svg"), "--json"])
    assert refused.exit_code == 1
    assert "hurray-transfer[plot]" in json.loads(refused.stdout)["error"]["message"]


def outcome_of(**rows: list[tuple[float, int] | None]) -> Outcome:
    """An outcome with these (seconds, bytes) of `paged` by subject."""
    outcome = Outcome(Plan(TINY), transports=("ucx",), rounds=3)
    cost = Cost(1.0, 2, 1)
    for subject, row in rows.items():
        key = CaseKey("paged", subject, CHECKSUM if subject == "ucx" else None)
        outcome.samples[key] = [None if item is None else Sample(*item, source=cost, target=cost) for item in row]
    return outcome


def test_ratios_are_taken_within_rounds() -> None:
    # Ours: 1, 4 and 10 GB/s; the socket's 2, 2 and 20. Ratios 0.5, 2 and 0.5: their median is 0.5, that of the
    # medians, 4 to 2, would be 2.
    gb = 10**9
    outcome = outcome_of(ucx=[(1.0, gb), (1.0, 4 * gb), (1.0, 10 * gb)], socket=[(1.0, 2 * gb), (0.5, gb), (0.05, gb)])
    figure = report.ratios(outcome)["tcp_put_vs_socket"]
    assert (figure.median, figure.least, figure.most, figure.rounds) == (0.5, 0.5, 2.0, 3)


def test_only_rounds_that_have_both_count() -> None:
    outcome = outcome_of(ucx=[(1.0, 8), None, (1.0, 8)], socket=[None, (1.0, 8), (2.0, 8)])
    figure = report.ratios(outcome)["tcp_put_vs_socket"]
    assert (figure.median, figure.rounds) == (2.0, 1)
    outcome = outcome_of(ucx=[(1.0, 8), None], socket=[None, (1.0, 8)])
    figure = report.ratios(outcome)["tcp_put_vs_socket"]
    assert (figure.median, figure.reason) == (None, "no round has both")


def test_a_missing_side_says_why() -> None:
    outcome = outcome_of(ucx=[(1.0, 8)], socket=[])
    outcome.skipped["mooncake"] = "not installed"
    outcome.failed["paged socket"] = "the target went away"
    found = report.ratios(outcome)
    assert found["tcp_put_vs_mooncake"].reason == "mooncake: not installed"
    assert found["tcp_put_vs_socket"].reason == "paged socket failed: the target went away"
    assert "does not offer" in (found["shm_get_ms"].reason or "")


@pytest.mark.parametrize("scale", [FULL, QUICK, TINY])
def test_workloads_are_whole(scale: Scale) -> None:
    for workload in (catalogue(scale) | plot_workloads()).values():
        own = tables(workload)
        assert own.seq_ptr.size == workload.num_seqs + 1
        assert np.array_equal(np.unique(own.block_table), np.arange(workload.num_pages)), workload.name
        # All tokens lie in the pages of their sequence, and need all of them.
        held = np.diff(own.seq_ptr)
        assert np.array_equal(pages_needed(own.token_counts, workload.page_size), held), workload.name
        other = tables(workload, variant=1)
        assert np.array_equal(other.token_counts, own.token_counts)
    paged = catalogue(scale)["paged"]
    assert paged.nbytes == scale.paged_bytes
    assert paged.page_bytes == 32 << 10


def test_full_sizes() -> None:
    found = catalogue(FULL)
    assert (found["paged"].nbytes, found["large"].nbytes) == (256 * MIB, 4096 * MIB)
    small = found["small_tensors"]
    assert (small.tensor_count, small.nbytes) == (160, 160 * 64 << 10)
    assert (found["sequences_100k"].num_seqs, tables(found["sequences_100k"]).block_table.size) == (100_000, 1_500_000)
    shared = found["shared_prefix"]
    assert (shared.num_seqs, shared.shared_pages / (tables(shared).block_table.size / 32)) == (32, 0.9)
    assert catalogue(QUICK)["large"].nbytes == 1024 * MIB


def test_pools_of_a_snapshot_are_page_aligned() -> None:
    paged = catalogue(replace(TINY, paged_bytes=4 * MIB))["paged"]
    memory = aligned_empty(paged.nbytes)
    pools = caches(paged, memory)
    assert len(pools) == paged.tensor_count
    assert all(pool.ctypes.data % 4096 == 0 for pool in pools.values())
    own = tables(paged)
    snapshot = KVSnapshot.from_paged(pools, block_tables=(own.seq_ptr, own.block_table), token_counts=own.token_counts)
    assert snapshot.nbytes == paged.nbytes
    assert np.array_equal(np.sort(page_order(paged)), np.arange(memory.nbytes // paged.page_bytes))


def test_workers_say_what_went_wrong() -> None:
    with Worker("baseline") as worker:
        with pytest.raises(BenchError, match="baseline: AttributeError"):
            worker.ask("no_such_method")
        assert usage(worker.pids).cpu_s > 0
    with Worker("no such kind") as worker, pytest.raises(BenchError, match="KeyError"):
        worker.ask("open")


def test_unknown_workloads_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="sorted"):
        Plan(workloads=("paged", "sorted")).chosen()


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unsupported, match="plot"):
        plot.require_matplotlib()
