"""Who runs next: admission, chunked prefill beside decode, preemption. Pure policy.

A step computes one token of every decoding sequence and at most `max_prefill_tokens` tokens of
prompts. Sequences are admitted in order of arrival when the pages for their whole prompt are
there; one whose prompt goes on with a page that another is computing right now waits for that
page instead of computing it as well. When decoding needs a page and none is left, the sequence
admitted last gives its pages back and is computed again later; so the oldest always advances and
every sequence ends.

Must not know: torch, sockets, tokens' meaning.
"""

from collections import deque

from handler.runner.kv_cache import PagePool
from handler.runner.sequence import Chunk, Sequence, State


class Scheduler:
    """Keeps the waiting and the running sequences and picks what each step computes."""

    def __init__(self, pool: PagePool, max_batch_size: int, max_prefill_tokens: int) -> None:
        self.pool = pool
        self.max_batch_size = max_batch_size
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It must fit the pool on its own (the engine has checked)."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is, and free its pages."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        self.pool.release(sequence)
        sequence.state = State.FINISHED

    def schedule(self) -> list[Chunk]:
        """What to compute now: chunks of one token first, shortest context first; then the rest.

        Attention takes rows of like length together, so that a long context costs itself only.
        """
        num_preemptions = self.num_preemptions
        chunks, budget = self._advance_running()
        if self.num_preemptions == num_preemptions:
            chunks += self._admit(budget)
        return sorted(chunks, key=_place)

    def complete(self, chunks: list[Chunk]) -> None:
        """Record that a step computed these chunks."""
        for chunk in chunks:
            if chunk.sequence.state is State.RUNNING:
                chunk.sequence.num_computed = chunk.end
                self.pool.enter_prefix(chunk.sequence)

    def _advance_running(self) -> tuple[list[Chunk], int]:
        """Chunks of the running sequences, oldest first, and the prompt tokens left to give."""
        chunks: list[Chunk] = []
        budget = self.max_prefill_tokens
        for sequence in list(self.running):
            if sequence.state is not State.RUNNING:
                continue  # preempted a moment ago for an older one
            decoding = sequence.num_uncomputed == 1
            length = 1 if decoding else min(sequence.num_uncomputed, budget)
            if length and self._make_room(sequence, sequence.num_computed + length):
                chunks.append(Chunk(sequence, sequence.num_computed, length))
                budget -= 0 if decoding else length
        return chunks, budget

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Preempt from the newest on until the pages are there; False: it was the newest itself."""
        while not self.pool.grow(sequence, num_tokens):
            newest = self.running[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _admit(self, budget: int) -> list[Chunk]:
        """Start waiting sequences while the token budget, the pages and the batch allow."""
        chunks: list[Chunk] = []
        in_progress = {self.pool.next_prefix(s) for s in self.running if s.num_uncomputed > 1}
        for sequence in list(self.waiting):
            if budget == 0 or len(self.running) == self.max_batch_size:
                break
            if not sequence.wants_prompt_logprobs:
                self.pool.reuse_prefix(sequence)
                following = self.pool.next_prefix(sequence)
                if following is not None and following in in_progress:
                    self.pool.release(sequence)
                    continue
                in_progress.add(following)
            if not self.pool.grow(sequence, len(sequence.tokens)):
                self.pool.release(sequence)
                break
            chunks.append(self._start(sequence, budget))
            budget -= chunks[-1].length
        return chunks

    def _start(self, sequence: Sequence, budget: int) -> Chunk:
        """Move a sequence that has its pages from waiting to running; its first chunk."""
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.state = State.RUNNING
        sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        return Chunk(sequence, sequence.num_computed, min(sequence.num_uncomputed, budget))

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence)
        sequence.state = State.WAITING
        sequence.prompt_logprobs.clear()
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1


def _place(chunk: Chunk) -> tuple[bool, int]:
    """Sort key: single tokens by context length, then the longer chunks as they came."""
    return (True, 0) if chunk.length > 1 else (False, chunk.end)
