"""Loads the tokenizer once through transformers and writes down what workers need of it.

Which chat template wins is transformers' decision (`chat_template.jinja` and
`additional_chat_templates/` over the entry of tokenizer_config.json); a given template or
tokenizer_config.json overrides that, and the old `chat_template.json` fills in where nothing else
has one. Must not know: the model's weights, rendering.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from handler.runner.config import RunnerConfig
from handler.runner.errors import CannotServeError

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
LEGACY_TEMPLATE_FILE = "chat_template.json"
CONFIG_FILE = "tokenizer_config.json"


@dataclass(frozen=True)
class TokenizerCard:
    """The tokenizer's part of the model card; see `protocol.ModelCard` for the fields."""

    tokenizer_path: str
    special_tokens: dict[str, str]
    special_token_ids: list[int]
    eos_token_id: int | None
    chat_templates: dict[str, str]
    chat_template_source: str
    clean_up_tokenization_spaces: bool


def load_tokenizer_card(config: RunnerConfig) -> TokenizerCard:
    """Load, serialise to `scratch_dir`, describe. Raises CannotServeError with the reason."""
    folder = Path(config.tokenizer_dir or config.model_dir)
    tokenizer = _load(_overridden(folder, config), folder, config.trust_remote_code)
    templates, source = _templates(tokenizer, folder, config)
    path = Path(config.scratch_dir) / "tokenizer.json"
    tokenizer.backend_tokenizer.save(str(path))
    named = {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
    flagged = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return TokenizerCard(
        tokenizer_path=str(path),
        special_tokens=named,
        special_token_ids=sorted(flagged.union(tokenizer.all_special_ids)),
        eos_token_id=tokenizer.eos_token_id,
        chat_templates=templates,
        chat_template_source=source,
        clean_up_tokenization_spaces=bool(tokenizer.clean_up_tokenization_spaces),
    )


def _load(folder: Path, shown: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # each tokenizer class raises its own kinds
        raise CannotServeError(
            f"no tokenizer could be loaded from {shown}: {error}; expected are tokenizer.json "
            "and tokenizer_config.json as save_pretrained writes them"
        ) from error
    if not tokenizer.is_fast:
        raise CannotServeError(
            f"the tokenizer in {shown} ({type(tokenizer).__name__}) has no fast form; save it "
            "with a tokenizer.json (AutoTokenizer.from_pretrained(…).save_pretrained(…))"
        )
    return cast("PreTrainedTokenizerBase", tokenizer)


def _overridden(folder: Path, config: RunnerConfig) -> Path:
    """The folder to load from: with another tokenizer_config.json, a copy made of links.

    The given file replaces the folder's as a whole. If it has a template, that one is meant, so
    the folder's template files are left out.
    """
    if config.tokenizer_config_path is None:
        return folder
    given = Path(config.tokenizer_config_path)
    try:
        has_template = bool(json.loads(given.read_text()).get("chat_template"))
    except (OSError, ValueError, AttributeError) as error:
        raise CannotServeError(
            f"--tokenizer-config-path {given} cannot be read: {error}"
        ) from error
    copy = Path(config.scratch_dir) / "tokenizer"
    copy.mkdir(exist_ok=True)
    hidden = {CONFIG_FILE}
    if has_template:
        hidden |= {TEMPLATE_FILE, TEMPLATE_FOLDER, LEGACY_TEMPLATE_FILE}
    for source in [*folder.iterdir(), given]:
        name = CONFIG_FILE if source == given else source.name
        link = copy / name
        if (source == given or name not in hidden) and not link.exists():
            link.symlink_to(source.resolve())
    return copy


def _templates(
    tokenizer: PreTrainedTokenizerBase, folder: Path, config: RunnerConfig
) -> tuple[dict[str, str], str]:
    """The templates by name, and the file they came from (or where they were looked for)."""
    if config.chat_template is not None:
        return _given_template(config.chat_template)
    template: Any = tokenizer.chat_template
    if template:
        named = template if isinstance(template, dict) else {"default": template}
        return dict(named), str(_source(folder, config))
    legacy = folder / LEGACY_TEMPLATE_FILE
    if legacy.is_file():
        template = json.loads(legacy.read_text()).get("chat_template")
        if isinstance(template, str):
            return {"default": template}, str(legacy)
    looked = [TEMPLATE_FILE, f"{TEMPLATE_FOLDER}/", f"chat_template in {CONFIG_FILE}"]
    looked.append(LEGACY_TEMPLATE_FILE)
    return {}, f"looked in {folder} for {', '.join(looked)}"


def _given_template(given: str) -> tuple[dict[str, str], str]:
    """`--chat-template`: a file, or the template itself (which holds a brace)."""
    path = Path(given)
    if "{" in given:
        return {"default": given}, "--chat-template"
    try:
        return {"default": path.read_text()}, str(path)
    except OSError as error:
        raise CannotServeError(f"--chat-template {given} cannot be read: {error}") from error


def _source(folder: Path, config: RunnerConfig) -> Path:
    if config.tokenizer_config_path is not None:
        given = Path(config.tokenizer_config_path)
        if json.loads(given.read_text()).get("chat_template"):
            return given
    for name in (TEMPLATE_FILE, TEMPLATE_FOLDER):
        if (folder / name).exists():
            return folder / name
    return folder / CONFIG_FILE
