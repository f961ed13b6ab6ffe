"""The model as the handlers see it: tokenizer, vocabulary, chat templates, limits. One per worker.

Must not know: the APIs, HTTP, the runner's internals, torch.
"""

from dataclasses import dataclass

from tokenizers import Tokenizer, decoders

from handler.failures import NotText, PromptTooLong
from handler.runner.protocol import ModelCard
from handler.template import ChatTemplate, TemplateRefusal
from handler.text import Vocabulary

NORMALIZER_SLACK = 4
"""A normaliser may join characters before tokens are cut; none in use joins more than this."""


@dataclass(frozen=True)
class ServingLimits:
    """What the handlers need of the settings."""

    version: str = "0"
    served_model_name: str | None = None
    max_best_of: int = 2
    max_stop_sequences: int = 4
    """On TGI's routes."""
    max_top_n_tokens: int = 5
    """On TGI's routes."""
    max_client_batch_size: int = 64
    """Prompts in one /v1/completions request."""
    tgi_strict: bool = False
    """Whether TGI's habits are kept where they contradict OpenAI's reference; `tgi_strict.py`."""
    allow_request_template: bool = False
    """Whether a request may bring its own `chat_template`: code, if sandboxed code."""


class ServedModel:
    """Everything of the model a worker holds. Immutable after construction; safe in threads."""

    def __init__(self, card: ModelCard, limits: ServingLimits | None = None) -> None:
        """Raises ValueError where a chat template does not compile (template, line, reason)."""
        self.card = card
        self.limits = limits or ServingLimits()
        self.name = self.limits.served_model_name or card.model_id
        self.system_fingerprint = f"{self.limits.version}-native"
        self.tokenizer: Tokenizer = Tokenizer.from_file(card.tokenizer_path)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.vocabulary = Vocabulary(
            self.tokenizer, card.special_token_ids, card.clean_up_tokenization_spaces
        )
        self._max_characters = _max_characters(self.tokenizer, card.max_input_tokens)
        self._templates = {
            name: self._compiled(name, source) for name, source in card.chat_templates.items()
        }

    def encode(
        self, text: str, *, add_special_tokens: bool, may_overflow: bool = False
    ) -> list[int]:
        """Token ids of a prompt.

        Text that cannot fit is not tokenised: it is too long, or with `may_overflow`, where the
        caller keeps only the last ids, cut to twice what these can hold. Raises PromptTooLong,
        NotText.
        """
        if self._max_characters is not None and len(text) > self._max_characters:
            if not may_overflow:
                raise PromptTooLong(len(text))
            text = text[-2 * self._max_characters :]
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise NotText from error
        return ids

    def has_chat_template(self, name: str) -> bool:
        """Whether the model has a template of this name."""
        return name in self._templates

    def chat_template(self, name: str | None = None, *, with_tools: bool = False) -> ChatTemplate:
        """The template for a conversation, chosen as transformers does. Raises TemplateRefusal."""
        if name is not None:
            if name in self._templates:
                return self._templates[name]
            raise TemplateRefusal(f"there is no chat template `{name}`; {self._known()}")
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if self._templates:
            raise TemplateRefusal(f"no chat template is the default one; {self._known()}")
        raise TemplateRefusal(
            "chat_template is not set: none was found "
            f"({self.card.chat_template_source}). Start the server with --chat-template FILE, or "
            "use /v1/completions or /generate with a prompt of your own"
        )

    def _known(self) -> str:
        return "the model has " + ", ".join(f"`{name}`" for name in sorted(self._templates))

    def _compiled(self, name: str, source: str) -> ChatTemplate:
        try:
            return ChatTemplate(source, self.card.special_tokens)
        except ValueError as error:
            where = self.card.chat_template_source
            message = f"chat template `{name}` ({where}) does not compile: {error}"
            raise ValueError(message) from error


def _max_characters(tokenizer: Tokenizer, max_tokens: int) -> int | None:
    """More characters than this cannot be `max_tokens` tokens; None where that cannot be known."""
    byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
    if not byte_level and not getattr(tokenizer.model, "byte_fallback", False):
        return None  # an unknown-token may stand for a text of any length
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)))
    return max_tokens * longest * (NORMALIZER_SLACK if tokenizer.normalizer else 1)
