"""The engine: in every round some tokens of prompts are read and one token, or a few, is drawn for every answer."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import accumulate

import torch
from torch import Tensor

from palimpsest.config import InputError
from palimpsest.engine.batches import Batch, Cost, Reading, free_bytes, regroup
from palimpsest.engine.drafts import DraftModel, settled
from palimpsest.engine.gauges import Gauges
from palimpsest.engine.passes import forward
from palimpsest.engine.prefixes import BLOCK, Node, PrefixCache
from palimpsest.engine.request import Answer, Piece, Reason, Request, Ticket
from palimpsest.model import Model
from palimpsest.state import State
from palimpsest.tokenizer import Tokenizer

HEADROOM = 64  # tokens that must fit behind every sequence when another one comes in


class ContextExceeded(InputError):
    """A prompt that leaves no room for an answer."""


class Engine:
    """Answers requests, first come first served, within a budget of memory.

    One thread calls `step`; `submit` and `cancel` may be called from any. `memory_bytes` bounds what running sequences
    hold, spare room included; while sequences move between batches there is a second copy of some. `cache_bytes` bounds
    remembered beginnings in memory, `disk_bytes` those that had to leave it. `read_tokens` are read per round beside the
    drawing, so that a long prompt does not hold up the others for long. `guess_tokens` above 0 turns on guesses (drafts.py),
    at most so many at a time, from the text itself or from `draft`.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        memory_bytes: int | None = None,
        cache_bytes: int = 0,
        context_tokens: int | None = None,
        read_tokens: int = 256,
        most_running: int = 64,
        guess_tokens: int = 0,
        draft: DraftModel | None = None,
        disk_bytes: int = 0,
    ) -> None:
        self.model, self.tokenizer, self.draft = model.eval(), tokenizer, draft
        if draft is not None:
            draft.check(tokenizer)
        self.device = model.embed_tokens.weight.device
        self.memory_bytes = free_bytes(self.device) // 2 if memory_bytes is None else memory_bytes
        self.cost = Cost(model, None if draft is None else draft.model, guess_tokens)
        empty = model.new_state(1)
        self._recurrent = empty.num_bytes() > 0
        self.context_tokens = self._context(context_tokens)
        self.read_tokens, self.most_running, self.guess_tokens = read_tokens, most_running, guess_tokens
        self.prefixes = PrefixCache(cache_bytes, empty, disk_bytes)
        self.inbox: deque[Ticket] = deque()
        self.waiting: deque[Reading] = deque()
        self.reading: list[Reading] = []
        self.batches: list[Batch] = []
        self.counts: Counter[str] = Counter()
        self.watched: Ticket | None = None  # whose gauges the next pass notes, once
        self._tickets: list[Ticket] = []

    # From any thread.

    def check(self, request: Request) -> None:
        """InputError for a prompt that is empty, foreign or too long, for too many answers, and for unknown tokens."""
        size, limit = len(request.prompt), self.context_tokens
        if not size:
            raise InputError("the prompt is empty; give at least one token")
        top = self.model.config.vocab_size - 1
        wrong = next((token for token in request.prompt if not 0 <= token <= top), None)
        if wrong is not None:
            raise InputError(f"the prompt holds token {wrong}; this model's vocabulary is 0..{top}")
        if limit is not None and size >= limit:
            raise ContextExceeded(f"the prompt has {size} tokens and the context {limit}; shorten the prompt")
        if request.n > self.most_running or self.cost.of([size + 1] * request.n) > self.memory_bytes:
            raise InputError(f"n is {request.n}: so many answers do not fit; ask for fewer at a time")
        outside = next((token for token in request.logit_bias if not 0 <= token < self.tokenizer.vocab_size), None)
        if outside is not None:
            raise InputError(f"logit_bias names token {outside}; the tokens are 0..{self.tokenizer.vocab_size - 1}")

    def submit(self, request: Request, deliver: Callable[[Piece], None]) -> Ticket:
        """Queues a request, after `check`. `deliver` is called with every piece of its answers and must not raise."""
        self.check(request)
        size, limit = len(request.prompt), self.context_tokens
        ticket = Ticket(request, deliver)
        room = request.sampling.max_new_tokens if limit is None else min(request.sampling.max_new_tokens, limit - size)
        ticket.answers = [
            Answer(self.model, self.tokenizer, ticket, index, room, self.guess_tokens) for index in range(request.n)
        ]
        self.inbox.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """The request's answers end in the next round."""
        ticket.cancelled = True

    # From the engine's thread.

    @property
    def idle(self) -> bool:
        return not (self.inbox or self.waiting or self.reading or self.batches)

    @property
    def running(self) -> int:
        """Answers that hold memory."""
        return sum(len(batch.answers) for batch in self.batches) + sum(len(each.answers) for each in self.reading)

    @property
    def queued(self) -> int:
        """Requests that wait for memory."""
        return len(self.inbox) + len(self.waiting)

    def held_bytes(self, kind: str | None = None) -> int:
        """Bytes of the running states; kinds as in `State.num_bytes`."""
        # Other threads ask too, while a round goes on.
        states = [state for batch in self.batches for state in (batch.state, batch.draft) if state is not None]
        states += [state for each in list(self.reading) if (state := each.state) is not None]
        return sum(state.num_bytes(kind) for state in states)  # type: ignore[arg-type]

    @torch.inference_mode()
    def step(self) -> bool:
        """One round; False when there was nothing to do."""
        while self.inbox:
            ticket = self.inbox.popleft()
            self._tickets.append(ticket)
            self.waiting.append(Reading(ticket, ticket.answers, list(ticket.request.prompt)))
        if self.idle:
            return False
        self._heed_cancelled()
        self._give_way()
        self._admit()
        for batch in self.batches:
            self._draw(batch)
        self._read()
        self.batches = [batch for batch in self.batches if batch.answers]
        self._tickets = [ticket for ticket in self._tickets if not ticket.done]
        return True

    def run(self, requests: Iterable[Request]) -> list[list[Answer]]:
        """The answers to all requests, for callers without a thread of their own."""
        tickets = [self.submit(request, lambda piece: None) for request in requests]
        while self.step():
            pass
        return [ticket.answers for ticket in tickets]

    def fail_all(self, error: str) -> None:
        """Ends everything after a mistake of the engine itself; it can go on with new requests."""
        for ticket in [*self._tickets, *self.inbox]:
            for answer in ticket.answers:
                if answer.reason is None:
                    self._deliver(answer, answer.end("failed", error))
        self.inbox.clear()
        self.waiting.clear()
        self.reading, self.batches, self._tickets = [], [], []

    def _context(self, asked: int | None) -> int | None:
        config = self.model.config
        limits = [self.cost.longest(self.memory_bytes)]
        if config.position != "none":
            limits.append(config.max_position_embeddings)
        known = [limit for limit in (*limits, asked) if limit is not None]
        if known and min(known) < 2:
            raise InputError(f"memory: {self.memory_bytes} bytes hold no sequence of this model; give more")
        if self.cost.fixed_bytes > self.memory_bytes:
            raise InputError(f"memory: {self.memory_bytes} bytes; one sequence of this model needs {self.cost.fixed_bytes}")
        return min(known, default=None)

    # Who takes part.

    def _heed_cancelled(self) -> None:
        for ticket in self._tickets:
            if ticket.cancelled:
                for answer in ticket.answers:
                    if answer.reason is None:
                        self._deliver(answer, answer.end("cancelled"))
        for batch in self.batches:
            batch.leave()
        self.batches = [batch for batch in self.batches if batch.answers]
        self.reading = [each for each in self.reading if not each.ticket.done]
        self.waiting = deque(each for each in self.waiting if not each.ticket.done)

    def _lengths(self) -> list[int]:
        """Tokens of everything that runs, prompts at their full length."""
        lengths = [length for batch in self.batches for length in batch.state.lengths]
        return lengths + [len(each.ids) for each in self.reading for _ in each.answers]

    def _give_way(self) -> None:
        """While the next tokens would not fit, the newest answer leaves; it is read again when there is room."""
        while self.batches and self.running > 1:
            if self.cost.of([length + 1 for length in self._lengths()]) <= self.memory_bytes:
                return
            self.counts["preempted"] += 1
            if self.reading:  # prompts that are being read came last
                last = self.reading.pop()
                last.state, last.done = None, 0
                self.waiting.appendleft(last)
                continue
            batch, row = max(
                ((batch, row) for batch in self.batches for row in range(len(batch.answers))),
                key=lambda place: place[0].answers[place[1]].arrival,
            )
            answer = batch.answers[row]
            batch.keep([other for other in range(len(batch.answers)) if other != row])
            self.batches = [each for each in self.batches if each.answers]
            self.waiting.appendleft(Reading(answer.ticket, [answer], list(answer.ids)))

    def _admit(self) -> None:
        while self.waiting:
            first = self.waiting[0]
            lengths = [length + HEADROOM for length in (*self._lengths(), *[len(first.ids)] * len(first.answers))]
            crowded = self.running + len(first.answers) > self.most_running or self.cost.of(lengths) > self.memory_bytes
            if self.running and crowded:
                return
            self.waiting.popleft()
            for answer in first.answers:
                self.counts["admitted"] += 1
                answer.arrival = self.counts["admitted"]
            self._recall(first)
            self.reading.append(first)

    def _recall(self, reading: Reading) -> None:
        """Starts a reading where the longest remembered beginning ends."""
        node, reading.state, reading.hidden = self.prefixes.recall(reading.ids)
        reading.node, reading.done = node, node.end
        if reading.answers[0].row.token_ids:
            return  # a text that gave way is no prompt
        reading.ticket.cached_tokens = node.end
        self.counts["prompt_tokens"] += len(reading.ids)
        self.counts["cached_tokens"] += node.end

    # Reading.

    def _read(self) -> None:
        """One packed pass over the next tokens of the prompts at the head of the line."""
        room, chosen = self.read_tokens, []
        for reading in self.reading:
            start = reading.done
            end = min(len(reading.ids), start + room, (start // BLOCK + 1) * BLOCK)
            if end > start:
                chosen.append((reading, end))
                room -= end - start
            if room == 0:
                break
        if chosen:
            self._read_pass(chosen)
        finished = [reading for reading in self.reading if reading.done == len(reading.ids)]
        self.reading = [reading for reading in self.reading if reading.done < len(reading.ids)]
        if finished:
            self._begin(finished)

    def _read_pass(self, chosen: list[tuple[Reading, int]]) -> None:
        pieces = [reading.ids[reading.done : end] for reading, end in chosen]
        states = [self.model.new_state() if reading.state is None else reading.state for reading, _ in chosen]
        for reading, _ in chosen:
            reading.state = None  # one copy of a long past is enough
        hidden, state = forward(self.model, pieces, State.join(states))
        for row, ((reading, end), last) in enumerate(zip(chosen, accumulate(map(len, pieces)), strict=True)):
            reading.done, reading.hidden = end, hidden[last - 1]
            reading.state = state if len(chosen) == 1 else state.select([row])
            if end == len(reading.ids) or end % BLOCK == 0:
                reading.node = self._remember(reading.node, reading.ids, reading.state, 0, reading.hidden)

    def _remember(self, node: Node | None, ids: list[int], state: State, row: int, hidden: Tensor) -> Node | None:
        """Damaged memory is never handed on: what is not finite is not remembered."""
        if self.prefixes.budget_bytes == 0 or not bool(hidden.isfinite().all()):
            return node
        return self.prefixes.add(node or self.prefixes.root, ids, state, row, hidden)

    def _begin(self, finished: list[Reading]) -> None:
        """First tokens of answers whose prompts have been read, from one pass however many answers."""
        logits = self.model.logits(torch.stack([each.hidden for each in finished if each.hidden is not None])).cpu()
        arrived = []
        for reading, scores in zip(finished, logits, strict=True):
            for answer in reading.answers:
                answer.node = reading.node
                self._take(answer, scores)
            alive = [answer for answer in reading.answers if answer.reason is None]
            if alive and reading.state is not None:
                state = reading.state if len(alive) == 1 else reading.state.select([0] * len(alive))
                draft = None if self.draft is None else self.draft.new_state(len(alive))
                arrived.append(Batch(alive, state, draft))
        if arrived:
            self.batches = regroup([*(batch for batch in self.batches if batch.answers), *arrived], self._grows)

    @property
    def _grows(self) -> bool:
        return self.cost.bytes_per_token > 0

    # Drawing.

    def _draw(self, batch: Batch) -> None:
        """One pass: every answer's unread tokens, and behind them its guesses."""
        before = batch.state
        unread = [answer.ids[length:] for answer, length in zip(batch.answers, before.lengths, strict=True)]
        known = [len(answer.ids) for answer in batch.answers]
        guesses, trail = self._guesses(batch)
        pieces = [new + guess for new, guess in zip(unread, guesses, strict=True)]
        watched = next((row for row, answer in enumerate(batch.answers) if answer.ticket is self.watched), None)
        if watched is None:
            hidden, batch.state = forward(self.model, pieces, before)
        else:
            with Gauges(self.model) as gauges:
                hidden, batch.state = forward(self.model, pieces, before)
            batch.answers[watched].ticket.gauges = gauges.at(sum(map(len, pieces[: watched + 1])) - 1)
            self.watched = None
        # The places whose logits are wanted: the last unread token of every row, and its guesses.
        ends = list(accumulate(map(len, pieces)))
        places = [list(range(end - len(guess) - 1, end)) for end, guess in zip(ends, guesses, strict=True)]
        wanted = hidden if len(hidden) == len(batch.answers) else hidden[[place for row in places for place in row]]
        logits = self.model.logits(wanted).cpu().split([len(row) for row in places])
        lengths, right = [], []
        for row, answer in enumerate(batch.answers):
            right.append(self._check(answer, logits[row], guesses[row]))
            lengths.append(self._sound(before.lengths[row], len(unread[row]), len(guesses[row]), right[row]))
        batch.state = batch.state.rewind(before, lengths)
        if trail:
            batch.draft = settled(trail, [ids + true for ids, true in zip(known, right, strict=True)])
        for row, answer in enumerate(batch.answers):
            new = lengths[row] - before.lengths[row]
            at_an_end = answer.reason is not None or lengths[row] % BLOCK == 0
            if new and at_an_end and answer.reason != "failed":
                seen = hidden[places[row][0] + new - len(unread[row])]
                answer.node = self._remember(answer.node, answer.ids, batch.state, row, seen)
        batch.leave()

    def _guesses(self, batch: Batch) -> tuple[list[list[int]], list[State]]:
        """At most `guess_tokens` for every answer; and a draft model's states on the way."""
        if self.draft is None or batch.draft is None:
            return [answer.lookup.guess(answer.ids, answer.room - 1) for answer in batch.answers], []
        return self.draft.guess(batch.answers, batch.draft, self.read_tokens)

    def _check(self, answer: Answer, logits: Tensor, guess: list[int]) -> int:
        """Draws at every place until a guess is wrong; returns how many were right."""
        right = 0
        while True:
            self._take(answer, logits[right])
            if answer.reason is not None or right == len(guess) or answer.ids[-1] != guess[right]:
                break
            right += 1
        if guess:
            self.counts["guessed_tokens"] += len(guess)
            self.counts["right_tokens"] += right
            answer.lookup.learn(len(guess), right, len(answer.ids))
        return right

    def _sound(self, before: int, unread: int, guessed: int, right: int) -> int:
        """The length up to which a row's new state is of its text. A recurrent memory cannot forget a wrong guess: it goes
        back to before the pass, and what was right is read again with the next token."""
        if right == guessed:
            return before + unread + guessed
        return before if self._recurrent else before + unread + right

    def _take(self, answer: Answer, logits: Tensor) -> None:
        piece = answer.draw(logits)
        if piece is not None:
            self._deliver(answer, piece)

    def _deliver(self, answer: Answer, piece: Piece) -> None:
        reason: Reason | None = piece.finish_reason
        if reason is not None:
            self.counts[f"ended_{reason}"] += 1
            self.counts["completion_tokens"] += len(answer.row.token_ids)
        answer.ticket.deliver(piece)
