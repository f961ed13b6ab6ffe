"""One step of generation: schedule -> forward -> sample -> collect. Owns the parts it names.

Must not know: sockets, message formats, text. It imports torch and transformers only, so that
`scripts/gpu_check.py` can run it where nothing else is installed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from handler.runner.errors import InvalidRequestError
from handler.runner.kv_cache import PagePool
from handler.runner.sampler import LOWEST_LOGPROB, Sampled, Sampler
from handler.runner.scheduler import Scheduler
from handler.runner.sequence import Chunk, Sequence

if TYPE_CHECKING:
    from handler.runner.model import PagedModel
    from handler.runner.protocol import FinishReason


@dataclass(frozen=True)
class EngineLimits:
    """Bounds of what runs, all in tokens or sequences."""

    max_total_tokens: int
    max_input_tokens: int
    max_batch_size: int
    max_prefill_tokens: int
    num_pages: int


@dataclass(slots=True)
class Progress:
    """What a step did for one sequence: its new token, and whether it ended."""

    sequence: Sequence
    sampled: Sampled
    prompt_logprobs: list[float | None] = field(default_factory=list)
    """Given once, with the first token, where asked for."""


class Engine:
    """Runs sequences over a paged model. Not thread safe: one caller steps it."""

    def __init__(
        self, model: PagedModel, eos_token_ids: frozenset[int], limits: EngineLimits
    ) -> None:
        self.model = model
        self.eos_token_ids = eos_token_ids
        self.limits = limits
        self.pool = PagePool(limits.num_pages, model.page_size)
        self.scheduler = Scheduler(self.pool, limits.max_batch_size, limits.max_prefill_tokens)
        self.sampler = Sampler(eos_token_ids)
        self.model.allocate(limits.num_pages)

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute anything."""
        return self.scheduler.has_work

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises InvalidRequestError if it can never run."""
        num_prompt, limits = sequence.num_prompt, self.limits
        if num_prompt == 0:
            raise InvalidRequestError("invalid", "the prompt is empty")
        if sequence.max_new_tokens < 1:
            raise InvalidRequestError("invalid", "at least one new token must be asked for")
        if num_prompt > limits.max_input_tokens:
            raise InvalidRequestError(
                "too_long",
                f"the prompt has {num_prompt} tokens; at most {limits.max_input_tokens} are taken",
            )
        if num_prompt + sequence.max_new_tokens > limits.max_total_tokens:
            raise InvalidRequestError(
                "too_long",
                f"the prompt has {num_prompt} tokens and {sequence.max_new_tokens} new ones were "
                f"asked for; together at most {limits.max_total_tokens} fit",
            )
        sequence.arrived_s = time.monotonic()
        self.scheduler.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Stop a sequence and free what it holds."""
        self.scheduler.remove(sequence)
        self.sampler.forget(sequence)

    def step(self) -> list[Progress]:
        """Compute one step; what it did for each sequence that got a token."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        now = time.monotonic()
        for chunk in chunks:
            if chunk.sequence.started_s is None:
                chunk.sequence.started_s = now
        sampled = self._compute(chunks)
        self.scheduler.complete(chunks)
        return self._collect([c.sequence for c in chunks if c.samples], sampled)

    def running_sequences(self) -> list[Sequence]:
        """Those with pages; a failed step concerns them."""
        return list(self.scheduler.running)

    @torch.inference_mode()
    def _compute(self, chunks: list[Chunk]) -> list[Sampled]:
        """Forward and sample; one outcome per chunk that samples, in order."""
        last_rows, start = [], 0
        prompt_rows: list[int] = []
        for chunk in chunks:
            if chunk.sequence.wants_prompt_logprobs:
                prompt_rows += range(start, start + _num_prompt_targets(chunk))
            start += chunk.length
            if chunk.samples:
                last_rows.append(start - 1)
        logits = self.model.forward(chunks, prompt_rows + last_rows)
        if prompt_rows:
            _record_prompt_logprobs(logits[: len(prompt_rows)], chunks)
        if not last_rows:
            return []
        sequences = [chunk.sequence for chunk in chunks if chunk.samples]
        return self.sampler.sample(logits[len(prompt_rows) :], sequences)

    def _collect(self, sequences: list[Sequence], sampled: list[Sampled]) -> list[Progress]:
        """Append the new tokens and end what is done."""
        progress = []
        for sequence, item in zip(sequences, sampled, strict=True):
            first = sequence.num_generated == 0
            sequence.tokens.append(item.token_id)
            sequence.finish_reason = self._finish_reason(sequence)
            prompt_logprobs: list[float | None] = []
            if first and sequence.wants_prompt_logprobs:
                prompt_logprobs = [None, *sequence.prompt_logprobs]
            progress.append(Progress(sequence, item, prompt_logprobs))
            if sequence.finish_reason is not None:
                self.remove(sequence)
        return progress

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """An end token at the very limit still counts as the end (OpenAI's meaning of `stop`)."""
        token = sequence.tokens[-1]
        if token in self.eos_token_ids and not sequence.ignore_eos:
            return "eos"
        if token in sequence.stop_token_ids:
            return "stop_token"
        if sequence.num_generated >= sequence.max_new_tokens:
            return "length"
        return None


def _num_prompt_targets(chunk: Chunk) -> int:
    """How many of the chunk's rows predict a token of the prompt."""
    return max(0, min(chunk.end, chunk.sequence.num_prompt - 1) - chunk.start)


def _record_prompt_logprobs(logits: torch.Tensor, chunks: list[Chunk]) -> None:
    start = 0
    for chunk in chunks:
        sequence = chunk.sequence
        count = _num_prompt_targets(chunk) if sequence.wants_prompt_logprobs else 0
        if not count:
            continue
        rows = torch.log_softmax(logits[start : start + count].float(), dim=-1)
        targets = sequence.tokens[chunk.start + 1 : chunk.start + 1 + count]
        picked = rows.gather(-1, torch.tensor(targets, device=rows.device)[:, None])[:, 0]
        sequence.prompt_logprobs += [max(value, LOWEST_LOGPROB) for value in picked.tolist()]
        start += count
