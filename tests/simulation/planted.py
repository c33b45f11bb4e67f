"""Programs with one mistake each, such as somebody would make: a world has to show every one of them.

Each is applied to the real classes, `patch(owner, name, value)` being monkeypatch.setattr.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hurray_client import client
from hurray_client import node as client_node
from hurray_client import transfer as client_transfer
from hurray_client.exchange import Exchange
from hurray_server import mover as server_mover
from hurray_server import node as server_node
from hurray_server.arena import Arena, ExtentState, TransferMemory
from hurray_server.mover import Mover
from hurray_server.mover_link import MoverLink
from hurray_server.requests import Requests
from hurray_server.store import Store
from hurray_server.transfers import GetTransfer, PutTransfer, Transfer
from hurray_wire import dataplane
from hurray_wire import payload as payloads
from hurray_wire import session as s
from hurray_wire.dataplane import DataPlane
from hurray_wire.errors import KeyDeleted, KeyOverwritten, OutcomeUnknown, ProtocolViolation
from hurray_wire.peers import Peers
from hurray_wire.status import to_status
from hurray_wire.v1 import mover_pb2 as mpb
from simulation import workload
from simulation.faults import Fault

Patch = Callable[[Any, str, Any], None]
Plant = Callable[[Patch], None]
PLANTED: list[tuple[Plant, tuple[Fault, ...]]] = []


def planted(*favoured: Fault) -> Callable[[Plant], Plant]:
    """One of them, and the faults that show it, where only these do."""

    def note(plant: Plant) -> Plant:
        PLANTED.append((plant, favoured))
        return plant

    return note


# --- what moves -------------------------------------------------------------------------------------------------------


@planted(Fault.BIT_FLIP)
def commits_before_checksums_are_compared(patch: Patch) -> None:
    def _verify(self: Any, _chunk: int, _arrived: int) -> bool:
        self.verified_chunk_count += 1
        return True

    patch(s.TargetSession, "_verify", _verify)


@planted(Fault.BIT_FLIP, Fault.CHECKSUM_LIE)
def compares_all_checksums_but_the_last(patch: Patch) -> None:
    verify = s.TargetSession._verify

    def _verify(self: Any, chunk: int, arrived: int) -> bool:
        return verify(self, chunk, self._told[chunk] if chunk == self.chunk_count - 1 else arrived)

    patch(s.TargetSession, "_verify", _verify)


@planted(Fault.DIRTY_SLOTS)
def does_not_scrub(patch: Patch) -> None:
    patch(payloads, "scrub", lambda *_: 0)


@planted(Fault.DIRTY_SLOTS)
def counts_no_dirty_slots(patch: Patch) -> None:
    scrub = payloads.scrub
    patch(payloads, "scrub", lambda *arguments: 0 * scrub(*arguments))


@planted()
def frees_memory_at_the_abort(patch: Patch) -> None:
    patch(TransferMemory, "settling", lambda self: self._arena.free(self._transfer))


@planted()
def has_no_quarantine(patch: Patch) -> None:
    patch(TransferMemory, "settling", lambda self: None)


@planted()
def releases_before_the_drain(patch: Patch) -> None:
    fail = s.TargetSession._fail

    def _fail(self: Any, error: Any) -> None:
        fail(self, error)
        if self.phase is s.TargetPhase.SETTLING:
            self.phase = s.TargetPhase.ENDED
            self._actions += [s.Release(), s.End(error)]

    patch(s.TargetSession, "_fail", _fail)


@planted()
def accepts_twice(patch: Patch) -> None:
    reserved = s.TargetSession._on_Reserved

    def _on_reserved(self: Any, event: s.Reserved) -> None:
        reserved(self, event)
        self._actions.insert(1, s.TellAccept())

    patch(s.TargetSession, "_on_Reserved", _on_reserved)


@planted(Fault.CLIENT_FREEZES, Fault.PARTITION)
def never_ends_a_drain(patch: Patch) -> None:
    patch(s.TargetSession, "_on_DrainExpired", lambda self, _: None)


@planted(Fault.LINK_STALLS)
def keeps_no_time(patch: Patch) -> None:
    begin = DataPlane._begin

    def _begin(self: Any, transfer: Any) -> bool:
        going = begin(self, transfer)
        transfer.deadline = float("inf")
        return going

    patch(DataPlane, "_begin", _begin)


@planted()
def reuses_staging_memory_too_soon(patch: Patch) -> None:
    send = DataPlane._send

    def _send(self: Any, transfer: Any, chunk: Any) -> None:
        send(self, transfer, chunk)
        self._free_staging(transfer, chunk.index, sent=True)

    patch(DataPlane, "_send", _send)


@planted()
def reports_an_unknown_outcome_as_a_failure(patch: Patch) -> None:
    def _give_up_unknown(self: Any) -> None:
        self.outcome = dataplane.PeerUnavailable("the target was lost", stage=self.phase.value)
        self._settle()

    patch(s.SourceSession, "_give_up_unknown", _give_up_unknown)


@planted()
def lets_an_old_connections_end_touch_the_new_one(patch: Patch) -> None:
    lose = Peers.lose

    def lose_all(self: Any, peer: int, error: Any, *, notify: bool) -> None:
        lose(self, peer, error, notify=notify)
        self.entries.clear()

    patch(Peers, "lose", lose_all)


# --- what is kept -----------------------------------------------------------------------------------------------------


@planted()
def forgets_to_release_the_claim(patch: Patch) -> None:
    patch(Store, "abandon", lambda self, claim: None)


@planted()
def forgets_the_pin_of_a_failed_get(patch: Patch) -> None:
    settle = GetTransfer._settle
    patch(GetTransfer, "_settle", lambda self: settle(self) if self.error is None else None)


@planted(Fault.CANCEL)
def consumes_what_was_not_received(patch: Patch) -> None:
    def _settle(self: Any) -> None:
        if self._pin.consume:
            self._node.store.consume(self._pin, self._node.now_s())
        self._node.store.unpin(self._pin)

    patch(GetTransfer, "_settle", _settle)


@planted(Fault.KEY_DELETED, Fault.KEY_EXPIRES)
def frees_memory_under_its_readers(patch: Patch) -> None:
    patch(Arena, "unpin", lambda self, owner: None)
    pin = Arena.pin

    def blind(self: Any, owner: int) -> Any:
        bytes_ = pin(self, owner)
        if bytes_ is not None:
            self._extents[owner].reader_count -= 1
        return bytes_

    patch(Arena, "pin", blind)


@planted()
def adds_up_wrong(patch: Patch) -> None:
    def quarantine(self: Any, owner: int) -> None:
        extent = self._extents.get(owner)
        if extent is not None:
            self._bytes[ExtentState.QUARANTINED] += extent.nbytes
            extent.state = ExtentState.QUARANTINED

    patch(Arena, "quarantine", quarantine)


@planted()
def never_frees_what_is_gone(patch: Patch) -> None:
    patch(MoverLink, "free", lambda self, snapshot: None)


@planted()
def overwrites_unasked(patch: Patch) -> None:
    claim = Store.claim
    patch(Store, "claim", lambda self, key, *, overwrite, now_s: claim(self, key, overwrite=True, now_s=now_s))


@planted()
def takes_the_old_away_before_the_new_is_there(patch: Patch) -> None:
    claim = Store.claim

    def early(self: Any, key: str, *, overwrite: bool, now_s: float) -> Any:
        claimed = claim(self, key, overwrite=overwrite, now_s=now_s)
        if overwrite and key in self._snapshots:
            self._remove(key, KeyOverwritten, now_s)
        return claimed

    patch(Store, "claim", early)


@planted()
def lets_two_transfers_to_one_key_run(patch: Patch) -> None:
    claim = Store.claim

    def twice(self: Any, key: str, *, overwrite: bool, now_s: float) -> Any:
        self._claims.pop(key, None)
        return claim(self, key, overwrite=overwrite, now_s=now_s)

    patch(Store, "claim", twice)


@planted()
def evicts_what_has_a_lease(patch: Patch) -> None:
    claim = Store.claim

    def evicting(self: Any, key: str, *, overwrite: bool, now_s: float) -> Any:
        if len(self._snapshots) >= 3 and key not in self._snapshots:
            self._remove(next(iter(self._snapshots)), KeyDeleted, now_s)
        return claim(self, key, overwrite=overwrite, now_s=now_s)

    patch(Store, "claim", evicting)


@planted()
def does_not_tell_why_a_key_is_gone(patch: Patch) -> None:
    patch(Store, "_drop_tombstones", lambda self, now_s: self._tombstones.clear())


@planted(Fault.KEY_OVERWRITTEN)
def says_deleted_where_it_was_overwritten(patch: Patch) -> None:
    remove = Store._remove

    def _remove(self: Any, key: str, reason: Any, now_s: float) -> None:
        remove(self, key, KeyDeleted if reason is KeyOverwritten else reason, now_s)

    patch(Store, "_remove", _remove)


@planted(Fault.KEY_RENEWED)
def ends_a_renewed_lease_all_the_same(patch: Patch) -> None:
    renew = Store.renew

    def forgetful(self: Any, key: str, generation: int, *, lease_s: float, now_s: float) -> Any:
        before = self._snapshots.get(key)
        renewed = renew(self, key, generation, lease_s=lease_s, now_s=now_s)
        self._snapshots[key] = before
        return renewed

    patch(Store, "renew", forgetful)


@planted()
def shows_what_the_mover_has_lost(patch: Patch) -> None:
    patch(Store, "lose_all", lambda self, now_s: 0)


@planted(Fault.NODE_DIES)
def begins_generations_anew(patch: Patch) -> None:
    patch(server_node, "generations_before", lambda _: 0)


# --- who asks ---------------------------------------------------------------------------------------------------------


@planted(Fault.RETRY_SAME)
def runs_a_retry_beside_the_first(patch: Patch) -> None:
    look_up = Requests.look_up

    def blind(self: Any, tenant: str, request_id: str, digest: bytes, now_s: float) -> Any:
        known = look_up(self, tenant, request_id, digest, now_s)
        return None if type(known).__name__ == "Running" else known

    def begin(self: Any, tenant: str, request_id: str, digest: bytes) -> Any:
        self._running.pop((tenant, request_id), None)
        return begun(self, tenant, request_id, digest)

    begun = Requests.begin
    patch(Requests, "look_up", blind)
    patch(Requests, "begin", begin)


@planted(Fault.RETRY_SAME)
def forgets_receipts_at_once(patch: Patch) -> None:
    succeed = Requests.succeed

    def forgetful(self: Any, running: Any, receipt: Any, **times: float) -> None:
        succeed(self, running, receipt, **times)
        self._done.clear()

    patch(Requests, "succeed", forgetful)


@planted(Fault.RETRY_OTHER)
def gives_a_receipt_to_another_body(patch: Patch) -> None:
    look_up = Requests.look_up

    def lax(self: Any, tenant: str, request_id: str, digest: bytes, now_s: float) -> Any:
        known = self._done.get((tenant, request_id)) or self._running.get((tenant, request_id))
        return look_up(self, tenant, request_id, digest if known is None else known.digest, now_s)

    patch(Requests, "look_up", lax)


@planted(Fault.RETRY_SAME)
def never_wakes_who_waits_for_the_first(patch: Patch) -> None:
    def _end(self: Any, running: Any) -> None:
        self._running.pop((running.tenant, running.request_id), None)

    patch(Requests, "_end", _end)


@planted()
def leaves_a_request_running_that_failed(patch: Patch) -> None:
    patch(Requests, "fail", lambda self, running: None)


@planted(Fault.STREAM_RESET)
def gives_up_a_call_but_not_its_transfer(patch: Patch) -> None:
    patch(Transfer, "stream_lost", lambda self: None)


@planted(Fault.CONNECT_REFUSED)
def reports_a_loss_before_the_connection(patch: Patch) -> None:
    def _peer_lost(self: Any, peer: int, error: Any) -> None:
        self._report(mpb.MoverReport(peer_lost=mpb.PeerLost(peer=peer, error=to_status(error))))

    patch(Mover, "_peer_lost", _peer_lost)


@planted()
def does_not_tell_the_transfers_that_the_mover_died(patch: Patch) -> None:
    patch(PutTransfer, "on_mover_down", lambda self, error: None)


@planted()
def holds_no_committed_memory(patch: Patch) -> None:
    commit = Mover._commit

    def _commit(self: Any, transfer: int, result: Any) -> Any:
        event = commit(self, transfer, result)
        if isinstance(event, s.Committed):
            self._arena.quarantine(transfer)
        return event

    patch(Mover, "_commit", _commit)


@planted(Fault.STREAM_RESET, Fault.CANCEL)
def client_takes_cancelled_for_an_outcome(patch: Patch) -> None:
    def retrying(call: Any, retry_s: float, attempt: Any) -> Any:
        try:
            return attempt()
        except OutcomeUnknown:
            raise client_node.Cancelled("the call was cancelled", stage="cancel") from None
        except client_node.TryAgain as again:
            raise again.error from None

    patch(client_node, "retrying", retrying)
    patch(client, "retrying", retrying)


@planted(Fault.CANCEL, Fault.PARTITION)
def client_never_settles_a_stream(patch: Patch) -> None:
    settle = Exchange._settle
    patch(Exchange, "_settle", lambda self, _seconds: settle(self, 1e6))


@planted()
def client_hears_the_node_before_its_machine_has_begun(patch: Patch) -> None:
    def _await_machine(self: Any) -> Any:
        self._take = self._take or (None if self._takers.empty() else self._takers.get())
        return self._take or (lambda _: None)

    patch(Exchange, "_await_machine", _await_machine)


# --- who lies ---------------------------------------------------------------------------------------------------------


@planted(Fault.ROGUE_TO_CLIENT)
def client_takes_any_receipt_for_its_own(patch: Patch) -> None:
    patch(client_transfer, "_check_receipt", lambda _receipt, _request_id: None)


@planted(Fault.ROGUE_TO_CLIENT)
def client_takes_nonsense_after_the_last_byte_for_a_failure(patch: Patch) -> None:
    def _refuse(self: Any, event: s.Event) -> None:
        if event.from_peer and self.phase.name not in ("SETTLING", "ENDED"):
            self._fail(ProtocolViolation("unexpected message", stage=self.phase.value))

    patch(s.SourceSession, "_refuse", _refuse)


@planted(Fault.ROGUE_TO_NODE)
def node_takes_an_empty_message_for_a_receipt(patch: Patch) -> None:
    read = server_mover.read_target_message

    def lax(message: Any) -> Any:
        return read(message) if message.WhichOneof("message") else s.ReceiptReceived(message.receipt)

    patch(server_mover, "read_target_message", lax)
    patch(workload, "CONSUMING", 1.0)  # of the others nothing is lost by it
