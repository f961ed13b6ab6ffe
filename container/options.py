"""The table of options: every option once, with its flags, environment names and help.

`field` is the attribute of `container.settings.Settings`, which holds the defaults. The first flag
is the one used in messages; further ones and all environment names are aliases, the earlier one
wins. HOSTNAME is no name of `--host`: Docker sets it to the container's id.

Must not know: the environment, the values in use, what an option does.
"""

from dataclasses import dataclass

from container import values
from container.values import Kind


@dataclass(frozen=True)
class Option:
    """One row. `shown_default` replaces the value where that is computed at start."""

    field: str
    kind: Kind
    group: str
    help: str
    env: tuple[str, ...]
    more_flags: tuple[str, ...] = ()
    shown_default: str | None = None
    is_secret: bool = False

    @property
    def flag(self) -> str:
        """The flag to name in messages."""
        return "--" + self.field.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """Every flag that sets this option."""
        return (self.flag, *self.more_flags)


MODEL = "Model"
API = "API"
LIMITS = "Limits"
HARDWARE = "Hardware and memory"
SERVER = "Server"

OPTIONS: tuple[Option, ...] = (
    Option(
        "model_id",
        values.TEXT,
        MODEL,
        "Hub id (org/name), folder or model.tar.gz to serve. A folder given here is used as it is; "
        "otherwise a model in /opt/ml/model or /repository comes before a hub id.",
        ("HF_MODEL_ID", "MODEL_ID"),
        shown_default="none: /opt/ml/model, then /repository",
    ),
    Option(
        "revision",
        values.TEXT,
        MODEL,
        "Branch, tag or commit on the hub. Means nothing for a local model.",
        ("HF_MODEL_REVISION", "REVISION", "HF_REVISION"),
        shown_default="main",
    ),
    Option(
        "served_model_name",
        values.TEXT,
        MODEL,
        "The name that /v1/models and the answers carry.",
        ("SERVED_MODEL_NAME",),
        shown_default="the model's id",
    ),
    Option(
        "tokenizer_config_path",
        values.TEXT,
        MODEL,
        "A tokenizer_config.json, or a folder with a tokenizer, that replaces the model's own.",
        ("TOKENIZER_CONFIG_PATH",),
        shown_default="the model's own",
    ),
    Option(
        "chat_template",
        values.TEXT,
        MODEL,
        "A file with a Jinja chat template, or the template itself, that replaces all others.",
        ("CHAT_TEMPLATE",),
        shown_default="the model's own",
    ),
    Option(
        "trust_remote_code",
        values.BOOLEAN,
        MODEL,
        "Run Python code that comes with the model, and load pickled weights (*.bin).",
        ("HF_MODEL_TRUST_REMOTE_CODE", "TRUST_REMOTE_CODE", "HF_TRUST_REMOTE_CODE"),
    ),
    Option(
        "quantize",
        values.NO_QUANTIZATION,
        MODEL,
        "Quantize the weights at start (not supported yet: anything but none is refused).",
        ("HF_MODEL_QUANTIZE", "QUANTIZE"),
        shown_default="none",
    ),
    Option(
        "hf_token",
        values.TEXT,
        MODEL,
        "Token for gated and private models on the hub.",
        ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN", "HF_HUB_TOKEN"),
        shown_default="none",
        is_secret=True,
    ),
    Option(
        "hub_cache",
        values.TEXT,
        MODEL,
        "Folder for models that come from the hub.",
        ("HUB_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"),
        ("--huggingface-hub-cache",),
        shown_default="the hub library's, or one in the temporary folder if that cannot be written",
    ),
    Option(
        "hub_offline",
        values.BOOLEAN,
        MODEL,
        "Never use the network: serve a hub id from the cache or not at all.",
        ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HUB_OFFLINE"),
    ),
    Option(
        "oai_chat_route",
        values.ROUTE,
        API,
        "The chat API answers at this path too; /invocations makes that route speak chat only.",
        ("OAI_CHAT_ROUTE",),
        shown_default="none",
    ),
    Option(
        "messages_api_enabled",
        values.BOOLEAN,
        API,
        "true is the same as --oai-chat-route /invocations (TGI 1.4 to 2.3).",
        ("MESSAGES_API_ENABLED",),
        shown_default="false",
    ),
    Option(
        "invocations_mode",
        values.choice("auto", "chat", "generate"),
        API,
        "What /invocations speaks: auto decides by the body (inputs, messages or prompt), chat and "
        "generate force one.",
        ("INVOCATIONS_MODE",),
    ),
    Option(
        "tgi_strict",
        values.BOOLEAN,
        API,
        "Keep habits of TGI that contradict OpenAI's reference, for clients that depend on them; "
        "docs/compatibility.md lists them.",
        ("TGI_STRICT",),
    ),
    Option(
        "api_key",
        values.TEXT,
        API,
        "Clients must send this as bearer token, except to the health routes.",
        ("API_KEY",),
        shown_default="none: no authentication, the platforms do that",
        is_secret=True,
    ),
    Option(
        "cors_allow_origin",
        values.NAMES,
        API,
        "Origins that browsers may call from; commas or the flag again for several.",
        ("CORS_ALLOW_ORIGIN",),
    ),
    Option(
        "max_input_tokens",
        values.integer(1),
        LIMITS,
        "Longest prompt, in tokens.",
        ("MAX_INPUT_TOKENS", "MAX_INPUT_LENGTH"),
        ("--max-input-length",),
        shown_default="from the model and the memory",
    ),
    Option(
        "max_total_tokens",
        values.integer(2),
        LIMITS,
        "Most tokens of prompt and answer together.",
        ("MAX_TOTAL_TOKENS",),
        shown_default="from the model and the memory",
    ),
    Option(
        "max_batch_prefill_tokens",
        values.integer(1),
        LIMITS,
        "Most prompt tokens computed in one step; longer prompts go in several.",
        ("MAX_BATCH_PREFILL_TOKENS",),
        shown_default="by device",
    ),
    Option(
        "max_batch_size",
        values.integer(1),
        LIMITS,
        "Most sequences that run at once; further ones wait.",
        ("MAX_BATCH_SIZE",),
        shown_default="by device and memory",
    ),
    Option(
        "max_concurrent_requests",
        values.integer(1),
        LIMITS,
        "Most sequences accepted, running and waiting; above that clients get 429.",
        ("MAX_CONCURRENT_REQUESTS",),
    ),
    Option(
        "max_best_of",
        values.integer(1),
        LIMITS,
        "Largest best_of on the TGI routes.",
        ("MAX_BEST_OF",),
    ),
    Option(
        "max_stop_sequences",
        values.integer(0),
        LIMITS,
        "Most stop strings on the TGI routes.",
        ("MAX_STOP_SEQUENCES",),
    ),
    Option(
        "max_top_n_tokens",
        values.integer(0),
        LIMITS,
        "Largest top_n_tokens on the TGI routes.",
        ("MAX_TOP_N_TOKENS",),
    ),
    Option(
        "max_client_batch_size",
        values.integer(1),
        LIMITS,
        "Most prompts in one /v1/completions request.",
        ("MAX_CLIENT_BATCH_SIZE",),
    ),
    Option(
        "payload_limit",
        values.SIZE,
        LIMITS,
        "Largest request body in bytes; larger ones get 413.",
        ("PAYLOAD_LIMIT",),
    ),
    Option(
        "dtype",
        values.choice("auto", "float32", "bfloat16", "float16"),
        HARDWARE,
        "Number format of the weights; auto takes the model's own where the device is good at it.",
        ("DTYPE",),
    ),
    Option(
        "device",
        values.DEVICE,
        HARDWARE,
        "Where the model runs; auto takes a GPU if there is one.",
        ("DEVICE",),
    ),
    Option(
        "num_shard",
        values.integer(1),
        HARDWARE,
        "Number of GPUs for the model. This version uses one; more is a warning.",
        ("SM_NUM_GPUS", "NUM_SHARD"),
    ),
    Option(
        "num_threads",
        values.integer(1),
        HARDWARE,
        "Threads of one matrix product on the CPU.",
        ("NUM_THREADS",),
        shown_default="by the processor",
    ),
    Option(
        "kv_cache_memory_fraction",
        values.fraction(),
        HARDWARE,
        "Share of the memory left after loading that keys and values may take.",
        ("KV_CACHE_MEMORY_FRACTION", "CUDA_MEMORY_FRACTION"),
        ("--cuda-memory-fraction",),
    ),
    Option(
        "kv_cache_memory_bytes",
        values.SIZE,
        HARDWARE,
        "Memory for keys and values, instead of a share.",
        ("KV_CACHE_MEMORY_BYTES",),
        shown_default="by the share",
    ),
    Option(
        "compute_type",
        values.TEXT,
        HARDWARE,
        "The x-compute-type header of the answers.",
        ("COMPUTE_TYPE",),
        shown_default="the device",
    ),
    Option("host", values.HOST, SERVER, "Address to listen on.", ("HOST",), ("--hostname",)),
    Option(
        "port",
        values.integer(1, 65535),
        SERVER,
        "Port to listen on.",
        ("SAGEMAKER_BIND_TO_PORT", "PORT"),
        ("-p",),
    ),
    Option(
        "num_workers",
        values.integer(1, 256),
        SERVER,
        "HTTP processes. They hold no model.",
        ("NUM_WORKERS",),
        shown_default="by the number of cores, at most 2 without a GPU",
    ),
    Option(
        "graceful_timeout_s",
        values.integer(0, 3600),
        SERVER,
        "Seconds for running requests to finish after SIGTERM. SageMaker kills after 30.",
        ("GRACEFUL_TIMEOUT_S", "GRACEFUL_TERMINATION_TIMEOUT"),
        ("--graceful-termination-timeout",),
    ),
    Option(
        "max_runner_restarts",
        values.integer(0),
        SERVER,
        "How often a crashed runner is started again within ten minutes before serve gives up.",
        ("MAX_RUNNER_RESTARTS",),
    ),
    Option(
        "log_level",
        values.LOG_LEVEL,
        SERVER,
        "How much is logged.",
        ("SAGEMAKER_CONTAINER_LOG_LEVEL", "LOG_LEVEL"),
    ),
    Option(
        "log_format",
        values.choice("text", "json"),
        SERVER,
        "One line of text or one JSON object per event, on stderr.",
        ("LOG_FORMAT",),
    ),
    Option(
        "json_output",
        values.BOOLEAN,
        SERVER,
        "true is the same as --log-format json (TGI's name).",
        ("JSON_OUTPUT",),
        shown_default="false",
    ),
    Option(
        "print_examples",
        values.BOOLEAN,
        SERVER,
        "Print example calls once the model is ready.",
        ("PRINT_EXAMPLES",),
    ),
)

UNSUPPORTED_ENVIRONMENT = (
    "KV_CACHE_DTYPE",
    "LORA_ADAPTERS",
    "MAX_BATCH_TOTAL_TOKENS",
    "ROPE_FACTOR",
    "ROPE_SCALING",
    "SPECULATE",
)
"""TGI reads these and they would change answers or memory; one that is set is remarked on."""
