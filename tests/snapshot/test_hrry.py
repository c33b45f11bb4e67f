"""Snapshots in .hrry files, written and read with the format author's implementation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from hurray_wire.errors import HurrayError, InvalidContents, InvalidSnapshot, Unsupported
from hurray_wire.hrry import load_hrry, save_hrry
from hurray_wire.paged import Quantized
from hurray_wire.snapshot import KVSnapshot
from pages.cases import Tensor, snapshots

hurray = pytest.importorskip("hurray")


def small() -> KVSnapshot:
    pools = {(3, role): np.arange(320, dtype=np.float16).reshape(5, 4, 2, 8) for role in ("key", "value")}
    return KVSnapshot.from_paged(pools, block_tables=[[0, 1], [0]], token_counts=[6, 3])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=snapshots())
def test_a_file_gives_back_every_token(tmp_path: Path, made: tuple[KVSnapshot, list[Tensor]]) -> None:
    snapshot, _ = made
    path = tmp_path / "batch.hrry"

    save_hrry(path, snapshot)
    copy = load_hrry(path)

    assert copy.token_counts.tolist() == snapshot.token_counts.tolist()
    assert [(tensor.layer_index, tensor.role) for tensor in copy.tensors] == [
        (tensor.layer_index, tensor.role) for tensor in snapshot.tensors
    ]
    for tensor in snapshot.tensors:
        for seq in range(snapshot.num_seqs):
            wanted = snapshot.tokens(tensor.layer_index, tensor.role, seq)
            found = copy.tokens(tensor.layer_index, tensor.role, seq)
            assert found.dtype == wanted.dtype
            assert found.tobytes() == wanted.tobytes()


def test_a_file_holds_what_would_cross_the_wire(tmp_path: Path) -> None:
    save_hrry(tmp_path / "a.hrry", small())

    tensors, keys = hurray.load(str(tmp_path / "a.hrry")), hurray.load_kv(str(tmp_path / "a.hrry"))

    assert sorted(tensors) == ["layers.3.key", "layers.3.value"]
    assert tensors["layers.3.key"].layout.num_pages == 2
    assert keys == {
        "hurray_transfer.version": 1,
        "hurray_transfer.num_seqs": 2,
        "hurray_transfer.token_counts": [6, 3],
    }
    assert not np.from_dlpack(tensors["layers.3.key"].buffer(0)).view(np.float16)[96:].any()
    assert [item.name for item in tmp_path.iterdir()] == ["a.hrry"]


def foreign(path: Path, **keys: Any) -> None:
    """A file of another writer: the same tensors, and only the keys given."""
    save_hrry(path, small())
    hurray.save(str(path), hurray.load(str(path)), kv=keys or None)


def test_a_file_without_counts_needs_them(tmp_path: Path) -> None:
    path = tmp_path / "foreign.hrry"
    foreign(path)

    with pytest.raises(InvalidSnapshot) as refused:
        load_hrry(path)
    assert refused.value.field == "token_counts"
    assert load_hrry(path, token_counts=[6, 3]).tokens(3, "key", 0).shape == (6, 2, 8)
    with pytest.raises(InvalidContents):
        load_hrry(path, token_counts=[6, 4])


def test_counts_given_must_agree_with_those_in_the_file(tmp_path: Path) -> None:
    save_hrry(tmp_path / "a.hrry", small())

    assert load_hrry(tmp_path / "a.hrry", token_counts=np.array([6, 3])).num_seqs == 2
    with pytest.raises(InvalidSnapshot):
        load_hrry(tmp_path / "a.hrry", token_counts=[5, 4])


def test_keys_of_another_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "newer.hrry"
    foreign(path, **{"hurray_transfer.version": 2, "hurray_transfer.token_counts": [6, 3]})

    with pytest.raises(Unsupported):
        load_hrry(path)


def test_an_empty_batch_needs_no_counts(tmp_path: Path) -> None:
    snapshot = KVSnapshot.from_paged(
        {(None, "fused"): np.zeros((2, 4, 1, 8), np.float32)}, block_tables=[], token_counts=[]
    )

    save_hrry(tmp_path / "empty.hrry", snapshot)

    assert load_hrry(tmp_path / "empty.hrry").num_seqs == 0


def test_scales_travel_in_the_file(tmp_path: Path) -> None:
    snapshot = KVSnapshot.from_paged(
        {(0, "fused"): np.arange(64, dtype=np.int8).reshape(4, 4, 1, 4)},
        block_tables=[[3, 1]],
        token_counts=[7],
        quantization=Quantized.per_block(4, np.linspace(1, 2, 16, dtype=np.float16), np.ones(16, np.int32)),
    )

    save_hrry(tmp_path / "q.hrry", snapshot)

    wanted = snapshot.tokens(0, "fused", 0, dequantize=True)
    assert np.array_equal(load_hrry(tmp_path / "q.hrry").tokens(0, "fused", 0, dequantize=True), wanted)


@pytest.mark.parametrize("content", [None, b"", b"not a file of tensors"])
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.hrry"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(InvalidSnapshot) as refused:
        load_hrry(path)

    assert refused.value.field == "path"


def test_tensors_of_another_layout_are_refused(tmp_path: Path) -> None:
    hurray.save(str(tmp_path / "w.hrry"), {"w": hurray.zeros((2, 2, 2))}, kv={"hurray_transfer.token_counts": [1]})

    with pytest.raises(HurrayError) as refused:
        load_hrry(tmp_path / "w.hrry")

    assert refused.value.rule == "H14"


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSnapshot):
        save_hrry(tmp_path / "none" / "a.hrry", small())


def test_without_pyhurray_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hurray", None)

    for call in (lambda: save_hrry(tmp_path / "a.hrry", small()), lambda: load_hrry(tmp_path / "a.hrry")):
        with pytest.raises(Unsupported) as refused:
            call()
        assert "hurray-transfer[files]" in refused.value.message
