"""Checks the runner on a GPU (or, with tiny shapes, on a CPU) in one command, under four minutes.

    python scripts/gpu_check.py            # 0.1B, 1B and 8B Llama shapes in bfloat16
    python scripts/gpu_check.py --tiny     # seconds, any machine; what the tests run

For each shape, with random weights made on the device: (1) greedy tokens of the paged engine in
batches of 1, 8 and 64 against transformers' own forward over the same tokens; (2) decode speed
against the time the memory takes to read the weights; (3) the same load through transformers'
continuous batching. Prints a table; the last line is one JSON object. Exit code 1 when a token
differs by more than rounding.

Imports torch and transformers only: the machine it runs on may have nothing else.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from handler.runner import attention
from handler.runner.engine import Engine, EngineLimits
from handler.runner.model import PagedModel
from handler.runner.sequence import Sequence

PROMPT_TOKENS = 128
CHECKED_BATCHES = (1, 8, 64)
TOLERANCE_ULPS = 4
"""How far below the best logit, in units of its last place, a chosen token may lie: two kernels
round differently, and random weights make near ties."""


@dataclass(frozen=True)
class Shape:
    """A Llama of some size."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int

    def config(self, dtype: torch.dtype) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            eos_token_id=None,
            dtype=dtype,
        )


SHAPES = [
    Shape("0.1B", 576, 30, 9, 3, 1536, 49152),
    Shape("1B", 2048, 16, 32, 8, 8192, 128256),
    Shape("8B", 4096, 32, 32, 8, 14336, 128256),
]
TINY_SHAPES = [Shape("tiny", 64, 2, 4, 2, 96, 320)]


@dataclass
class Row:
    """One line of the table. Speeds are output tokens per second."""

    shape: str
    batch: int
    equal: float
    """Share of tokens that transformers' forward would choose too, up to rounding."""
    decode: float
    step_ms: float
    weights_ms: float
    """Time to read the weights once at the measured bandwidth: the floor of a step."""
    transformers_cb: float | None
    attention: str


def main() -> int:
    arguments = _arguments()
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.cpu else "cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    deadline = time.monotonic() + arguments.seconds
    bandwidth = measure_bandwidth(device, 2**26 if arguments.tiny else 2**31)
    print(f"{describe(device)}, {dtype}, read bandwidth {bandwidth / 1e9:.0f} GB/s")
    rows: list[Row] = []
    for shape in TINY_SHAPES if arguments.tiny else SHAPES:
        rows += check_shape(shape, device, dtype, bandwidth, arguments.new_tokens, deadline)
    print_table(rows)
    passed = bool(rows) and all(row.equal == 1.0 for row in rows)
    result = {"device": describe(device), "bandwidth": bandwidth, "passed": passed}
    print(json.dumps({**result, "rows": [asdict(row) for row in rows]}))
    return 0 if passed else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for any machine")
    parser.add_argument("--cpu", action="store_true", help="the CPU even where a GPU is")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=200, help="start no check after this")
    return parser.parse_args()


def describe(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second that a sum over a large tensor reads; the best of a few runs."""
    data = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    best = 0.0
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        data.sum()
        synchronize(device)
        best = max(best, num_bytes / (time.perf_counter() - start))
    return best


def make_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        make = AutoModelForCausalLM.from_config
        model: PreTrainedModel = make(shape.config(dtype), dtype=dtype)  # type: ignore[no-untyped-call]
    model.train(False)
    # The usual initialisation gives nearly flat logits; a larger head makes choices clear.
    torch.nn.init.normal_(model.get_output_embeddings().weight, 0.0, 0.5)  # type: ignore[no-untyped-call]
    return model


def check_shape(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    bandwidth: float,
    new_tokens: int,
    deadline: float,
) -> list[Row]:
    """All batches of one shape; what the time does not allow is left out and said."""
    if time.monotonic() > deadline:
        print(f"{shape.name}: left out, no time")
        return []
    attention.register()
    model = make_model(shape, device, dtype)
    looked_up = model.get_input_embeddings().weight.numel()  # type: ignore[operator]
    weights = (sum(p.numel() for p in model.parameters()) - looked_up) * dtype.itemsize
    rows = []
    for batch in CHECKED_BATCHES:
        model.set_attn_implementation(attention.NAME)
        sequences, speed, name = run_engine(PagedModel(model), batch, new_tokens)
        model.set_attn_implementation("sdpa")
        equal = share_equal(model, sequences)
        in_time = time.monotonic() < deadline
        rival = run_transformers_cb(model, sequences, new_tokens) if in_time else None
        step_ms = 1e3 * batch / speed
        floor_ms = 1e3 * weights / bandwidth
        rows.append(Row(shape.name, batch, equal, speed, step_ms, floor_ms, rival, name))
    return rows


def run_engine(paged: PagedModel, batch: int, new_tokens: int) -> tuple[list[Sequence], float, str]:
    """Greedy sequences, decode speed (prompts and first calls not counted), attention's name."""
    vocabulary = paged.model.config.vocab_size
    total = PROMPT_TOKENS + new_tokens
    pages = batch * -(-total // paged.page_size) + 1
    limits = EngineLimits(total, total - 1, batch, 8192, pages)
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(0, vocabulary, (batch, PROMPT_TOKENS), generator=generator).tolist()
    speed = 0.0
    for _ in range(2):  # the first pass warms up
        engine = Engine(paged, frozenset(), limits)
        sequences = [Sequence(str(i), list(p), new_tokens) for i, p in enumerate(prompts)]
        for sequence in sequences:
            engine.add(sequence)
        while any(s.num_generated == 0 for s in sequences):
            engine.step()
        synchronize(paged.device)
        done = sum(s.num_generated for s in sequences)
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        synchronize(paged.device)
        speed = (batch * new_tokens - done) / (time.perf_counter() - start)
    return sequences, speed, paged.cache.name


@torch.inference_mode()
def share_equal(model: Any, sequences: list[Sequence]) -> float:
    """Share of generated tokens that the model's own forward finds best, up to rounding."""
    good = total = 0
    for sequence in sequences:
        tokens = torch.tensor([sequence.tokens], device=model.device)
        logits = model(tokens, use_cache=False).logits[0, sequence.num_prompt - 1 : -1].float()
        best = logits.amax(dim=-1)
        chosen = logits.gather(-1, tokens[0, sequence.num_prompt :, None])[:, 0]
        ulp = best.abs() * torch.finfo(model.dtype).eps
        good += int((best - chosen <= TOLERANCE_ULPS * ulp).sum())
        total += chosen.numel()
    return good / total


def run_transformers_cb(model: Any, sequences: list[Sequence], new_tokens: int) -> float | None:
    """Decode speed of the same prompts through transformers' continuous batching.

    Counted like ours, from the moment every sequence has its first token. None where it cannot run.
    """
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1
    )
    prompts = [s.tokens[: s.num_prompt] for s in sequences]
    memory = ContinuousBatchingConfig(num_blocks=2 * len(prompts) + 8, max_batch_tokens=8192)
    try:
        outputs = model.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=memory,
            record_timestamps=True,
        )
        times = [output.timestamps for output in outputs.values()]
        begun = max(one[0] for one in times)
        later = [t for one in times for t in one if t > begun]
        return float(len(later) / (max(later) - begun))
    except Exception as error:  # noqa: BLE001  the comparison is optional, the check is not
        print(f"transformers' continuous batching did not run: {error!r}")
        return None


def print_table(rows: list[Row]) -> None:
    print("shape  batch  equal   tokens/s  step ms  weights ms  transformers CB  attention")
    for row in rows:
        rival = "-" if row.transformers_cb is None else f"{row.transformers_cb:.0f}"
        print(
            f"{row.shape:<6} {row.batch:>5}  {row.equal:>5.1%} {row.decode:>9.0f} "
            f"{row.step_ms:>8.2f}  {row.weights_ms:>10.2f}  {rival:>15}  {row.attention}"
        )


if __name__ == "__main__":
    sys.exit(main())
