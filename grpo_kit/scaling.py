"""How the cost of a step grows with the model, the group and the length, beside TRL's.

`grpo-kit bench --scaling`. Models have random weights, so that nearly every completion takes all
the tokens it may; only their sizes matter. Both trainers take turns in one process, as in `bench`.
Limits are those of this machine, measured before: a decode step reads all weights or computes 2 N
a row, an update computes 6 N a token.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import numpy as np

from grpo_kit.bench import TRAINERS, compare_steps, machine, step_peaks
from grpo_kit.config import GRPOConfig
from grpo_kit.paths import data_dir, make_output_dir, write_atomic
from grpo_kit.plan import Shape

# hidden size, layers, heads, heads of keys and values, width of the MLP
SIZES = {
    "0.3 M": (64, 4, 4, 2, 256),
    "0.8 M": (128, 4, 4, 2, 384),
    "3 M": (256, 4, 4, 2, 768),
    "10 M": (384, 6, 6, 2, 1152),
    "30 M": (512, 10, 8, 2, 1536),
}
GROUPS = (4, 8, 16, 32, 64)
LENGTHS = (64, 128, 256, 512, 1024)
TINY = "0.8 M"
AXES = {
    "parameters": "parameters of the model",
    "num_generations": "completions a group, of 128",
    "max_completion_length": "tokens a completion, of 16",
}


def points(quick: bool = False) -> list[tuple[str, str, GRPOConfig]]:
    """(axis, size, config) of every measurement."""

    def config(group: int, rows: int, length: int) -> GRPOConfig:
        return GRPOConfig(
            max_steps=4,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            num_generations=group,
            generation_batch_size=rows,
            max_completion_length=length,
        )

    wanted = [("parameters", size, config(8, 64, 64)) for size in SIZES]
    wanted += [("num_generations", TINY, config(group, 128, 64)) for group in GROUPS]
    wanted += [("max_completion_length", TINY, config(8, 16, length)) for length in LENGTHS]
    if quick:
        return [("parameters", size, config(4, 8, 16)) for size in ("0.3 M", "0.8 M")]
    return wanted


def run(output_dir: str | Path, quick: bool = False) -> dict:
    """Measure every point, write `scaling.json`, `scaling.md` and `scaling.png`; the numbers."""
    output_dir = make_output_dir(output_dir)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        limits = measure_limits()
        models = {size: make_model(Path(folder) / size.replace(" ", ""), size) for size in SIZES}
        for axis, size, config in points(quick):
            path, shape = models[size]
            print(f"{axis}: {size}, {config.num_generations} a group, "
                  f"{config.max_completion_length} tokens", flush=True)  # fmt: skip
            step = compare_steps(path, output_dir, config)
            step["peak_mib"] = step_peaks(path, output_dir, config)
            rows.append({
                "axis": axis,
                "size": size,
                "parameters": shape.parameters,
                "num_generations": config.num_generations,
                "max_completion_length": config.max_completion_length,
                "completions": config.generation_batch_size,
                "tokens": config.generation_batch_size * config.max_completion_length,
                "limit": limit_of(shape, config, limits),
                **step,
            })  # fmt: skip
            result = {"machine": machine(), "limits": limits, "rows": rows}
            result["exponents"] = exponents(rows)
            write_atomic(output_dir / "scaling.json", json.dumps(result, indent=1))
    write_atomic(output_dir / "scaling.md", report(result))
    figure(result).savefig(output_dir / "scaling.png", dpi=120)
    return result


def make_model(folder: Path, size: str) -> tuple[Path, Shape]:
    """A model of that size with random weights and the tiny base's tokenizer, saved."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(data_dir() / "tiny-base")
    hidden, layers, heads, kv_heads, intermediate = SIZES[size]
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, Shape.of(config)


def measure_limits() -> dict[str, float]:
    """Bytes a second that this machine reads, and floating-point operations that it computes."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.ones(2**26, device=device)  # 256 MiB, more than a cache holds
    a, b = torch.randn(2, 1536, 1536, device=device)

    def best(function, n: int = 5) -> float:
        taken = []
        for _ in range(n + 1):
            if device == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
        return min(taken)

    return {
        "bytes_per_second": source.numel() * 4 / best(source.sum),
        "flops_per_second": 2 * 1536**3 / best(lambda: a @ b),
    }


def limit_of(shape: Shape, config: GRPOConfig, limits: dict[str, float]) -> dict[str, float]:
    """The least seconds that generation and update of a step can take here, in float32."""
    rows, length = config.generation_batch_size, config.max_completion_length
    read = length * shape.parameters * 4 + rows * length**2 / 2 * shape.cache_bytes(4)
    computed = 2 * shape.parameters * rows * length
    generation = max(read / limits["bytes_per_second"], computed / limits["flops_per_second"])
    update = 3 * computed / limits["flops_per_second"]
    return {"generation": generation, "update": update, "step": generation + update}


def exponents(rows: list[dict]) -> dict[str, dict[str, float]]:
    """axis -> trainer -> b, of seconds a step ~ axis^b, by least squares of the logarithms."""
    found: dict[str, dict[str, float]] = {}
    for axis in AXES:
        of_axis = [row for row in rows if row["axis"] == axis]
        if len(of_axis) > 1:
            x = np.log([row[axis] for row in of_axis])
            found[axis] = {
                kind: float(
                    np.polyfit(x, np.log([r["median_seconds"][kind]["step"] for r in of_axis]), 1)[
                        0
                    ]
                )
                for kind in TRAINERS
            }
    return found


def report(result: dict) -> str:
    """The numbers as Markdown."""
    lines = [
        f"{result['machine']['processor']}, accelerator: {result['machine']['accelerator']}, "
        f"{result['rows'][0]['threads']} thread(s); median of {result['rows'][0]['steps']} steps.",
        "",
        "| model | group | tokens | completions | TRL (s) | kit (s) | TRL / kit | kit's tokens a "
        "second | of the limit | peak MiB, TRL | kit |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        theirs, ours = (row["median_seconds"][kind]["step"] for kind in TRAINERS)
        lines.append(
            f"| {row['size']} | {row['num_generations']} | {row['max_completion_length']} | "
            f"{row['completions']} | {theirs:.2f} | {ours:.2f} | {theirs / ours:.2f} | "
            f"{row['tokens'] / ours:,.0f} | {row['limit']['step'] / ours:.0%} | "
            f"{row['peak_mib']['trl']:.0f} | {row['peak_mib']['kit']:.0f} |"
        )
    lines += [""] + [
        f"Seconds a step grow as {AXES[axis].split(',')[0]} to the power of "
        + " and ".join(f"{power:.2f} ({kind})" for kind, power in powers.items())
        + "."
        for axis, powers in result["exponents"].items()
    ]
    return "\n".join(lines) + "\n"


def figure(result: dict):
    """Seconds of a step over each axis, both trainers and the limit, on logarithmic scales."""
    from matplotlib.figure import Figure

    axes_there = [axis for axis in AXES if axis in result["exponents"]]
    drawn = Figure(figsize=(4 * len(axes_there), 3.2), layout="constrained")
    panels = drawn.subplots(1, len(axes_there), squeeze=False)[0]
    for panel, axis in zip(panels, axes_there, strict=True):
        rows = [row for row in result["rows"] if row["axis"] == axis]
        x = [row[axis] for row in rows]
        for kind, colour in zip(TRAINERS, ("C1", "C0"), strict=True):
            y = [row["median_seconds"][kind]["step"] for row in rows]
            power = result["exponents"][axis][kind]
            panel.plot(x, y, "o-", color=colour, label=f"{kind}, ~ x^{power:.2f}")
        panel.plot(x, [row["limit"]["step"] for row in rows], ":", color="grey", label="limit")
        panel.set(xscale="log", yscale="log", xlabel=AXES[axis], ylabel="seconds a step")
        panel.grid(alpha=0.3, which="both")
        panel.legend()
    return drawn
