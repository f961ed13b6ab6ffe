"""What the runner process is told at its start; `launch` writes it, `process` reads it.

Must not know: the environment (values arrive here already resolved), torch.
"""

import msgspec


class RunnerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything the runner needs. Passed as one JSON argument on its command line."""

    endpoint: str
    """Address of the ROUTER socket, `ipc://…`."""
    model_dir: str
    model_id: str
    """Name to report: the hub id, or the folder."""
    scratch_dir: str
    """Writable folder: serialised tokenizer, caches."""
    revision: str | None = None
    tokenizer_dir: str | None = None
    """Folder of the tokenizer where it is not `model_dir`."""
    tokenizer_config_path: str | None = None
    """A tokenizer_config.json that replaces the folder's."""
    chat_template: str | None = None
    """A file with a template that replaces all others (or the template itself)."""
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_batch_prefill_tokens: int | None = None
    """Prompt tokens computed in one step, at most."""
    max_batch_size: int | None = None
    """Sequences that run at once, at most."""
    max_concurrent_requests: int = 128
    """Sequences in flight (running and waiting), over all workers; one more is refused."""
    kv_cache_memory_fraction: float = 0.9
    """Share of the device memory that is free after loading, given to keys and values."""
    kv_cache_memory_bytes: int | None = None
    num_threads: int | None = None
    """Threads of one matrix product on the CPU."""
    log_level: str = "info"
    log_format: str = "text"
