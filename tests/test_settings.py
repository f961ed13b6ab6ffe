"""Settings: precedence, aliases, refusals in one sentence, what is shown; and the document.

Must not know: processes.
"""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.command_line import answer, update
from container.options import OPTIONS, Option
from container.settings import (
    Resolved,
    Settings,
    SettingsError,
    child_environment,
    resolve,
)

ROOT = Path(__file__).resolve().parent.parent


def read(line: str = "", **environ: str) -> Resolved:
    return resolve(line.split(), environ)


def refusal(line: str = "", **environ: str) -> str:
    with pytest.raises(SettingsError) as caught:
        read(line, **environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_table_and_the_settings_name_the_same_things() -> None:
    assert sorted(option.field for option in OPTIONS) == sorted(Settings.__struct_fields__)


def test_no_flag_or_name_means_two_things() -> None:
    flags = [flag for option in OPTIONS for flag in option.flags]
    names = [name for option in OPTIONS for name in option.env]
    assert len(set(flags)) == len(flags)
    assert len(set(names)) == len(names)
    assert "HOSTNAME" not in names  # docker sets it to the container's id


def test_every_option_answers_to_its_own_name_in_upper_case() -> None:
    for option in OPTIONS:
        assert option.field.upper() in option.env or option.field in {"num_shard", "json_output"}


def test_command_line_comes_before_environment_before_default() -> None:
    assert read().settings == Settings()
    assert read(PORT="1").settings.port == 1
    both = read("--port 2", PORT="1")
    assert both.settings.port == 2
    assert both.sources["port"] == "--port"
    assert read(PORT="1").sources["port"] == "environment PORT"
    assert read().sources["port"] == "default"


def test_both_ways_to_write_a_value() -> None:
    assert read("--port=7").settings.port == 7
    assert read("--chat-template={{a=b}}").settings.chat_template == "{{a=b}}"
    assert read("-p 7").settings.port == 7


def test_serve_may_be_said_any_number_of_times() -> None:
    assert read("serve --port 7") == read("--port 7")
    assert read("serve serve --port 7") == read("--port 7")


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"HF_MODEL_ID": "org/m"}, "model_id", "org/m"),
        ({"MODEL_ID": "org/m"}, "model_id", "org/m"),
        ({"HF_MODEL_REVISION": "v1"}, "revision", "v1"),
        ({"REVISION": "v1"}, "revision", "v1"),
        ({"HF_MODEL_TRUST_REMOTE_CODE": "true"}, "trust_remote_code", True),
        ({"HF_TOKEN": "t"}, "hf_token", "t"),
        ({"HUGGING_FACE_HUB_TOKEN": "t"}, "hf_token", "t"),
        ({"HF_API_TOKEN": "t"}, "hf_token", "t"),
        ({"MAX_INPUT_LENGTH": "9"}, "max_input_tokens", 9),
        ({"MAX_INPUT_TOKENS": "9"}, "max_input_tokens", 9),
        ({"MAX_TOTAL_TOKENS": "9"}, "max_total_tokens", 9),
        ({"SAGEMAKER_BIND_TO_PORT": "9", "PORT": "80"}, "port", 9),
        ({"SAGEMAKER_CONTAINER_LOG_LEVEL": "10"}, "log_level", "debug"),
        ({"SAGEMAKER_CONTAINER_LOG_LEVEL": "25"}, "log_level", "info"),
        ({"LOG_LEVEL": "WARN"}, "log_level", "warning"),
        ({"MESSAGES_API_ENABLED": "true"}, "invocations_mode", "chat"),
        ({"OAI_CHAT_ROUTE": "/invocations"}, "invocations_mode", "chat"),
        ({"OAI_CHAT_ROUTE": "/invocations/"}, "invocations_mode", "chat"),
        ({"OAI_CHAT_ROUTE": "/chat"}, "invocations_mode", "auto"),
        ({"OAI_CHAT_ROUTE": "/chat/"}, "oai_chat_route", "/chat"),
        ({"OAI_CHAT_ROUTE": "/"}, "oai_chat_route", "/"),
        ({"HF_HUB_OFFLINE": "1"}, "hub_offline", True),
        ({"SM_NUM_GPUS": "1"}, "num_shard", 1),
        ({"JSON_OUTPUT": "true"}, "log_format", "json"),
        ({"HOSTNAME": "3f2a9c"}, "host", "0.0.0.0"),
        ({"KV_CACHE_MEMORY_BYTES": "512MB"}, "kv_cache_memory_bytes", 512_000_000),
        ({"KV_CACHE_MEMORY_BYTES": "4GiB"}, "kv_cache_memory_bytes", 4 * 2**30),
        ({"CORS_ALLOW_ORIGIN": "a, b"}, "cors_allow_origin", ("a", "b")),
        ({"HF_MODEL_QUANTIZE": "none"}, "quantize", None),
        ({"PORT": ""}, "port", 8080),
        ({"PORT": " 9 "}, "port", 9),
    ],
)
def test_environment_names(environ: dict[str, str], field: str, value: object) -> None:
    assert getattr(resolve([], environ).settings, field) == value


@pytest.mark.parametrize("text", ["true", "True", "1", "yes", "YES"])
def test_booleans_that_mean_true(text: str) -> None:
    assert read(TRUST_REMOTE_CODE=text).settings.trust_remote_code is True


@pytest.mark.parametrize("text", ["false", "False", "0", "no", "No"])
def test_booleans_that_mean_false(text: str) -> None:
    assert read(TRUST_REMOTE_CODE=text).settings.trust_remote_code is False
    assert read(f"--trust-remote-code {text}").settings.trust_remote_code is False


def test_a_bare_switch_means_true() -> None:
    settings = read("--trust-remote-code --port 7").settings
    assert (settings.trust_remote_code, settings.port) == (True, 7)
    assert read("--hub-offline").settings.hub_offline is True


def test_origins_may_be_given_one_by_one() -> None:
    assert read("--cors-allow-origin a --cors-allow-origin b").settings.cors_allow_origin == (
        "a",
        "b",
    )


@pytest.mark.parametrize(
    ("line", "environ", "parts"),
    [
        ("--prot 1", {}, ["--prot", "--port"]),
        ("--max-input-tokns 1", {}, ["--max-input-tokens"]),
        ("--model_id x", {}, ["--model-id"]),
        ("--zzz", {}, ["--zzz", "--help"]),
        ("train", {}, ["train", "--help"]),
        ("--port", {}, ["--port", "1 to 65535"]),
        ("--port --host", {}, ["--port needs a value"]),
        ("--port x", {}, ["--port", '"x"', "1 to 65535"]),
        ("--port 0", {}, ["--port"]),
        ("--port 65536", {}, ["--port"]),
        ("", {"SAGEMAKER_BIND_TO_PORT": "x"}, ["SAGEMAKER_BIND_TO_PORT", "--port", "65535"]),
        ("", {"TRUST_REMOTE_CODE": "maybe"}, ["TRUST_REMOTE_CODE", "true or false"]),
        ("--dtype int8", {}, ["--dtype", "bfloat16"]),
        ("--device tpu", {}, ["--device", "cuda:N"]),
        ("--kv-cache-memory-bytes 4GX", {}, ["--kv-cache-memory-bytes", "4GiB"]),
        ("--kv-cache-memory-fraction 1.5", {}, ["--kv-cache-memory-fraction", "at most 1"]),
        ("--kv-cache-memory-fraction nan", {}, ["--kv-cache-memory-fraction"]),
        ("--oai-chat-route chat", {}, ["--oai-chat-route", '"/"']),
        ("--oai-chat-route /ping", {}, ["--oai-chat-route", "/ping"]),
        ("--oai-chat-route /health/", {}, ["--oai-chat-route"]),
        ("", {"HF_MODEL_QUANTIZE": "awq"}, ["HF_MODEL_QUANTIZE", "not supported yet"]),
        ("--log-level loud", {}, ["--log-level", "warning"]),
        ("--host my_machine", {}, ["--host"]),
        ("--max-input-tokens 5 --max-total-tokens 5", {}, ["--max-input-tokens", "below"]),
        (
            "--oai-chat-route /invocations",
            {"INVOCATIONS_MODE": "generate"},
            ["--oai-chat-route", "INVOCATIONS_MODE"],
        ),
        (
            "--invocations-mode generate",
            {"MESSAGES_API_ENABLED": "1"},
            ["--invocations-mode", "MESSAGES_API_ENABLED"],
        ),
    ],
)
def test_refusals_name_the_option_and_what_it_takes(
    line: str, environ: dict[str, str], parts: list[str]
) -> None:
    message = refusal(line, **environ)
    for part in parts:
        assert part in message


def test_a_wish_that_cannot_be_met_in_full_is_remarked_on() -> None:
    (remark,) = read(SM_NUM_GPUS="4").remarks
    assert "SM_NUM_GPUS" in remark
    assert "one GPU" in remark
    (remark,) = read(HF_MODEL_ID="a", MODEL_ID="b").remarks
    assert remark == "MODEL_ID is ignored because HF_MODEL_ID is set too."
    assert read(HF_MODEL_ID="a", MODEL_ID="a").remarks == ()
    (remark,) = read(LORA_ADAPTERS="x").remarks
    assert remark == "LORA_ADAPTERS is not supported yet and is ignored."
    (remark,) = read("--graceful-termination-timeout 90").remarks
    assert "SageMaker kills 30 s" in remark


@given(st.lists(st.text(max_size=12), max_size=6), st.dictionaries(st.text(), st.text()))
def test_any_arguments_are_read_or_refused(
    arguments: list[str], environ: Mapping[str, str]
) -> None:
    try:
        resolved = resolve(arguments, environ)
    except SettingsError:
        return
    assert isinstance(resolved.settings, Settings)


@given(st.sampled_from(OPTIONS), st.text(max_size=20))
def test_any_value_is_refused_by_name_or_survives_the_way_to_a_child(
    option: Option, text: str
) -> None:
    name = option.env[0]
    refused, settings = "", Settings()
    try:
        settings = resolve([], {name: text}).settings
    except SettingsError as error:
        refused = str(error)
    assert not refused or name in refused
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


def test_help_names_every_flag_and_every_environment_name() -> None:
    text = answer(read("--help"))
    for option in OPTIONS:
        for name in (*option.flags, *option.env):
            assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text), name


def test_help_is_given_whatever_the_environment_says() -> None:
    assert read("--help", PORT="x").request == "--help"


def test_print_config_shows_each_value_with_its_source_and_no_secret() -> None:
    resolved = read("--print-config --port 7", HF_TOKEN="hf_secret", API_KEY="key_secret")
    text = answer(resolved)
    assert "port = 7  # --port" in text
    assert "hf_token = (hidden)  # environment HF_TOKEN" in text
    assert "secret" not in text
    assert len(text.splitlines()) == len(OPTIONS)


def test_a_child_gets_no_secret_and_nothing_that_reaches_the_network() -> None:
    environ = {
        "HF_TOKEN": "s1",
        "HF_API_TOKEN": "s2",
        "API_KEY": "s3",
        "HOME": "/nowhere",
        "A": "b",
    }
    settings = resolve([], environ).settings
    child = child_environment(
        settings,
        project_root=Path("/p"),
        fallback_cache=Path("/tmp/c"),
        offline=True,
        environ=environ,
    )
    assert not {"s1", "s2", "s3"} & set(child.values())
    assert child["A"] == "b"
    assert child["HF_HUB_OFFLINE"] == child["TRANSFORMERS_OFFLINE"] == "1"
    assert child["PYTHONPATH"] == "/p"


def test_caches_move_where_they_can_be_written_unless_they_were_placed(tmp_path: Path) -> None:
    def child(**environ: str) -> dict[str, str]:
        return child_environment(
            Settings(), project_root=tmp_path, fallback_cache=Path("/c"), offline=True,
            environ=environ,
        )  # fmt: skip

    assert "HF_HOME" not in child(HOME=str(tmp_path))
    assert child(HOME="/proc/1")["HF_HOME"] == "/c/huggingface"
    assert child(HOME="/proc/1", HF_HOME="/mine")["HF_HOME"] == "/mine"


def test_the_document_is_what_the_table_says() -> None:
    document = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert update(document) == document, "python -m container.command_line docs/configuration.md"


def test_serve_runs_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "container.py").write_text("raise SystemExit('shadowed')")
    done = subprocess.run(
        [ROOT / "serve", "serve", "--version"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("invocant ")
