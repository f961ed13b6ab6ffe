"""Turns protocol messages into sequences and the engine's progress into events.

Keeps which worker asked for what, and sees to it that each accepted request gets exactly one
terminal event, whatever goes wrong in a step. Must not know: sockets, text.
"""

from __future__ import annotations

import logging
import secrets
from time import monotonic
from typing import TYPE_CHECKING

from handler.runner.errors import InvalidRequestError
from handler.runner.protocol import (
    Event,
    Failed,
    Finished,
    Generate,
    PromptLogprobs,
    Tokens,
)
from handler.runner.sampler import is_random
from handler.runner.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from handler.runner.engine import Engine, Progress

logger = logging.getLogger(__name__)


class Requests:
    """The requests in flight over one engine."""

    def __init__(self, engine: Engine, vocab_size: int, max_concurrent: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._max_concurrent = max_concurrent
        self._sequences: dict[tuple[bytes, str], Sequence] = {}

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute anything."""
        return self._engine.has_work

    def submit(self, worker: bytes, request: Generate) -> list[Event]:
        """Accept a request, or return the one event that says why not."""
        try:
            if len(self._sequences) >= self._max_concurrent:
                message = f"{self._max_concurrent} requests are being served already"
                raise InvalidRequestError("overloaded", message)
            self._check_ids(request)
            sequence = _sequence(worker, request)
            self._engine.add(sequence)
        except InvalidRequestError as error:
            return [Failed(request.request_id, error.kind, str(error))]
        self._sequences[worker, request.request_id] = sequence
        return []

    def abort(self, worker: bytes, request_id: str) -> None:
        """Free a request's resources; unknown ids (it may just have ended) are ignored."""
        sequence = self._sequences.pop((worker, request_id), None)
        if sequence is not None:
            self._engine.remove(sequence)

    def abort_all(self, worker: bytes) -> None:
        """A worker is gone: so is everything it asked for."""
        for owner, request_id in [key for key in self._sequences if key[0] == worker]:
            self.abort(owner, request_id)

    def step(self) -> Iterator[tuple[bytes, Event]]:
        """Run one step; the events it yields, with the worker each belongs to."""
        if not self._engine.has_work:
            return
        try:
            progress = self._engine.step()
        except Exception as error:
            if "CUDA error" in str(error):
                raise  # the device is lost for this process; launch starts another
            yield from self._fail_running()
            return
        for item in progress:
            yield from self._events(item)

    def _events(self, item: Progress) -> Iterator[tuple[bytes, Event]]:
        sequence, sampled = item.sequence, item.sampled
        worker, request_id = sequence.owner, sequence.request_id
        if item.prompt_logprobs:
            yield worker, PromptLogprobs(request_id, item.prompt_logprobs)
        if sampled.logprob is None:
            yield worker, Tokens(request_id, [sampled.token_id])
        else:
            top = [sampled.top_logprobs] if sampled.top_logprobs else []
            yield worker, Tokens(request_id, [sampled.token_id], [sampled.logprob], top)
        if sequence.finish_reason is not None:
            self._sequences.pop((worker, request_id), None)
            yield worker, _finished(sequence)

    def _fail_running(self) -> Iterator[tuple[bytes, Event]]:
        """A step raised: whoever took part in it fails, those who wait go on."""
        failed = self._engine.running_sequences()
        logger.exception("a step failed; requests %s", [s.request_id for s in failed])
        for sequence in failed:
            self._engine.remove(sequence)
            self._sequences.pop((sequence.owner, sequence.request_id), None)
            message = "the model failed while it computed this request"
            yield sequence.owner, Failed(sequence.request_id, "internal", message)

    def _check_ids(self, request: Generate) -> None:
        groups = {
            "prompt": request.prompt_ids,
            "stop_token_ids": request.stop_token_ids,
            "logit_bias": request.sampling.logit_bias,
        }
        for name, ids in groups.items():
            bad = next((i for i in ids if not 0 <= i < self._vocab_size), None)
            if bad is not None:
                raise InvalidRequestError(
                    "invalid",
                    f"token id {bad} in {name} is outside the vocabulary (0 to "
                    f"{self._vocab_size - 1})",
                )


def _sequence(worker: bytes, request: Generate) -> Sequence:
    sampling, seed = request.sampling, None
    if is_random(sampling):
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    return Sequence(
        request.request_id,
        list(request.prompt_ids),
        request.max_new_tokens,
        owner=worker,
        sampling=sampling,
        seed=seed,
        stop_token_ids=frozenset(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        logprobs=request.logprobs,
        wants_prompt_logprobs=request.prompt_logprobs,
    )


def _finished(sequence: Sequence) -> Finished:
    started = sequence.started_s or sequence.arrived_s
    reason = sequence.finish_reason
    assert reason is not None  # the engine sets it when it ends a sequence
    return Finished(
        sequence.request_id,
        reason,
        seed=sequence.seed,
        queue_s=started - sequence.arrived_s,
        inference_s=monotonic() - started,
        cached_tokens=sequence.num_cached,
    )
