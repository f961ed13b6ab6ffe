"""TGI's request bodies, as text-generation-inference 3.3.7 takes them, and a little more.

More: null for any optional field, a single string for `stop` (also under its older name
`stop_sequences`), 1.0 for `top_p` and `typical_p`. The sentences are TGI's own, so that clients
that know them still do; the fields stand in the order in which TGI checks them.

Must not know: the model, the runner, OpenAI.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from handler.schema.validation import Accepts, RequestBody, read, refusal
from handler.served_model import ServingLimits

MAX_STOP_LENGTH = 1024


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _check_stops(stops: list[str]) -> list[str]:
    if not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise ValueError
    return stops


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Boolean = Annotated[bool, Accepts("true or false")]
Positive = Annotated[float, Field(gt=0), Accepts("strictly positive")]
Fraction = Annotated[float, Field(gt=0, le=1), Accepts("> 0.0 and <= 1.0")]
Count = Annotated[int, Field(ge=0), Accepts("a whole number, not negative")]
PositiveCount = Annotated[int, Field(ge=1), Accepts("strictly positive")]


class Parameters(RequestBody):
    """`parameters` of a generate request."""

    best_of: Count = 1
    temperature: Positive | None = None
    repetition_penalty: Positive = 1.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), Accepts(">= -2.0 and <= 2.0")] = 0.0
    top_p: Fraction = 1.0
    typical_p: Fraction = 1.0
    top_k: PositiveCount | None = None
    max_new_tokens: PositiveCount | None = None
    stop: Annotated[
        list[str],
        AfterValidator(_check_stops),
        BeforeValidator(_as_list, json_schema_input_type=Stop | list[Stop]),
        Accepts(f"a list of strings of 1 to {MAX_STOP_LENGTH} characters"),
    ] = Field(default_factory=list, validation_alias=AliasChoices("stop", "stop_sequences"))
    seed: (
        Annotated[int, Field(ge=0, lt=2**64), Accepts("a whole number from 0 to 2^64 - 1")] | None
    ) = None
    top_n_tokens: Count = 0
    truncate: Count | None = None
    do_sample: Boolean = False
    return_full_text: Boolean | None = None
    details: Boolean = False
    decoder_input_details: Boolean = False
    watermark: Boolean = False
    grammar: Any = None
    adapter_id: Any = None

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn: asked for, or implied by a parameter that shapes the draw."""
        return (
            self.do_sample
            or self.temperature not in (None, 1.0)
            or self.top_k is not None
            or self.top_p < 1
            or self.typical_p < 1
        )


class GenerateBody(RequestBody):
    """`POST /generate`, `/generate_stream`, `/` and the generate form of `/invocations`."""

    inputs: Annotated[str, Accepts("a string")]
    parameters: Parameters = Field(default_factory=Parameters)
    stream: Boolean = False


class TokenizeBody(RequestBody):
    """`POST /tokenize`: a generate body of which only the text matters."""

    also_known = frozenset({"parameters", "stream"})

    inputs: Annotated[str, Accepts("a string")]


def read_generate(body: Any, limits: ServingLimits, *, stream: bool | None) -> GenerateBody:
    """The request, `stream` as the route forces it. Raises ApiError (422)."""
    request = read(GenerateBody, body, "tgi")
    if stream is not None:
        request = request.model_copy(update={"stream": stream})
    if limits.tgi_strict and "parameters" not in request.model_fields_set:
        sampled = request.parameters.model_copy(update={"do_sample": True})
        request = request.model_copy(update={"parameters": sampled})
    _check(request.parameters, limits, request.stream)
    if not request.inputs:
        raise refusal("tgi", "inputs", "`inputs` cannot be empty")
    return request


def _check(parameters: Parameters, limits: ServingLimits, stream: bool) -> None:
    """What no single field shows, in TGI's order and words."""
    _check_best_of(parameters, limits, stream)
    num_stops = len(parameters.stop)
    if num_stops > limits.max_stop_sequences:
        sentence = f"`stop` supports up to {limits.max_stop_sequences} stop sequences"
        raise refusal("tgi", "stop", f"{sentence}. Given: {num_stops}")
    if parameters.top_n_tokens > limits.max_top_n_tokens:
        sentence = f"`top_n_tokens` must be >= 0 and <= {limits.max_top_n_tokens}"
        raise refusal("tgi", "top_n_tokens", f"{sentence}. Given: {parameters.top_n_tokens}")
    if parameters.decoder_input_details and stream:
        sentence = "`decoder_input_details` == true is not supported when streaming tokens"
        raise refusal("tgi", "decoder_input_details", sentence)
    for field in ("watermark", "grammar", "adapter_id"):
        if getattr(parameters, field) not in (None, False):
            raise refusal("tgi", field, f"`{field}` is not supported; leave it out")


def _check_best_of(parameters: Parameters, limits: ServingLimits, stream: bool) -> None:
    best_of = parameters.best_of
    if best_of <= 1:
        return
    sentence = ""
    if not parameters.samples:
        sentence = "you must use sampling when `best_of` is > 1"
    elif limits.max_best_of == 1:
        sentence = "`best_of` != 1 is not allowed for this endpoint"
    elif best_of > limits.max_best_of:
        sentence = f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}"
    elif stream:
        sentence = "`best_of` != 1 is not supported when streaming tokens"
    elif parameters.seed is not None:
        sentence = "`seed` must not be set when `best_of` > 1"
    if sentence:
        raise refusal("tgi", "best_of", sentence)
