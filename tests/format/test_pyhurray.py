"""Against the format author's own binding, an independent reader: what we write it reads, and we take no more than it.

It runs in a process of its own, because it can abort.
"""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from format.corpus import LENIENT, Seeded, a_descriptor, vectors
from format.mutants import Mutator
from format.pyhurray_worker import EXTENSION, STATISTICS
from hurray_wire.descriptor import Descriptor, decode_descriptor
from hurray_wire.errors import HurrayError
from hurray_wire.sections import SYNC_MODE_NAMES

if importlib.util.find_spec("hurray") is None:
    pytest.skip("pyhurray is not installed: NOTHING here was compared with it", allow_module_level=True)

MUTANTS = 200_000
BATCH = 5_000
SEED = 20_240_817


class Pyhurray:
    """The worker process, started anew where it died. Context manager."""

    def __init__(self) -> None:
        self.deaths: list[bytes] = []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Pyhurray:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def accepts(self, batch: Sequence[bytes]) -> list[bool]:
        """Its verdict on each descriptor; one that kills it counts as accepted here, and is kept in `deaths`."""
        verdicts: list[bool] = []
        while len(verdicts) < len(batch):
            process = self._send(b"v", batch[len(verdicts) :])
            assert process.stdout is not None
            answers = process.stdout.read(len(batch) - len(verdicts))
            verdicts += [answer == 1 for answer in answers]
            if len(verdicts) < len(batch):
                self._died(batch[len(verdicts)])
                verdicts.append(True)
        return verdicts

    def fields(self, batch: Sequence[bytes]) -> list[dict[str, Any] | None]:
        """What it decodes of each, None where it refuses or dies."""
        found: list[dict[str, Any] | None] = []
        while len(found) < len(batch):
            process = self._send(b"f", batch[len(found) :])
            assert process.stdout is not None
            for line in process.stdout:
                found.append(json.loads(line))
                if len(found) == len(batch):
                    break
            else:
                self._died(batch[len(found)])
                found.append(None)
        return found

    def _send(self, mode: bytes, batch: Sequence[bytes]) -> subprocess.Popen[bytes]:
        if self._process is None:
            script = Path(__file__).with_name("pyhurray_worker.py")
            self._process = subprocess.Popen(
                [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        # It reads the whole request before it answers, so writing all of it first cannot lock both.
        lengths = struct.pack(f"<{len(batch)}I", *map(len, batch))
        assert self._process.stdin is not None
        self._process.stdin.write(struct.pack("<cI", mode, len(batch)) + lengths + b"".join(batch))
        self._process.stdin.flush()
        return self._process

    def _died(self, data: bytes) -> None:
        self.deaths.append(data)
        self._stop()

    def _stop(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.communicate()


@pytest.fixture(name="pyhurray")
def a_worker() -> Iterator[Pyhurray]:
    with Pyhurray() as worker:
        yield worker


@pytest.fixture(scope="module", name="corpus")
def valid_descriptors() -> list[bytes]:
    """Valid descriptors: the vectors', and as many of our own of all types and schemes."""
    ours = [a_descriptor(Seeded(SEED + number)).encode(LENIENT) for number in range(400)]
    return ours + [bytes.fromhex(vector["hex"])[: vector["consumed"]] for vector in vectors("valid")]


def expected_fields(descriptor: Descriptor) -> dict[str, Any]:
    """Our fields as the worker names them. It hides statistics that computed_mask says are not there."""
    scheme, statistics, extension = descriptor.quantization, descriptor.statistics, descriptor.extension_type
    return {
        "version": [1, descriptor.version_minor],
        "type_tag": descriptor.type_tag,
        "shape": list(descriptor.shape),
        "byte_offset": 0,
        "page_size": descriptor.page_size,
        "num_pages": descriptor.num_pages,
        "paged_axis": 0,
        "num_seqs": descriptor.num_seqs,
        "kv_role": descriptor.kv_role_name,
        "layer_index": descriptor.layer_index,
        "block_table_index_type": descriptor.index_dtype.name,
        "device_tag": descriptor.device_tag,
        "memory_class": descriptor.memory_class,
        "buffers": [
            [handle.byte_size, handle.alignment, SYNC_MODE_NAMES[handle.sync_mode]] for handle in descriptor.buffers
        ],
        "quantization": None if scheme is None else [scheme.scheme, scheme.pack().hex()],
        "statistics": None
        if statistics is None
        else {"computed_mask": statistics.computed_mask}
        | {
            name: exact(getattr(statistics, name)) if statistics.computed_mask >> bit & 1 else None
            for name, bit in STATISTICS.items()
        },
        "extension_type": None if extension is None else [getattr(extension, name) for name in EXTENSION],
    }


def exact(value: float | int) -> str | int:
    return struct.pack("<d", value).hex() if isinstance(value, float) else value


def assert_equal_fields(pyhurray: Pyhurray, batch: list[bytes]) -> list[bytes]:
    """Both decode the same fields of each. Returns what pyhurray encodes from them."""
    encoded = []
    for data, theirs in zip(batch, pyhurray.fields(batch), strict=True):
        descriptor, _ = decode_descriptor(data, LENIENT)
        assert theirs is not None, data.hex()
        encoded.append(bytes.fromhex(theirs.pop("encoded")))
        assert theirs == expected_fields(descriptor), data.hex()
    return encoded


def test_it_decodes_all_we_encode_to_equal_fields(pyhurray: Pyhurray, corpus: list[bytes]) -> None:
    ours = [a_descriptor(Seeded(number)).encode(LENIENT) for number in range(3_000)]
    assert_equal_fields(pyhurray, corpus)
    assert assert_equal_fields(pyhurray, ours) == ours
    assert pyhurray.deaths == []


def test_we_accept_no_mutant_that_it_rejects(
    pyhurray: Pyhurray, corpus: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """No rule is excepted: pyhurray rejects nothing that RULES.md lets us accept."""
    mutator = Mutator(corpus, SEED)
    rules: Counter[str] = Counter()
    lines = []
    for name, mutants in (
        ("bytes", mutator.of_bytes(MUTANTS // 2)),
        ("fields, lengths repaired", mutator.of_fields(MUTANTS // 2)),
    ):
        ours = theirs = total = 0
        sample: list[bytes] = []
        while batch := list(islice(mutants, BATCH)):
            verdicts = [verdict(data, rules) for data in batch]
            answers = pyhurray.accepts(batch)
            looser = [data.hex() for data, mine, its in zip(batch, verdicts, answers, strict=True) if mine and not its]
            assert looser == []
            accepted = [data for data, mine in zip(batch, verdicts, strict=True) if mine]
            sample += accepted[:100]
            ours, theirs, total = ours + len(accepted), theirs + sum(answers), total + len(batch)
        assert total == MUTANTS // 2
        assert_equal_fields(pyhurray, sample)
        lines.append(f"mutants of {name}: {total}, accepted by us {ours / total:.1%}, by pyhurray {theirs / total:.1%}")
        # A mutator whose mutants are nearly all refused, or hardly any, would show nothing.
        assert 0.05 < ours / total < 0.8
    with capsys.disabled():
        print(
            "\n" + "\n".join(lines) + f"; rules that refused: {len(rules)}; pyhurray died {len(pyhurray.deaths)} times"
        )
    assert len(rules) > 75


def verdict(data: bytes, rules: Counter[str]) -> bool:
    """Whether we accept, under the policy that takes most. Whatever is raised but our own errors fails the test."""
    try:
        decode_descriptor(data, LENIENT)
    except HurrayError as error:
        rules[str(error.rule)] += 1
        return False
    return True


def test_a_dead_worker_is_started_anew(
    pyhurray: Pyhurray, corpus: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = corpus[0], corpus[0][:50]
    assert pyhurray.accepts([good, bad]) == [True, False]
    send = pyhurray._send

    def send_and_kill(mode: bytes, batch: Sequence[bytes]) -> subprocess.Popen[bytes]:
        monkeypatch.setattr(pyhurray, "_send", send)
        assert pyhurray._process is not None
        pyhurray._process.kill()
        pyhurray._process.wait()
        return pyhurray._process

    monkeypatch.setattr(pyhurray, "_send", send_and_kill)
    assert pyhurray.accepts([bad, good, bad]) == [True, True, False]
    assert pyhurray.deaths == [bad]
