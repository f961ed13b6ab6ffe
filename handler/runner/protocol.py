"""The messages that cross the socket between a worker and the runner, and the neutral request.

Every message is one msgspec struct in msgpack, one frame, tagged by type; nothing is ever pickled.
A worker sends `Hello`, `Generate` and `Abort`; the runner answers with `Loading` or `Ready` to a
hello, and with `Batch` for the events of one step. Every accepted request gets exactly one
terminal event: `Finished` or `Failed`.

Must not know: HTTP, the OpenAI or TGI schemas, text, torch.
"""

from typing import Literal

import msgspec

PROTOCOL_VERSION = 1

FinishReason = Literal["length", "eos", "stop_token"]
"""`length`: the token budget or the context is used up. `eos`: one of the model's own
end-of-sequence ids. `stop_token`: an id of the request's `stop_token_ids`."""

FailureKind = Literal["invalid", "too_long", "overloaded", "unavailable", "internal"]
"""`invalid`, `too_long`: the request can never run (the client's fault). `overloaded`: try again
later. `unavailable`: the runner went away. `internal`: a fault of ours."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the next token is chosen. Each default means "off".

    Definitions are those of transformers' logits processors of the same names, except that
    `frequency_penalty` and `presence_penalty` follow OpenAI's reference (over generated tokens).
    """

    temperature: float = 1.0
    """0 means greedy: the most likely token after the penalties."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """Any integer; None draws a fresh one. A seed gives the same tokens alone or in a batch."""


class Generate(msgspec.Struct, frozen=True, omit_defaults=True, tag="generate"):
    """One continuation to produce: token ids in, token ids out."""

    request_id: str
    """Unique per worker socket."""
    prompt_ids: list[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_token_ids: list[int] = []
    """Ids that end the sequence besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """No end-of-sequence or stop id is chosen before this many tokens."""
    logprobs: int | None = None
    """None: none. n >= 0: the raw model's log-probability of each token and of the n best."""
    prompt_logprobs: bool = False
    """Also return the raw log-probability of each prompt token (the first has none)."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a request and free what it holds. No event follows; unknown ids are ignored."""

    request_id: str


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A worker asks for the runner's state; answered with `Loading` or `Ready`."""

    version: int = PROTOCOL_VERSION


class Tokens(msgspec.Struct, frozen=True, omit_defaults=True, tag="tokens"):
    """Tokens of one sequence from one step, in order. Never terminal."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float] = []
    """One per token where asked for; natural logarithm, raw model, never infinite."""
    top_logprobs: list[list[tuple[int, float]]] = []
    """Per token the most likely `(id, logprob)`, best first."""


class PromptLogprobs(msgspec.Struct, frozen=True, tag="prompt_logprobs"):
    """Sent once, before the first `Tokens`, where asked for. Never terminal."""

    request_id: str
    logprobs: list[float | None]
    """One per prompt token; the first is None."""


class Finished(msgspec.Struct, frozen=True, omit_defaults=True, tag="finished"):
    """The sequence ended as it should. Terminal. The end token, if any, came as `Tokens` before."""

    request_id: str
    reason: FinishReason
    seed: int | None = None
    """The seed that was used; None for greedy."""
    queue_s: float = 0.0
    """From arrival at the runner to the first step that computed it."""
    inference_s: float = 0.0
    """From that step to the last token."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were reused."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The sequence could not be produced. Terminal."""

    request_id: str
    kind: FailureKind
    message: str


Event = Tokens | PromptLogprobs | Finished | Failed


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """All events of one step for one worker."""

    events: list[Event]


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """The runner lives but cannot generate yet."""

    phase: str
    """For people, for example "loading weights 42 %"."""
    version: int = PROTOCOL_VERSION


class ModelCard(msgspec.Struct, frozen=True):
    """What a worker must know of the model. Paths are on the machine both processes share."""

    model_id: str
    """The hub id, or the folder the model was loaded from."""
    revision: str | None
    model_type: str
    tokenizer_path: str
    """The fast tokenizer, serialised as a `tokenizer.json` (with its post-processor)."""
    special_tokens: dict[str, str]
    """Named special tokens as templates see them: `bos_token`, `eos_token`, extra ones."""
    special_token_ids: list[int]
    """Every id that a decoder skipping special tokens leaves out."""
    eos_token_ids: list[int]
    chat_templates: dict[str, str]
    """By name; `default` is the ordinary one. Empty: the model has none."""
    chat_template_source: str
    """The file the template came from, or the places looked in when there is none."""
    clean_up_tokenization_spaces: bool
    vocab_size: int
    max_input_tokens: int
    max_total_tokens: int
    """Prompt and new tokens together never exceed this."""
    dtype: str
    device: str
    device_name: str
    attention: str
    kv_capacity_tokens: int
    max_batch_size: int
    quantization: str | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The runner generates from now on."""

    card: ModelCard
    incarnation: str
    """New at every start of the runner: seeing another one, a worker's requests are gone."""
    version: int = PROTOCOL_VERSION


ToRunner = Hello | Generate | Abort
ToWorker = Loading | Ready | Batch

encode = msgspec.msgpack.Encoder().encode
decode_to_runner = msgspec.msgpack.Decoder(ToRunner).decode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
