"""Decides what the next step computes. It knows requests and pages, but no device, clock, thread or model.

There are no phases. A request has tokens, and the keys and values of some of them are computed; the scheduler gives it
tokens of a step until both numbers agree, and the step that computes the last one samples the next. A prompt's chunk,
a running row, and a preempted request that starts again are the same.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers_neuronx.errors import InputError, QueueFullError
from transformers_neuronx.serving.adapters import Adapters
from transformers_neuronx.serving.drafting import Drafting
from transformers_neuronx.serving.kv_cache import Copy, Found, KVCache
from transformers_neuronx.serving.limits import Limits, Room
from transformers_neuronx.serving.request import Request


@dataclass(slots=True)  # frozen, one would take three times as long to make, and each row of a step has one
class Work:
    """Compute `count` tokens of a request from position `start` on, and sample after the last `samples` of them.

    If they reach the end of what is known, the next token is sampled. The last one may then be pending: sampled in the
    step before, and known to the devices alone. Or `guesses` draft tokens come after it, with one more sample for each.
    There was `room` for so many. With `rounds`, what is sampled is computed in the same step, and samples again,
    until there are so many. After the first `scored` tokens, log-probabilities of those that follow in the prompt are
    kept. `preempted` is how often the request had lost its pages when it was planned.
    """

    request: Request
    start: int
    count: int
    samples: int
    guesses: int = 0
    room: int = 0
    rounds: int = 1
    scored: int = 0
    preempted: int = 0

    def with_guesses(self, guesses: int) -> Work:
        """Return the same work with this number of draft tokens."""
        more = guesses - self.guesses
        return replace(self, count=self.count + more, samples=self.samples + more, guesses=guesses)

    @property
    def tokens(self) -> list[int]:
        """The tokens that are computed, without the last one if it is pending."""
        known = self.request.tokens[self.start : self.start + self.count]
        return known + self.request.guesses[: self.guesses] if self.guesses else known

    @property
    def end(self) -> int:
        """The length of the sequence when its last token was first known, whenever it is computed."""
        return max(self.request.prompt_length, self.start + self.count)

    @property
    def may_run_on(self) -> bool:
        """Whether there can be several rounds: it computes a generated token alone, and samples."""
        return bool(self.samples) and self.count == 1 and not self.of_prompt and self.request.may_run_on

    @property
    def goes_on(self) -> bool:
        """Whether it computes one generated token, which only the devices know, and samples once."""
        return self.count == self.samples == self.rounds == 1 and self.start >= len(self.request.tokens)

    @property
    def of_prompt(self) -> bool:
        return self.start < self.request.prompt_length

    @property
    def pools(self) -> bool:
        """Whether last hidden states are read instead of sampling."""
        return self.request.pooling is not None


class Scheduler:
    """Requests that wait, and those that run, in order: by priority, then first come, first served.

    `overlaps` tells whether the next step may be planned before the results of the last one are known.
    """

    def __init__(self, cache: KVCache, limits: Limits, adapters: int = 0) -> None:
        self.cache, self.limits = cache, limits
        self.adapters = Adapters(adapters)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.waiting_tokens = 0
        self.preemptions = 0
        self.drafting = Drafting(limits.costs)
        self.overlaps = True
        self.copies: list[Copy] = []  # pages that must be copied, in order, before the step

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        """Let a request wait. Raises InputError if it can never run, and QueueFullError if too much is waiting."""
        limits, length = self.limits, request.prompt_length
        most = min(limits.positions, self.cache.longest(limits.tokens))
        if not length:
            raise InputError("the prompt is empty")
        if request.longest > most:
            raise InputError(
                f"a prompt of {length} tokens and max_tokens={request.params.max_tokens} need {request.longest} "
                f"positions, but the engine has {most}: shorten the prompt, or lower max_tokens"
            )
        waiting, tokens = len(self.waiting), self.waiting_tokens
        if waiting >= limits.waiting or (waiting and tokens + length > limits.waiting_tokens):
            raise QueueFullError(f"{waiting} requests with {tokens} tokens are waiting: submit the request later")
        self.cache.name(request)
        self._wait(request)

    def abort(self, request: Request, reason: str = "abort") -> None:
        """End a request, wherever it is. One that has ended stays as it is."""
        if request.reason is None:
            request.reason = reason
            self._leave(request)

    def schedule(self) -> list[Work]:
        """Return the work of the next step; empty if nothing can run. Running rows come first, then prompts' chunks.

        At most one prompt is in chunks at a time. If there are too few pages, requests that come later in order lose
        theirs, and start again. The next step may be planned before the results of this one are known: its tokens count
        as computed from now on, as steps run in order.

        Unless the last step `overlaps`, a request is in no step before the results of its last one are known. With
        draft tokens, its work has room for as many `guesses` as it may have; whoever has fewer calls `with_guesses`.
        """
        self._give_way()
        self.copies, self.adapters.loads = [], []
        step: list[Work] = []
        generating = any(request.computed >= request.prompt_length for request in self.running)
        room = Room(self.limits.joined, self.limits.doubled) if generating else Room(self.limits.tokens)
        planned = [(request, self._missing(request)) for request in self.running]
        room.left -= sum(missing == 1 for _, missing in planned)
        preemptions = self.preemptions
        for request, missing in planned:
            if self.preemptions > preemptions and request not in self.running:
                continue  # it was preempted by one before it
            start = request.computed
            count = 1 if missing == 1 else min(missing, self._longest_chunk(request, start, room))
            if count and self._reserve(request, start + count, step):
                step.append(self._work(request, count))
                if missing > 1:
                    room.take(start, count)
        if self.waiting and not any(work.scored for work in step) and not any(map(self._in_chunks, self.running)):
            self._admit(step, room)
        if self.limits.guesses:
            step = self._with_room_for_guesses(step)
        if self.overlaps and self.limits.rounds > 1 and not self.waiting and all(work.may_run_on for work in step):
            step = [self._with_rounds(work) for work in step]
            if self.limits.guesses:
                self.drafting.passed(max((work.rounds for work in step), default=1) - 1)
        for work in step:
            work.request.pending += work.rounds if work.samples else 0
            if work.of_prompt:
                self.cache.publish(work.request)  # from the next step on, others may read what this one writes
        return sorted(step, key=lambda work: work.count > 1)

    def update(self, step: list[Work], sampled: Mapping[int, Sequence[int]]) -> list[Request]:
        """Record the tokens that a step sampled, by the id of the request. Return the requests that ended."""
        ended: list[Request] = []
        for work in (work for work in step if work.samples or work.pools):
            request = work.request
            if work.pools:
                again = work.preempted != request.preempted  # while the step ran: its sum starts again
                if request.reason is None and not again and work.start + work.count == request.prompt_length:
                    request.reason = "stop"
                    self._leave(request)
                    ended.append(request)
            elif request.reason is None:  # otherwise it ended while the step ran
                verified = len(request.guesses)  # none if it was preempted while the step ran
                right = request.accept(sampled[request.id], work.rounds)
                if work.room:
                    request.odds = self.drafting.noted(request.odds, verified, right)
                if verified and len(request.places) > 1:
                    _keep_states(work, right)
                if request.reason is not None:
                    self._leave(request)
                    ended.append(request)
        return ended

    def took(self, step: list[Work], seconds: float) -> None:
        """Take note how long a step took."""
        if self.drafting.costs and not any(work.of_prompt for work in step):
            tokens, drafted = sum(work.count for work in step), any(work.room for work in step)
            self.drafting.took(tokens, drafted, seconds / max(work.rounds for work in step))

    def _work(self, request: Request, count: int) -> Work:
        """Plan the next `count` tokens of a request, for which it has pages."""
        start, end = request.computed, request.computed + count
        scored = max(min(end, request.prompt_length - 1) - start, 0) if request.scores else 0
        request.computed = end
        samples = int(end == request.known and request.pooling is None)
        return Work(request, start, count, samples, scored=scored, preempted=request.preempted)

    def _longest_chunk(self, request: Request, start: int, room: Room) -> int:
        """Return the most tokens of a prompt from position `start` on in a step that has this room."""
        chunk = room.tokens(start)
        if request.scores:
            others = sum(each is not request for each in self.running)  # each may sample
            chunk = min(chunk, self.limits.samples - others)
        return chunk

    def _with_room_for_guesses(self, step: list[Work]) -> list[Work]:
        """Give running rows room for draft tokens, while the step takes at most 2.5 times as long as a short one.

        The next step has the room if the last tokens of some rows are not known yet.
        """
        drafting = [work for work in step if work.samples and not work.of_prompt]
        tokens, logits = sum(work.count for work in step), sum(work.samples + work.scored for work in step)
        most = min(self.limits.joined - tokens, self.limits.samples - logits) // max(len(drafting), 1)
        left = (work.request.params.max_tokens - work.request.generated - work.request.pending for work in drafting)
        rooms = [max(int(min(self.limits.guesses, most, each - 1)), 0) for each in left]
        counts = self.drafting.counts(tokens, [work.request.odds for work in drafting], rooms)
        self.overlaps = not self.drafting.pays
        if self.overlaps or any(work.request.pending for work in drafting):
            return step
        more = {work.request.id: count for work, count in zip(drafting, counts, strict=True)}
        return [self._with_guesses(work, more.get(work.request.id, 0)) for work in step]

    def _with_guesses(self, work: Work, most: int) -> Work:
        """Make room for up to `most` draft tokens, as far as there are free pages for them."""
        if not most:
            return work
        request, end = work.request, work.start + work.count
        guesses = max(int(min(most, self.cache.room(request) - end)), 0)
        self.cache.grow(request, end + guesses)
        return replace(work.with_guesses(guesses), room=guesses)

    def _with_rounds(self, work: Work) -> Work:
        """Let a running row generate several tokens in the step, as far as there are free pages for them."""
        request = work.request
        left = request.params.max_tokens - request.generated - request.pending
        rounds = max(int(min(self.limits.rounds, left, self.cache.room(request) - work.start)), 1)
        self.cache.grow(request, work.start + rounds)
        request.computed += rounds - 1
        return replace(work, rounds=rounds)

    def _missing(self, request: Request) -> int:
        """Number of tokens that are not computed, up to the end of the prompt or of the sequence.

        Tokens of a prompt and generated ones are computed in different ways, so that the bits of both stay the same
        when a request starts again.
        """
        last = request.generated + request.pending >= request.params.max_tokens
        several = not self.overlaps or (request.penalizes and request.pending > 1)
        if request.pending and (last or several):
            return 0  # its last token is on the way, or several are that a step must know
        end = request.prompt_length if request.computed < request.prompt_length else request.known
        return end - request.computed

    def _in_chunks(self, request: Request) -> bool:
        """Whether more than its next token must be computed after the steps that were planned."""
        return request.computed < request.prompt_length or self._missing(request) > 1

    def _give_way(self) -> None:
        """Preempt requests of lower priority than the first that waits, until that one can start."""
        while self.waiting and self.running:
            first, last = self.waiting[0], self.running[-1]
            if last.params.priority <= first.params.priority or self._fits(first):
                return
            self._preempt(last)

    def _admit(self, step: list[Work], room: Room) -> None:
        """Start requests that wait, in order, while the step has room for their tokens and there are pages.

        One whose adapter finds no place waits for a place, and so do all later ones with adapters: they would keep
        places busy, and it would wait for ever.
        """
        coming, places = self._coming(), True
        for request in list(self.waiting):
            if room.left <= 0:
                return
            found = self.cache.found(request)
            chunk = self._longest_chunk(request, found.positions, room)
            if coming and set(request.digests[found.full :]) & coming:
                continue  # it takes these pages when they are there; others may pass
            if (end := self._end_of_first_chunk(request, found, chunk)) is None:
                return
            places = places and self._has_place(request)
            if request.adapter and not places:
                continue
            self._start(request, found)
            self._reserve(request, end, step)
            if found.copied:
                targets = (table[found.full] for table in request.tables)
                self.copies.append(tuple(zip(found.copied, targets, strict=True)))
            step.append(self._work(request, end - request.computed))
            room.take(found.positions, step[-1].count)
            if end < request.prompt_length or request.scores:
                return
            coming = self._coming()

    def _has_place(self, request: Request) -> bool:
        return request.adapter is None or self.adapters.placed(
            request.adapter, busy={each.adapter for each in self.running}
        )

    def _coming(self) -> set[bytes]:
        """Return the digests of pages that prompts in this step or in chunks are about to fill."""
        prompts = (request for request in self.running if request.computed < request.prompt_length)
        return {digest for request in prompts for digest in request.digests[request.published :]}

    def _fits(self, request: Request) -> bool:
        return self._end_of_first_chunk(request, self.cache.found(request), self.limits.tokens) is not None

    def _end_of_first_chunk(self, request: Request, found: Found, chunk: int) -> int | None:
        """Return where the first chunk of a prompt ends; None if there are too few rows or pages to start it."""
        whole = request.prompt_length if found.positions < request.prompt_length else request.known
        end = min(whole, found.positions + chunk)
        growing = sum(not self.cache.is_whole(each) for each in self.running)  # these will soon need a page each
        return end if len(self.running) < self.limits.rows and self.cache.fits(found, end, growing) else None

    def _start(self, request: Request, found: Found) -> None:
        self.waiting.remove(request)
        self.waiting_tokens -= request.prompt_length
        self.cache.start(request, found)
        request.computed = found.positions
        if not request.preempted:
            request.cached = request.computed
        insort(self.running, request, key=lambda each: each.order)

    def _reserve(self, request: Request, positions: int, step: list[Work]) -> bool:
        """Give a request pages for this many positions. Those after it in order, and not in the step, may lose theirs.

        If that is not enough, the request keeps what it has until the next step.
        """
        self.cache.leave_behind(request, request.computed)
        while not self.cache.grow(request, positions):
            busy = {work.request.id for work in step}
            last = next(each for each in reversed(self.running) if each.id not in busy)
            if last is request:
                return False
            self._preempt(last)
        return True

    def _preempt(self, request: Request) -> None:
        """Take a request's pages away. It waits, and computes all of its tokens again."""
        self.running.remove(request)
        self.cache.release(request)
        request.computed, request.guesses, request.pooled = 0, [], 0.0
        request.preempted += 1
        self.preemptions += 1
        self._wait(request)

    def _wait(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda each: each.order)
        self.waiting_tokens += request.prompt_length

    def _leave(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
            self.waiting_tokens -= request.prompt_length
        elif request in self.running:
            self.running.remove(request)
            self.cache.release(request)


def _keep_states(work: Work, right: int) -> None:
    """Keep the states after a step whose first `right` draft tokens were right: those that it wrote, if all were.

    Otherwise those before it stay, and its tokens are computed once more.
    """
    if right == work.guesses:
        work.request.places.reverse()
    else:
        work.request.computed = work.start
