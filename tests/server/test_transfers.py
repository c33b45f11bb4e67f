"""The commit point, with a mover that is only a list of what it was told."""

from __future__ import annotations

import asyncio
import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from hurray_server.config import load_config
from hurray_server.principal import LOCAL_TENANT, Principal
from hurray_server.quotas import Quota, Quotas, Usage
from hurray_server.requests import Requests
from hurray_server.sessions import Session
from hurray_server.store import Store
from hurray_server.tally import Tally
from hurray_server.transfers import GetTransfer, PutTransfer
from hurray_wire.errors import Cancelled, DataPlaneUnavailable, HurrayError, KeyNotFound, PeerUnavailable
from hurray_wire.messages import read_offer, to_duration
from hurray_wire.status import from_status, to_status
from hurray_wire.v1 import mover_pb2 as mpb
from hurray_wire.v1 import transfer_pb2 as pb
from support.raw import Prepared, snapshot


class Setup:
    """A node as far as a put needs one."""

    def __init__(self) -> None:
        self.told: list[mpb.TransferInput] = []
        self.sources: list[mpb.BeginSource] = []
        self.transfers: set[Any] = set()
        self.ended: list[Any] = []
        link = SimpleNamespace(
            new_transfer=lambda _: 1,
            begin_target=lambda order: setattr(self, "order", order),
            begin_source=lambda order: self.sources.append(mpb.BeginSource.FromString(order.SerializeToString())),
            input=lambda message: self.told.append(mpb.TransferInput.FromString(message.SerializeToString())),
            condemn=lambda _: None,
        )
        self.store, self.requests = Store(lambda _: None, max_snapshots=9), Requests()
        self.quotas = Quotas(Quota(), {})
        self.node: Any = SimpleNamespace(
            quotas=self.quotas,
            tally=Tally(),
            keep=lambda *_: None,
            link=link,
            config=load_config(None, {"node": "n"}),
            store=self.store,
            requests=self.requests,
            now_s=lambda: 0.0,
            to_timestamp=lambda at_s: pb.Receipt(expire_time={"seconds": int(at_s)}).expire_time,
            leases_changed=lambda: None,
            device_tag=0,
            tenant_number=lambda tenant: {"local": 77}[tenant],
            chunk_bytes=lambda _: 4096,
            stages=lambda _: False,
            add=self.transfers.add,
            remove=self.transfers.discard,
            ended=self.ended.append,
        )
        self.offer = Prepared.of(snapshot()).offer("k", 5, annotations={"secret": "s"})
        self.put = PutTransfer(
            self.node,
            Session(Principal(LOCAL_TENANT, True, "unix:", None, None), 5, 5),
            self.offer,
            read_offer(self.offer, self.node.config.wire_limits),
            "ucx",
            running=self.requests.begin("local", self.offer.request_id, b"d"),
            claim=self.store.claim("k", overwrite=False, now_s=0.0),
            charge=self.quotas.charge(LOCAL_TENANT, 4096),
            end_slot=self.quotas.begin_transfer(LOCAL_TENANT),
            lease_s=60.0,
            budget_s=10.0,
        )

    def get(self) -> GetTransfer:
        """What was put, asked for."""
        self.prepared()
        self.told.clear()
        return GetTransfer(
            self.node,
            Session(Principal(LOCAL_TENANT, True, "unix:", None, None), 6, 6),
            self.store.pin("k", 0, 0.0, consume=False),
            "ucx",
            str(uuid.uuid4()),
            view=False,
            checksum=pb.CHECKSUM_XXH3_64,
            takes_checksums=True,
            end_slot=self.quotas.begin_transfer(LOCAL_TENANT),
            budget_s=10.0,
        )

    def report(self, **output: Any) -> None:
        self.put.on_output(mpb.TransferOutput(transfer=1, **output))

    def prepared(self) -> None:
        receipt = pb.Receipt(
            wire_bytes=9, dirty_dead_slot_count=3, stages=[pb.StageTime(stage="pages", duration=to_duration(0.5))]
        )
        self.report(prepared=mpb.Prepared(receipt=receipt, viewable=True))

    def messages(self) -> list[pb.TargetMessage | None]:
        found = list(self.put.messages._items)
        self.put.messages._items.clear()
        return found

    def known(self) -> object:
        return self.requests.look_up("local", self.offer.request_id, b"d", 0.0)


async def _in_a_loop(body: Any) -> None:
    body(Setup())


def in_a_loop(body: Any) -> None:
    asyncio.run(_in_a_loop(body))


def test_a_commit_is_visible_at_once_and_its_receipt_is_kept() -> None:
    def body(setup: Setup) -> None:
        with pytest.raises(KeyNotFound):
            setup.store.find("k", 0, 0.0)
        setup.prepared()
        found = setup.store.find("k", 0, 0.0)
        assert (found.contents.memory, found.contents.annotations) == (1, {"secret": "s"})
        assert found.contents.viewed_by == "local"
        (told,) = setup.told
        assert not told.commit.HasField("error")
        (message,) = setup.messages()  # before the mover has heard of it
        assert message is not None
        assert setup.known() == message.receipt
        assert (message.receipt.wire_bytes, message.receipt.node) == (9, "n")
        assert setup.transfers == set(), "it counts for no limit any more"
        assert setup.ended == [], "a node that stops now would cut off the end of its stream"
        setup.report(ended=mpb.TransferEnded())
        assert setup.messages() == [None]
        assert setup.put.error is None
        assert setup.ended == [setup.put]

    in_a_loop(body)


@pytest.mark.parametrize(("chunk_bytes", "kept"), [(1 << 20, 7), (4096, None)])
def test_the_checksum_of_an_index_is_kept_if_it_is_one_chunk_of_a_view(chunk_bytes: int, kept: int | None) -> None:
    def body(setup: Setup) -> None:
        setup.node.chunk_bytes = {"shm": chunk_bytes}.__getitem__
        setup.report(prepared=mpb.Prepared(receipt=pb.Receipt(), viewable=True, index_checksum=7))
        assert setup.store.find("k", 0, 0.0).contents.index_checksum == kept

    in_a_loop(body)


def test_what_was_committed_is_counted_once_and_not_what_follows() -> None:
    async def body() -> None:
        setup = Setup()
        setup.report(target=pb.TargetMessage(accept=pb.Accept()))
        setup.prepared()
        await asyncio.sleep(0)
        setup.put.on_mover_down(DataPlaneUnavailable("gone"))
        tally = setup.node.tally
        assert tally.transfers == {("in", "ucx", "OK"): 1}
        assert tally.crossed_bytes == {("in", "ucx"): 9}
        assert tally.dirty_dead_slot_count == 3
        assert list(tally.stage_durations) == [("in", "pages")]

    asyncio.run(body())


def test_the_mover_learns_no_names() -> None:
    def body(setup: Setup) -> None:
        told = setup.order.offer  # type: ignore[attr-defined]
        assert (told.key, told.request_id, dict(told.annotations)) == ("", "", {})
        assert setup.order.tenant == 77  # type: ignore[attr-defined]
        assert list(told.token_counts) == list(setup.offer.token_counts)

    in_a_loop(body)


def test_a_stream_that_broke_before_the_commit_refuses_it() -> None:
    def body(setup: Setup) -> None:
        setup.put.stream_lost()
        setup.prepared()
        assert [message.WhichOneof("input") for message in setup.told] == ["stream_lost", "commit"]
        assert isinstance(from_status(setup.told[1].commit.error), PeerUnavailable)
        setup.report(ended=mpb.TransferEnded(error=setup.told[1].commit.error))
        with pytest.raises(KeyNotFound):
            setup.store.find("k", 0, 0.0)
        assert setup.known() is None
        setup.store.claim("k", overwrite=False, now_s=0.0)

    in_a_loop(body)


@pytest.mark.parametrize("error", [Cancelled("no"), None])
def test_a_failure_gives_back_key_and_request(error: HurrayError | None) -> None:
    def body(setup: Setup) -> None:
        if error is not None:
            setup.report(ended=mpb.TransferEnded(error=to_status(error)))
        else:
            setup.put.on_mover_down(DataPlaneUnavailable("gone", retry_after_s=1.0))
        assert setup.messages() == [None]
        assert setup.put.error is not None
        assert setup.put.error.code in ("CANCELLED", "UNAVAILABLE")
        assert setup.known() is None
        assert setup.quotas.usage(LOCAL_TENANT) == Usage()
        setup.store.claim("k", overwrite=False, now_s=0.0)
        setup.put.stream_lost()  # the stream ends after the transfer: nobody is told
        assert setup.told == []

    in_a_loop(body)


def test_the_stage_is_named_when_the_mover_goes() -> None:
    def body(setup: Setup) -> None:
        assert setup.put.stage == "reserve"
        setup.report(target=pb.TargetMessage(accept=pb.Accept()))
        setup.put.on_mover_down(DataPlaneUnavailable("gone"))
        assert setup.put.error is not None
        assert setup.put.error.stage == "pages"

    in_a_loop(body)


def test_the_caller_of_a_get_is_told_before_the_mover() -> None:
    async def body() -> None:
        setup = Setup()
        get = setup.get()
        message = await get.messages.get()
        assert message is not None
        assert setup.sources == []
        await asyncio.sleep(0)
        (order,) = setup.sources
        assert (order.peer, order.snapshot, order.budget_s) == (6, 1, 10.0)
        assert list(order.offer.tensors) == list(message.offer.tensors)
        assert list(order.offer.token_counts) == list(message.offer.token_counts)
        assert (order.offer.chunk_bytes, order.offer.checksum) == (4096, pb.CHECKSUM_XXH3_64)
        assert (order.offer.key, order.offer.request_id, dict(order.offer.annotations)) == ("", "", {})

    asyncio.run(body())


def test_a_mover_hears_of_a_get_before_it_hears_what_happened_to_it() -> None:
    async def body() -> None:
        setup = Setup()
        setup.get().stream_lost()
        assert len(setup.sources) == 1
        (told,) = setup.told
        assert told.HasField("stream_lost")
        await asyncio.sleep(0)
        assert len(setup.sources) == 1

    asyncio.run(body())


def test_a_get_whose_mover_is_gone_begins_at_no_other() -> None:
    async def body() -> None:
        setup = Setup()
        setup.get().on_mover_down(DataPlaneUnavailable("gone"))
        await asyncio.sleep(0)
        assert setup.sources == []

    asyncio.run(body())
