"""The state of one sequence inside the runner: its tokens, its pages, why it ended.

Pure data. Must not know: torch, sockets, the scheduling policy.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handler.runner.protocol import FinishReason, Sampling


class State(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """One continuation being produced.

    `tokens` is the prompt followed by what was generated. Keys and values exist for the first
    `num_computed` of them, in `pages`. Only `scheduler` and `engine` change a sequence.
    """

    request_id: str
    tokens: list[int]
    max_new_tokens: int
    owner: bytes = b""
    """Socket identity of the worker that asked."""
    sampling: Sampling | None = None
    """None: greedy without penalties."""
    seed: int | None = None
    """The seed in use; None when nothing is random."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    wants_prompt_logprobs: bool = False

    num_prompt: int = field(init=False)
    state: State = State.WAITING
    num_computed: int = 0
    num_cached: int = 0
    """Prompt tokens whose keys and values were found in the prefix cache at admission."""
    pages: list[int] = field(default_factory=list)
    prefix_ids: list[int] = field(default_factory=list)
    """Identity of each full page that was entered in the prefix cache, in order."""
    prompt_logprobs: list[float | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    arrived_s: float = 0.0
    started_s: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Tokens produced so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens without keys and values yet; 1 while decoding."""
        return len(self.tokens) - self.num_computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of one sequence that a step computes: `tokens[start:start + length]`."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        """Number of tokens with keys and values after the step."""
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether the step yields the sequence's next token."""
        return self.end == len(self.sequence.tokens)
