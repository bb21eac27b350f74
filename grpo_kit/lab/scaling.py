"""How the cost of a step grows with the model, the group and the length, beside TRL's.

`grpo-kit bench --scaling`. Models have random weights, so that completions are long; only their
sizes matter. Both trainers take turns in one process, as in `bench`. Beside what a step took stands
the limit: what `plan` says of it with this machine's bandwidth and arithmetic, measured before, if
all of both were reached.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from scipy.stats import linregress

from grpo_kit.config import GRPOConfig
from grpo_kit.lab.bench import TRAINERS, compare_steps, machine, now, step_peaks
from grpo_kit.lab.planner import GPU, SHAPES, Shape, plan
from grpo_kit.paths import data_dir, make_output_dir, write_atomic
from grpo_kit.profiles import Profile

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
LARGE = "1.5 B"  # the shape of Qwen2.5-1.5B, on a GPU only
AXES = {
    "parameters": "parameters of the model",
    "num_generations": "completions a group, 128 in all",
    "max_completion_length": "most tokens a completion, 16 of them",
}


def points(quick: bool = False, cuda: bool = False) -> list[tuple[str, str, GRPOConfig]]:
    """(axis, size, config) of every measurement; on a GPU one of a real model's size, too."""

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
    return wanted + [("real size", LARGE, config(8, 64, 256))] * cuda


def run(output_dir: str | Path, quick: bool = False) -> dict:
    """Measure every point, write `scaling.json`, `scaling.md` and `scaling.png`; the numbers."""
    import torch

    output_dir = make_output_dir(output_dir)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        limits = measure_limits()
        models: dict[str, Path] = {}
        for axis, size, config in points(quick, torch.cuda.is_available()):
            if size not in models:
                models[size] = make_model(Path(folder) / size.replace(" ", ""), size)
            print(f"{axis}: {size}, {config.num_generations} a group, "
                  f"{config.max_completion_length} tokens", flush=True)  # fmt: skip
            step = compare_steps(models[size], output_dir, config)
            step["peak_mib"] = step_peaks(models[size], output_dir, config)
            rows.append({
                "axis": axis,
                "size": size,
                "parameters": shape_at(models[size]).parameters,
                "num_generations": config.num_generations,
                "limit": limit_of(models[size], config, limits, step),
                **step,
            })  # fmt: skip
            result = {"machine": machine(), "limits": limits, "rows": rows}
            result["exponents"] = exponents(rows)
            write_atomic(output_dir / "scaling.json", json.dumps(result, indent=1))
    write_atomic(output_dir / "scaling.md", report(result))
    figure(result).savefig(output_dir / "scaling.png", dpi=120)
    return result


def make_model(folder: Path, size: str) -> Path:
    """A model of that size with random weights and the tiny base's tokenizer, saved."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(data_dir() / "tiny-base")
    hidden, layers, heads, kv_heads, intermediate = SIZES.get(size) or _shape(
        SHAPES["Qwen/Qwen2.5-1.5B"]
    )
    config = Qwen2Config(
        vocab_size=len(tokenizer) if size in SIZES else SHAPES["Qwen/Qwen2.5-1.5B"].vocab_size,
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
    return folder


def _shape(shape: Shape) -> tuple[int, int, int, int, int]:
    return (shape.hidden_size, shape.num_hidden_layers, shape.num_attention_heads,
            shape.num_key_value_heads, shape.intermediate_size)  # fmt: skip


def measure_limits() -> dict[str, float]:
    """Bytes a second that this machine reads, and floating-point operations that it computes.

    In the type that training computes in: float32 on a CPU, 16 bits on a GPU.
    """
    import torch

    from grpo_kit.models import half_of

    cuda = torch.cuda.is_available()
    device, n = ("cuda", 8192) if cuda else ("cpu", 1536)
    source = torch.ones(2**28 if cuda else 2**26, device=device)  # more than a cache holds
    a, b = torch.randn(2, n, n, device=device, dtype=half_of(device) if cuda else torch.float32)

    def best(function, times: int = 6) -> float:
        taken = []
        for _ in range(times):
            started = now()
            function()
            taken.append(now() - started)
        return min(taken)

    return {
        "bytes_per_second": source.numel() * 4 / best(source.sum),
        "flops_per_second": 2 * n**3 / best(lambda: a @ b),
    }


def limit_of(
    policy_dir: Path, config: GRPOConfig, limits: dict[str, float], step: dict
) -> dict[str, float]:
    """The least seconds that generation and update of a step can take here, by `plan`."""
    import torch

    here = GPU(
        "this machine", 1.0, limits["bytes_per_second"] / 1e9, limits["flops_per_second"] / 1e12
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = plan(
        Profile("bench", "this machine", config, policy=str(policy_dir), device=device),
        gpu=here,
        prompt_length=round(step["prompt_length"]),
        mean_share=step["mean_length"] / config.max_completion_length,
        reached=1.0,
    )
    return {**made.seconds, "step": sum(made.seconds.values())}


def shape_at(policy_dir: Path) -> Shape:
    """The shape of a saved model."""
    from transformers import AutoConfig

    return Shape.of(AutoConfig.from_pretrained(policy_dir))


def exponents(rows: list[dict]) -> dict[str, dict[str, dict[str, float]]]:
    """axis -> trainer -> b and R² of seconds a step ~ axis^b, by least squares of the logarithms.

    An R² far from 1 says that it is no power: small steps are all overhead.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for axis in AXES:
        of_axis = [row for row in rows if row["axis"] == axis]
        if len(of_axis) > 2:
            x = np.log([row[axis] for row in of_axis])
            found[axis] = {}
            for kind in TRAINERS:
                y = np.log([row["median_seconds"][kind]["step"] for row in of_axis])
                fit = linregress(x, y)
                found[axis][kind] = {"power": float(fit.slope), "r2": float(fit.rvalue**2)}
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
        a_second = row["completions"] * row["mean_length"] / ours
        lines.append(
            f"| {row['size']} | {row['num_generations']} | {row['mean_length']:.0f} | "
            f"{row['completions']} | {theirs:.2f} | {ours:.2f} | {theirs / ours:.2f} | "
            f"{a_second:,.0f} | {row['limit']['step'] / ours:.0%} | "
            f"{row['peak_mib']['trl']:.0f} | {row['peak_mib']['kit']:.0f} |"
        )
    lines += [""] + [
        f"Seconds a step grow as {AXES[axis].split(',')[0]} to the power of "
        + " and ".join(
            f"{fit['power']:.2f} ({kind}, R² {fit['r2']:.2f})" for kind, fit in fits.items()
        )
        + "."
        for axis, fits in result["exponents"].items()
    ]
    return "\n".join(lines) + "\n"


def figure(result: dict):
    """Seconds of a step over each axis, both trainers and the limit, on logarithmic scales."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    axes_there = [axis for axis in AXES if axis in result["exponents"]]
    drawn = Figure(figsize=(4 * len(axes_there), 3.2), layout="constrained")
    panels = drawn.subplots(1, len(axes_there), squeeze=False, sharey=True)[0]
    for panel, axis in zip(panels, axes_there, strict=True):
        rows = [row for row in result["rows"] if row["axis"] == axis]
        x = [row[axis] for row in rows]
        for kind, colour in zip(TRAINERS, ("C1", "C0"), strict=True):
            y = [row["median_seconds"][kind]["step"] for row in rows]
            power = result["exponents"][axis][kind]["power"]
            panel.plot(x, y, "o-", color=colour, label=f"{kind}, ~ x^{power:.2f}")
        panel.plot(x, [row["limit"]["step"] for row in rows], ":", color="grey", label="limit")
        panel.set(xscale="log", yscale="log", xlabel=AXES[axis])
        panel.set_xticks(x, [row["size"] if axis == "parameters" else row[axis] for row in rows])
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.yaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.3, which="both")
        panel.legend()
    panels[0].set(ylabel="seconds a step")
    return drawn
