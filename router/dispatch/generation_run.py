"""GenerationRun: one generation from its routing decision to its last token, across lost replicas.

Owns attempts: where a generation runs now, its output so far, and where it goes when that replica is lost or
refuses. Knows no HTTP, no text, no gRPC, and not how a replica is chosen.

    not yet visible to the client   the whole request is submitted again elsewhere
    visible                         each unfinished choice resumes elsewhere from prompt + tokens so far;
                                    one that has all its tokens ends there, for its length
    out of attempts or replicas     an error of `errors.py`
    no token by its deadline        stopped wherever it is: later output is useless to its client

The client's cache figures are those of the first replica to answer: usage of a resumed attempt is dropped,
since its cached tokens are an effect of the loss.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from msgspec.structs import replace

from replicas.protocol.blocks import pack_token_ids
from replicas.protocol.frames import FinishReason, Refusal, RefusalCode, RequestKey, Submit, TokenDelta
from replicas.protocol.pulls import PullHint
from replicas.protocol.status import ReplicaId, SplitWay
from router.dispatch.attempt import Attempt, ChoiceProgress
from router.dispatch.placement import Obstacle, Placement
from router.dispatch.split import ONE_TOKEN, FirstPart, SecondPart, parts_of
from router.dispatch.upload import Upload, send_to_all
from router.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    RouterError,
)
from router.fleet.inflight import Inflight, Listener, Mailbox, ReplicaLost
from router.fleet.replica_client import ReplicaClient
from router.generation import Generation
from router.observation.trace_points import Trace
from router.routing.decision import Decision
from router.routing.table import RoutedRequest

if TYPE_CHECKING:
    from router.dispatch.dispatcher import Dispatcher

LOOK_SECONDS = 1.0
"""Interval at which a run that waits for an upload checks by itself."""


MAX_MISSED = 2
"""Times that uploaded media may be missing when requested: a replica keeps the newest."""


class GenerationRun:
    """Iterate for batches of deltas; `delta.key.choice` names the choice. Ends when every choice has
    ended."""

    decision: Decision
    """Decision of the latest attempt."""
    decision_seconds: float
    """How long the table took for it."""

    def __init__(self, dispatcher: "Dispatcher", generation: Generation, trace: Trace) -> None:
        assert generation.num_choices >= 1
        self._dispatcher = dispatcher
        self._generation = generation
        self._trace = trace
        self._choices = [ChoiceProgress() for _ in range(generation.num_choices)]
        self._num_open = generation.num_choices
        self._num_unplaced = generation.num_choices
        self._attempts: list[Attempt] = []
        self._firsts: list[FirstPart] = []
        """First parts of splits that have not ended."""
        self._second: SecondPart | None = None
        """Set while it waits for its first part."""
        self._cut_off: list[TokenDelta] = []
        """Ends of choices that have all their tokens, and were lost before their end came."""
        self._mailbox = Mailbox()
        self._placement = Placement(dispatcher, generation, trace, self._mailbox.wake)
        self._visible = False
        self._listener: Listener | None = None
        self._error: Exception | None = None
        self._upload: Upload | None = None
        self._num_missed = 0
        self._refused_by: ReplicaId | None = None
        """The server there has refused what we have checked."""

    @property
    def num_attempts(self) -> int:
        return self._placement.num_attempts

    @property
    def replica_id(self) -> ReplicaId:
        return self.decision.replica_id

    @property
    def num_waiting(self) -> int:
        """Deltas that have come and were not yet asked for."""
        return sum(attempt.inflight.num_waiting for attempt in self._attempts)

    async def __aenter__(self) -> "GenerationRun":
        self._dispatcher.num_running += 1
        try:
            while (seconds := self._place()) is not None:
                await self._pause(seconds)
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __aiter__(self) -> "GenerationRun":
        return self

    async def __anext__(self) -> Sequence[TokenDelta]:
        while True:
            batch = self._collect()
            if batch:
                self._visible = True
                return batch
            if self._error is not None:
                raise self._error
            if not self._num_open:
                raise StopAsyncIteration
            seconds = self._place() if self._num_unplaced else None
            await self._pause(seconds)

    def listen(self, listener: Listener) -> None:
        """Offer deltas in the middle of a choice to `listener` first, as they arrive. All else, errors
        included, comes by iteration."""
        self._listener = listener
        self._mailbox.listener = self._hand_over

    async def _pause(self, seconds: float | None) -> None:
        """Until something comes, the run is called, or the time is over. Raises TooLate where that for the
        first token is."""
        left = None if self._visible else self._placement.seconds_left()
        if left is not None:
            seconds = left if seconds is None else min(seconds, left)
        if seconds is None:
            await self._mailbox.wait()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._mailbox.wait()

    def abort_choice(self, choice: int) -> None:
        """Stop one choice in the engine; no delta of it follows. Ended choices are ignored."""
        state = self._choices[choice]
        if state.closed:
            return
        attempt = state.attempt
        if attempt is None:
            self._num_unplaced -= 1
        else:
            attempt.client.abort(attempt.inflight.submit_id, attempt.choices.index(choice))
        self._close_choice(state)

    # What arrives.

    def _collect(self) -> list[TokenDelta]:
        batch: list[TokenDelta] = []
        if self._firsts:
            for first in self._firsts.copy():
                self._look_at(first)
        for attempt in self._attempts.copy():
            for delta in attempt.inflight.take():
                index = attempt.choices[delta.key.choice]
                # A choice that was closed, or has moved on, has no more to say from here.
                if self._choices[index].attempt is attempt:
                    self._receive(attempt, index, delta, batch)
            if attempt.inflight.lost is not None and attempt.num_open:
                self._dispatcher.num_lost += 1
                if attempt.client.lost is not None:  # else that one request alone has come to nothing
                    self._dispatcher.replica_died(attempt.client)
                self._abandon(attempt, RefusalCode.INTERNAL)
        if self._cut_off:
            batch += self._cut_off
            self._cut_off.clear()
        return batch

    def _receive(self, attempt: Attempt, index: int, delta: TokenDelta, batch: list[TokenDelta]) -> None:
        finish = delta.finish_reason
        if finish is FinishReason.ERROR or finish is FinishReason.ABORT:
            # This router did not ask for it. Tokens that came along are not counted: they are sampled again.
            self._fail(attempt, self._choices[index], delta.refusal, visible=self._visible or bool(batch))
            return
        if not attempt.started:
            attempt.first_token()
            self._dispatcher.taken(attempt, None if self._visible else self._refused_by)
        if delta.usage is not None and not delta.key.choice:
            self._dispatcher.measured(attempt, delta.usage)
            if attempt.first is not None:
                self._dispatcher.splits.answered(delta.usage)
        if delta.usage is not None and attempt.first is not None:
            delta = replace(delta, usage=attempt.first.joined(delta.usage))
        choice = self._choices[index]
        choice.token_ids += delta.token_ids
        charge = self._placement.charge
        if charge is not None:
            if delta.usage is not None:
                charge.begins(delta.usage.num_cached_tokens)
            charge.produces(delta.num_tokens)
        if attempt.trial is not None and (finish is not None or attempt.has_survived):
            self._dispatcher.survived(attempt)
        if delta.key.choice != index or (choice.has_usage and delta.usage is not None):
            key = RequestKey(delta.key.number, index)
            delta = replace(delta, key=key, usage=None if choice.has_usage else delta.usage)
        choice.has_usage = choice.has_usage or delta.usage is not None
        batch.append(delta)
        if finish is not None:
            self._close_choice(choice)

    def _hand_over(self, delta: TokenDelta) -> bool:
        """Handle a plain delta at once, without waking the task; False leaves it to `_receive`."""
        if len(self._attempts) != 1 or delta.usage is not None or not self._visible:
            return False
        attempt, index = self._attempts[0], delta.key.choice
        if attempt.trial is not None or attempt.choices[index] != index or not attempt.started:
            return False
        assert self._listener is not None
        try:
            if not self._listener(delta):
                return False
        except Exception as error:  # it is this request's, and the frame is everybody's
            self._error = error
            return False
        self._choices[index].token_ids += delta.token_ids
        charge = self._placement.charge
        if charge is not None:
            charge.produces(delta.num_tokens)
        return True

    def _close_choice(self, choice: ChoiceProgress) -> None:
        attempt, choice.attempt = choice.attempt, None
        choice.closed = True
        self._num_open -= 1
        if attempt is not None:
            attempt.num_open -= 1
            if not attempt.num_open:
                self._release(attempt)

    def _look_at(self, first: FirstPart) -> None:
        """Process what has come of a split's first part."""
        attempt = first.attempt
        code = first.look()
        if code is None and attempt.num_open:
            return
        self._firsts.remove(first)
        if code is None:
            attempt.first_token()
            if first.usage is not None:
                self._dispatcher.measured(attempt, first.usage)
        else:
            self._first_failed(first, code)
        self._dispatcher.end(attempt)

    def _first_failed(self, first: FirstPart, code: RefusalCode) -> None:
        """Place all anew, before the first token, because a split's first part is lost or refused."""
        attempt, lost = first.attempt, first.attempt.inflight.lost
        self._dispatcher.splits.failed()
        attempt.trace.failed(code.value if lost is None else "replica_lost")
        if lost is not None:
            self._dispatcher.num_lost += 1
        if code is RefusalCode.ENGINE_FAILED or (lost is not None and attempt.client.lost is not None):
            self._dispatcher.replica_died(attempt.client)
        if code is RefusalCode.MEDIA_MISSING:
            attempt.client.media.forget(self._generation.media)
        if self._visible:
            return
        if self._second is not None and self._second.first is first:
            second, self._second = self._second, None
            second.routed.close()
            self._placement.failed(attempt.replica_id, code, is_death=lost is not None)
            for index in second.choices:
                self._choices[index].tries.failed(is_death=lost is not None, has_survived=False)
        for each in self._attempts.copy():
            if each.first is first:
                self._abandon(each, code, failed=attempt)

    # What goes wrong.

    def _fail(
        self, attempt: Attempt, choice: ChoiceProgress, refusal: Refusal | None, *, visible: bool
    ) -> None:
        code = RefusalCode.INTERNAL if refusal is None else refusal.code
        is_refused = code in (RefusalCode.CONTEXT_LENGTH_EXCEEDED, RefusalCode.INVALID_REQUEST)
        if refusal is not None and is_refused and not self._may_ask_another(attempt, refusal):
            self._error = self._client_error(refusal, visible=visible)
            for index in range(len(self._choices)):
                self.abort_choice(index)
            return
        if code is RefusalCode.MEDIA_MISSING:
            attempt.client.media.forget(self._generation.media)
            self._num_missed += 1
            if self._num_missed > MAX_MISSED and not visible:
                self._error = Overloaded(
                    "The replicas cannot keep all images of this request at once. Send fewer or smaller"
                    " ones, or try again later.",
                    retry_after_seconds=self._dispatcher.retry_after_seconds(self._generation.model),
                )
                for index in range(len(self._choices)):
                    self.abort_choice(index)
                return
        if code is RefusalCode.ENGINE_FAILED:
            self._dispatcher.replica_died(attempt.client)
        if visible:
            self._unplace(attempt, choice, code, refusal)
        else:
            self._abandon(attempt, code, refusal)

    def _may_ask_another(self, attempt: Attempt, refusal: Refusal) -> bool:
        """Whether a server has refused what we have checked, and another can be asked. Once."""
        generation = self._generation
        if self._refused_by is not None or refusal.error is None or generation.submit.body:
            return False
        self._refused_by = attempt.replica_id
        exclude = {attempt.replica_id, *self._placement.patience.excluded}
        table = self._dispatcher.table
        return table.has_ready(generation.model, adapter=generation.adapter, exclude=exclude)

    def _abandon(
        self,
        attempt: Attempt,
        code: RefusalCode,
        refusal: Refusal | None = None,
        failed: Attempt | None = None,
    ) -> None:
        for index in attempt.choices:
            if self._choices[index].attempt is attempt:
                self._unplace(attempt, self._choices[index], code, refusal, failed)

    def _unplace(
        self,
        attempt: Attempt,
        choice: ChoiceProgress,
        code: RefusalCode,
        refusal: Refusal | None,
        failed: Attempt | None = None,
    ) -> None:
        """Take a choice from where it is, because `failed`, or that itself, has failed."""
        failed = failed or attempt
        is_death = failed.inflight.lost is not None or code is RefusalCode.ENGINE_FAILED
        if is_death and self._generation.submit.route:
            self._visible = True  # its server may have done it: what it does is not known, so once is enough
        self._placement.failed(failed.replica_id, code, is_death=is_death, refusal=refusal)
        choice.tries.failed(is_death=is_death, has_survived=failed.has_survived)
        attempt.trace.failed(code.value if failed.inflight.lost is None else "replica_lost")
        choice.attempt = None
        self._num_unplaced += 1
        attempt.num_open -= 1
        if not attempt.num_open:
            self._release(attempt)
        if len(choice.token_ids) >= self._generation.sampling.max_tokens:
            self._num_unplaced -= 1
            self._close_choice(choice)
            key = RequestKey(attempt.inflight.submit_id, self._choices.index(choice))
            self._cut_off.append(TokenDelta(key, finish_reason=FinishReason.LENGTH))

    # Where it goes.

    def _place(self) -> float | None:
        """Submit the parts that are at no replica. Returns None when all are placed, else the seconds until
        the next try, unless the run is woken before.

        Raises the client's error when attempts or patience run out.
        """
        placement = self._placement
        if self._visible and self._generation.submit.body:
            raise placement.give_up(is_visible=True)
        if self._upload is not None:
            if not self._upload.task.done():
                return LOOK_SECONDS
            self._end_upload(self._upload)
        if self._second is not None and self._second.first in self._firsts:
            self._look_at(self._second.first)
        if self._second is not None:
            if self._second.first in self._firsts:
                return LOOK_SECONDS
            self._go_second()
        seconds = placement.seconds_to_wait()
        if seconds > 0:
            return seconds
        while self._num_unplaced:
            # Choices of which the client has seen nothing go together, as they came: they share one prefill.
            part: Sequence[int] = range(len(self._choices))
            if self._visible or self._num_unplaced < len(part):
                part = [next(index for index in part if self._choices[index].is_unplaced)]
            first = self._choices[part[0]]
            if not placement.may_try(first, is_visible=self._visible):
                raise placement.give_up(is_visible=self._visible)
            routed = placement.route(
                len(self._generation.token_ids) + len(first.token_ids), num_choices=len(part)
            )
            if isinstance(routed, Obstacle):
                seconds = placement.wait(routed)
                if seconds <= 0:
                    raise placement.give_up(is_visible=self._visible)
                return seconds
            if not (self._generation.media and self._begin_upload(part, routed)):
                self._begin(part, routed)
            if self._upload is not None or self._second is not None:
                return LOOK_SECONDS
        placement.done()
        return None

    def _begin_upload(self, part: Sequence[int], routed: RoutedRequest) -> bool:
        """Begin an upload. False if the replica is known to have all media, or is gone."""
        media, lacking = self._generation.media, []
        for each in parts_of(routed):
            client = self._dispatcher.clients(each.decision.replica_id)
            if client is not None and not client.media.has(media):
                lacking.append(client.media)
        if not lacking:
            return False
        task = asyncio.create_task(send_to_all(lacking, self._generation.submit.root, media))
        task.add_done_callback(lambda _: self._mailbox.wake())
        self._upload = Upload(part, routed, task)
        return True

    def _end_upload(self, upload: Upload) -> None:
        """Submit the part that waited for it. Raises InvalidRequest for an unreadable image."""
        self._upload = None
        error = upload.error()
        part = [index for index in upload.part if self._choices[index].is_unplaced]
        if error is None and len(part) == len(upload.part) and self._may_try_at(upload.routed):
            self._begin(part, upload.routed)
            return
        upload.routed.close()
        if error is None:
            return
        if error.code is RefusalCode.INVALID_REQUEST and not self._visible:
            raise InvalidRequest(error.message)
        self._placement.failed(upload.routed.decision.replica_id, error.code, is_death=False)
        for index in part:
            self._choices[index].tries.begin()

    def _may_try_at(self, routed: RoutedRequest) -> bool:
        """A suspect may have been tried elsewhere, or another there, while the images were on their way."""
        suspects, suspected = self._dispatcher.suspects, self._placement.suspected
        return suspected is None or not (
            suspects.is_on_trial(suspected) or routed.decision.replica_id in suspects.places_taken()
        )

    def _begin(self, part: Sequence[int], routed: RoutedRequest) -> None:
        """Submit a part; of a split, both of it, or the first alone if the second needs what that says."""
        prefill = routed.prefill
        if prefill is None:
            self._submit(part, routed)
            return
        output = self._choices[part[0]].token_ids
        trace = self._trace.prefill(prefill.decision)
        sent = self._send(prefill, trace, lambda: self._first_submit_of(output, prefill, trace))
        if sent is None:
            routed.close()
            return
        routed.prefill = None  # it ends by itself
        attempt = self._attempt_of(prefill, *sent, (0,), trace)
        self._dispatcher.begin(attempt)
        card = self._dispatcher.table.card(attempt.replica_id)
        goes_first = card is not None and card.splits_by is SplitWay.NIXL
        first = FirstPart(attempt, self._dispatcher.clock(), goes_first=goes_first)
        self._firsts.append(first)
        if goes_first:
            self._second = SecondPart(part, routed, first)
        else:
            self._submit(part, routed, first)

    def _go_second(self) -> None:
        """Submit the second part of a split, whose first has ended, if it still has all its choices."""
        assert self._second is not None
        second, self._second = self._second, None
        if all(self._choices[index].is_unplaced for index in second.choices):
            self._submit(second.choices, second.routed, second.first)
        else:
            second.routed.close()

    def _send(
        self, routed: RoutedRequest, trace: Trace, submit: Callable[[], Submit]
    ) -> tuple[ReplicaClient, Inflight] | None:
        """Send what `submit` makes to its replica; None if that is not connected, and all is returned."""
        replica_id = routed.decision.replica_id
        client = self._dispatcher.clients(replica_id)
        try:
            if client is None:
                raise ReplicaLost(f"replica {replica_id} is not connected")
            inflight = client.submit(submit(), self._mailbox)
        except BaseException as error:
            routed.close()
            trace.failed("not_connected")
            trace.end()
            if not isinstance(error, ReplicaLost):
                raise
            self._placement.patience.excluded.add(replica_id)
            return None
        routed.sent(inflight.submit_id)
        return client, inflight

    def _submit(self, part: Sequence[int], routed: RoutedRequest, first: FirstPart | None = None) -> None:
        output = self._choices[part[0]].token_ids
        trace = self._trace.attempt(routed.decision, is_resumed=bool(output))
        sent = self._send(routed, trace, lambda: self._submit_of(part, output, routed, trace, first))
        if sent is None:
            return
        replica_id = routed.decision.replica_id
        self._placement.submitted(is_visible=self._visible)
        self.decision, self.decision_seconds = routed.decision, self._placement.routing_seconds
        suspected = self._placement.suspected
        trial = None if suspected is None else self._dispatcher.suspects.begin_trial(suspected, replica_id)
        attempt = self._attempt_of(routed, *sent, part, trace)
        attempt.trial, attempt.first = trial, first
        self._dispatcher.begin(attempt)
        self._attempts.append(attempt)
        self._num_unplaced -= len(part)
        for index in part:
            self._choices[index].attempt = attempt
            self._choices[index].tries.begin()

    def _attempt_of(
        self,
        routed: RoutedRequest,
        client: ReplicaClient,
        inflight: Inflight,
        part: Sequence[int],
        trace: Trace,
    ) -> Attempt:
        generation = self._generation
        return Attempt(
            routed,
            client,
            inflight,
            part,
            trace,
            model=generation.model,
            token_ids=generation.token_ids_with_images(),
            owner=generation.caller.owner,
        )

    def _first_submit_of(self, output: Sequence[int], routed: RoutedRequest, trace: Trace) -> Submit:
        """Build the submit of a split's first part: the prompt, and the output so far, for their KV alone."""
        whole = self._submit_of((0,), output, routed, trace)
        return replace(
            whole,
            sampling=ONE_TOKEN,
            num_output_tokens=0,
            leases=(),
            split_id=routed.announcement.announcement_id,
        )

    def _submit_of(
        self,
        part: Sequence[int],
        output: Sequence[int],
        routed: RoutedRequest,
        trace: Trace,
        first: FirstPart | None = None,
    ) -> Submit:
        """Build this attempt's submit: some choices of the generation, from the prompt and the output so
        far."""
        asked = self._generation.submit
        sampling, packed_tokens = asked.sampling, asked.packed_tokens
        if len(part) < asked.num_choices:
            # Choice i of a request samples with seed + i; alone it is choice 0 and brings its own seed.
            sampling = replace(sampling, seed=(sampling.seed + part[0]) % 2**64)
        if output:
            packed_tokens += pack_token_ids(output)
        pull, handover = None, b""
        if first is not None:
            pull = first.hint(routed, self._placement.seconds_left())
            handover = first.handover(self._dispatcher.clock())
        elif routed.decision.pull_from is not None:
            pull = self._pull_hint(routed.decision)
        return replace(
            asked,
            packed_tokens=packed_tokens,
            sampling=sampling,
            num_choices=len(part),
            num_output_tokens=len(output),
            announced_hashes=routed.announcement.block_hashes,
            announced_points=routed.announcement.points,
            announcement_id=routed.announcement.announcement_id,
            num_expected_tokens=len(packed_tokens) // 4 - routed.decision.overlap_tokens,
            pull=pull,
            handover=handover,
            request_id=self._trace.request_id,
            trace_parent=trace.trace_parent,
            trace_state=trace.trace_state,
        )

    def _pull_hint(self, decision: Decision) -> PullHint | None:
        """Return the peer to pull from, if it is still connected, even if it is leaving."""
        assert decision.pull_from is not None
        peer = self._dispatcher.clients(decision.pull_from)
        if peer is None or peer.epoch is None:
            return None
        return PullHint(peer.replica_id, peer.epoch, peer.address, decision.overlap_tokens)

    def _client_error(self, refusal: Refusal, *, visible: bool) -> RouterError:
        relays = bool(self._generation.submit.body)
        if visible and not relays:  # a resumed part of what another replica had accepted
            return GenerationFailed(f"The generation could not be continued: {refusal.message}")
        if refusal.error is not None:
            return self._placement.refused(refusal)
        if refusal.code is RefusalCode.CONTEXT_LENGTH_EXCEEDED:
            return ContextLengthExceeded(refusal.message)
        return InvalidRequest(refusal.message)

    # What is given back.

    def _release(self, attempt: Attempt) -> None:
        self._attempts.remove(attempt)
        self._dispatcher.end(attempt)

    def _close(self) -> None:
        if self._upload is not None:
            upload, self._upload = self._upload, None
            upload.give_up()
        if self._second is not None:
            self._second.routed.close()
            self._second = None
        for first in self._firsts:
            self._dispatcher.end(first.attempt)
        self._firsts.clear()
        for attempt in self._attempts.copy():
            self._release(attempt)
        self._placement.close()
        self._listener = self._mailbox.listener = None  # they lead back here, in a circle
        self._num_open = self._num_unplaced = 0
        self._trace.end()
        self._dispatcher.num_running -= 1
