"""Machines with one mistake each: what drives the right ones through their worlds must find every one of these.

Each mistake is one that somebody would make, and one whose only witness may be another tenant's page.
"""

from __future__ import annotations

from typing import Any

import pytest

from hurray_wire import session as s
from hurray_wire.errors import HurrayError, PeerUnavailable, ProtocolViolation
from session.simulation import Violation
from session.walks import BUDGET, wander_through, worlds

S, T = s.SourcePhase, s.TargetPhase


class TargetReleasesBeforeDrain(s.TargetSession):
    def _fail(self, error: HurrayError) -> None:
        super()._fail(error)
        if self.phase is T.SETTLING:
            self.phase = T.ENDED
            self._actions += [s.Release(), s.End(error)]


class TargetCommitsBeforeChecksums(s.TargetSession):
    def _advance(self) -> None:
        self.verified_chunk_count = max(self.verified_chunk_count, self.arrived_chunk_count)
        super()._advance()


class TargetSkipsTheLastChecksum(s.TargetSession):
    def _verify(self, chunk: int, arrived: int) -> bool:
        if chunk == self.chunk_count - 1:
            arrived = self._told[chunk]
        return super()._verify(chunk, arrived)


class TargetCommitsBeforeContents(s.TargetSession):
    def _advance(self) -> None:
        super()._advance()
        if self.phase is T.CHECKING_CONTENTS:
            self._actions[-1:] = [s.Commit()]
            self.phase = T.COMMITTING


class TargetPostsPagesBeforeTheIndexIsValid(s.TargetSession):
    def _post(self) -> None:
        super()._post()
        while self.posted_chunk_count < self.chunk_count and len(self.in_flight) < self.window:
            self.in_flight.add(self.posted_chunk_count)
            self._actions.append(s.PostReceive(self.posted_chunk_count))
            self.posted_chunk_count += 1


class TargetOverrunsItsWindow(s.TargetSession):
    def _post(self) -> None:
        self.window += 1
        super()._post()
        self.window -= 1


class TargetForgetsWhatMayBeInFlight(s.TargetSession):
    def _account(self, sent_chunk_count: int) -> None:
        super()._account(min(sent_chunk_count, min(self.in_flight, default=0)))


class TargetForgetsAgainAtEachCompletion(s.TargetSession):
    def _settle(self) -> None:
        self._forgot = False
        super()._settle()


class TargetForgetsNothing(s.TargetSession):
    def _account(self, sent_chunk_count: int) -> None:
        self._forgot = True
        super()._account(sent_chunk_count)


class TargetLeavesMessagesThatNobodyTakes(s.TargetSession):
    def _account(self, sent_chunk_count: int) -> None:
        super()._account(min(sent_chunk_count, self.posted_chunk_count))
        self.posted_chunk_count = self.chunk_count


class TargetEndsWhenTheCountIsKnown(s.TargetSession):
    def _on_PeerStopped(self, event: s.PeerStopped) -> None:
        super()._on_PeerStopped(event)
        if self.phase is T.SETTLING:
            self.phase = T.ENDED
            self._actions += [s.Release(), s.End(self.outcome)]


class TargetNeverTellsThatItStopped(s.TargetSession):
    def _fail(self, error: HurrayError) -> None:
        self._stop_told = True
        super()._fail(error)


class TargetIgnoresTheAnswerToItsCommit(s.TargetSession):
    def _on_CommitRefused(self, _: s.CommitRefused) -> None:
        self.phase = T.ENDED
        self._actions += [s.Release(keep=True), s.End(None)]


class TargetFailsWhileCommitting(s.TargetSession):
    def _on_StreamLost(self, event: s.StreamLost) -> None:
        super()._on_StreamLost(event)
        if self.phase is T.COMMITTING:
            self._fail(PeerUnavailable("the stream broke"))


class TargetTellsTheReceiptWithoutCommit(s.TargetSession):
    def _on_ContentsChecked(self, event: s.ContentsChecked) -> None:
        super()._on_ContentsChecked(event)
        self._actions += [s.TellReceipt("receipt")] * (self.phase is T.COMMITTING)


class TargetKeepsMemoryOfAFailedTransfer(s.TargetSession):
    def _settle(self) -> None:
        super()._settle()
        self._actions = [s.Release(keep=True) if isinstance(action, s.Release) else action for action in self._actions]


class TargetWaitsForEverWithNothingOpen(s.TargetSession):
    def _on_DrainExpired(self, _: s.DrainExpired) -> None:
        if self.phase is T.SETTLING:
            self._close()


class TargetCutsAConnectionThatOthersUse(s.TargetSession):
    def _on_Failed(self, event: s.Failed) -> None:
        if self.phase in (T.INDEX, T.PAGES):
            self._close()
        super()._on_Failed(event)


class TargetEndsTwice(s.TargetSession):
    def _on_PeerStopped(self, event: s.PeerStopped) -> None:
        if self.phase is T.ENDED:
            self._fail(event.error)
        else:
            super()._on_PeerStopped(event)


class SourceReportsSuccessWhenTheStreamIsLost(s.SourceSession):
    def _give_up_unknown(self) -> None:
        self.outcome, self.receipt = None, "receipt"
        self._settle()


class SourceReportsFailureWhenTheStreamIsLost(s.SourceSession):
    def _give_up_unknown(self) -> None:
        self.outcome = PeerUnavailable("the target was lost")
        self._settle()


class SourceCancelsWithoutAnAnswer(s.SourceSession):
    def _cancel(self, error: HurrayError) -> None:
        self._fail(error)


class SourceFailsAtAWrongMessageWhateverThePhase(s.SourceSession):
    def _refuse(self, event: s.Event) -> None:
        super()._refuse(event)
        if self.phase is not S.ENDED:
            self._fail(ProtocolViolation("unexpected message"))


class SourceIgnoresAReceiptAfterCancelling(s.SourceSession):
    def _on_ReceiptReceived(self, event: s.ReceiptReceived) -> None:
        cancelled_for = self.outcome
        super()._on_ReceiptReceived(event)
        if cancelled_for is not None and self.phase is S.ENDED and self._actions:
            self._actions[-1] = s.End(cancelled_for)


class SourceReleasesBeforeItsSendsComplete(s.SourceSession):
    def _settle(self) -> None:
        super()._settle()
        if self.phase is S.SETTLING:
            self.phase = S.ENDED
            self._actions += [s.Release(), s.End(self.outcome, self.receipt)]


class SourceOverrunsTheWindow(s.SourceSession):
    def _on_Accepted(self, event: s.Accepted) -> None:
        super()._on_Accepted(s.Accepted(event.window + 1))


class SourceSendsWhatIsNotReady(s.SourceSession):
    def _on_Accepted(self, event: s.Accepted) -> None:
        self.ready_chunk_count = self.chunk_count
        super()._on_Accepted(event)


class SourceSendsAfterItStopped(s.SourceSession):
    def _on_SendDone(self, event: s.SendDone) -> None:
        super()._on_SendDone(event)
        if self.phase is S.SETTLING:
            self._fill_window()


class SourceCountsOnlyWhatCompleted(s.SourceSession):
    def _tell_stop(self, error: HurrayError) -> None:
        sent, self.sent_chunk_count = self.sent_chunk_count, self.sent_chunk_count - len(self.in_flight)
        super()._tell_stop(error)
        self.sent_chunk_count = sent


class SourceDoesNotTellItsCount(s.SourceSession):
    def _on_PeerStopped(self, event: s.PeerStopped) -> None:
        self._stop_told = True
        super()._on_PeerStopped(event)


class SourceTellsChecksumsOnlyAtTheEnd(s.SourceSession):
    def _on_ChunkPosted(self, event: s.ChunkPosted) -> None:
        index_chunk_count, self.index_chunk_count = self.index_chunk_count, 0
        super()._on_ChunkPosted(event)
        self.index_chunk_count = index_chunk_count


class SourceThinksItStillSends(s.SourceSession):
    def _fill_window(self) -> None:
        super()._fill_window()
        if self.phase is S.DELIVERED:
            self.phase = S.SENDING

    def _on_ChunkPosted(self, event: s.ChunkPosted) -> None:
        super()._on_ChunkPosted(event)
        if event.chunk + 1 == self.chunk_count and self.phase is S.SENDING:
            self.phase = S.DELIVERED


class SourceLeavesSendsOpenWhenTheDrainExpires(s.SourceSession):
    def _on_DrainExpired(self, _: s.DrainExpired) -> None:
        if self.phase is S.CANCELLING:
            self._give_up_unknown()


class SourceEndsTwice(s.SourceSession):
    def _on_ReceiptReceived(self, event: s.ReceiptReceived) -> None:
        if self.phase is S.ENDED:
            self._settle()
        else:
            super()._on_ReceiptReceived(event)


PLANTED = [kind for base in (s.SourceSession, s.TargetSession) for kind in base.__subclasses__()]


@pytest.mark.parametrize("kind", PLANTED, ids=lambda kind: kind.__name__)
def test_mistake_is_found(kind: type[Any]) -> None:
    role = "source_type" if issubclass(kind, s.SourceSession) else "target_type"
    with pytest.raises(Violation):
        wander_through(worlds(BUDGET, **{role: kind}))
