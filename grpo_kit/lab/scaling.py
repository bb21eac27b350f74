"""How the cost of a step grows with the model, the group and the length, beside TRL's.

`grpo-kit bench --scaling`. The models have random weights, so that completions are long. Beside a
step's seconds stands the limit: those of `plan` with this machine's measured bandwidth and
arithmetic, if all of both were reached.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.stats import linregress
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from grpo_kit.config import GRPOConfig
from grpo_kit.lab.bench import DEVICE, TRAINERS, compare_steps, machine, now, step_config, write
from grpo_kit.lab.planner import FIELDS, GPU, MODELS, plan, shape_of
from grpo_kit.models import half_of
from grpo_kit.paths import data_dir, make_output_dir, write_atomic
from grpo_kit.profiles import Profile

TINY, LARGE = "0.8 M", "1.5 B"  # the latter has the shape of Qwen2.5-1.5B, on a GPU only
SIZES = {  # as planner.FIELDS: hidden size, layers, heads, heads of keys and values, MLP
    "0.3 M": (64, 4, 4, 2, 256),
    TINY: (128, 4, 4, 2, 384),
    "3 M": (256, 4, 4, 2, 768),
    "10 M": (384, 6, 6, 2, 1152),
    "30 M": (512, 10, 8, 2, 1536),
}
GROUPS = (4, 8, 16, 32, 64)
LENGTHS = (64, 128, 256, 512, 1024)
AXES = {
    "parameters": "parameters of the model",
    "num_generations": "completions a group, 128 in all",
    "max_completion_length": "most tokens a completion, 16 of them",
}


def points(quick: bool = False, cuda: bool = False) -> list[tuple[str, str, GRPOConfig]]:
    """(axis, size, config) of every measurement; on a GPU one of a real model's size, too."""
    if quick:
        return [("parameters", size, step_config(3, 4, 8, 16)) for size in [*SIZES][:3]]
    sizes = [("parameters", size, step_config(3, 8, 64, 64)) for size in SIZES]
    groups = [("num_generations", TINY, step_config(3, group, 128, 64)) for group in GROUPS]
    lengths = [("max_completion_length", TINY, step_config(3, 8, 16, most)) for most in LENGTHS]
    return sizes + groups + lengths + [("real size", LARGE, step_config(3, 8, 64, 256))] * cuda


def run(output_dir: Path, quick: bool = False) -> dict:
    """Measure every point, write `scaling.json`, its report and its figure, return the numbers."""
    output_dir, models = make_output_dir(output_dir), {}
    result = {"machine": machine(), "limits": measure_limits(), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        for axis, size, config in points(quick, DEVICE == "cuda"):
            models[size] = models.get(size) or make_model(Path(folder) / size, size)
            group, most = config.num_generations, config.max_completion_length
            print(f"{axis}: {size}, {group} a group, {most} tokens", flush=True)
            step = compare_steps(models[size], output_dir, config)
            result["rows"].append({
                "axis": axis,
                "size": size,
                "parameters": shape_of(str(models[size])).parameters,
                "num_generations": group,
                "limit": limit_of(models[size], config, result["limits"], step),
                **step,
            })  # fmt: skip
            result["exponents"] = exponents(result["rows"])
            write_atomic(output_dir / "scaling.json", json.dumps(result, indent=1))
    write(output_dir / "scaling", result, report(result), figure(result))
    return result


def make_model(folder: Path, size: str) -> Path:
    """A model of that size with random weights and the tiny base's tokenizer, saved."""
    tokenizer = AutoTokenizer.from_pretrained(data_dir() / "tiny-base")
    sizes = SIZES.get(size) or MODELS["Qwen/Qwen2.5-1.5B"][1:]
    config = Qwen2Config(**{
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        **dict(zip(FIELDS, sizes, strict=False)),
    })  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def measure_limits() -> dict[str, float]:
    """This machine's bytes read and floating-point operations per second, in training's type."""
    cuda = DEVICE == "cuda"
    n, dtype = (8192, half_of(DEVICE)) if cuda else (1536, torch.float32)
    source = torch.ones(2**28 if cuda else 2**26, device=DEVICE)  # more than a cache holds
    a, b = torch.randn(2, n, n, device=DEVICE, dtype=dtype)

    def seconds(function) -> float:
        started = now()
        function()
        return now() - started

    return {
        "bytes_per_second": source.numel() * 4 / min(seconds(source.sum) for _ in range(6)),
        "flops_per_second": 2 * n**3 / min(seconds(lambda: a @ b) for _ in range(6)),
    }


def limit_of(policy_dir: Path, config: GRPOConfig, limits: dict, step: dict) -> dict[str, float]:
    """The least seconds that generation and update of a step can take here, by `plan`."""
    bandwidth, tflops = limits["bytes_per_second"] / 1e9, limits["flops_per_second"] / 1e12
    least = plan(
        Profile("bench", "this machine", config, policy=str(policy_dir), device=DEVICE),
        gpu=GPU("this machine", 1.0, bandwidth, tflops),
        prompt_length=round(step["prompt_length"]),
        mean_share=step["mean_length"] / config.max_completion_length,
        reached=1.0,
    )
    return {**least.seconds, "step": sum(least.seconds.values())}


def exponents(rows: list[dict]) -> dict[str, dict[str, dict[str, float]]]:
    """axis -> trainer -> b and R² of seconds a step ~ axis^b, fitted to the logarithms."""
    fits: dict[str, dict[str, dict[str, float]]] = {}
    for axis in AXES:
        of_axis = [row for row in rows if row["axis"] == axis]
        for kind in TRAINERS if len(of_axis) > 2 else ():
            y = np.log([row["median_seconds"][kind]["step"] for row in of_axis])
            fit = linregress(np.log([row[axis] for row in of_axis]), y)
            power = {"power": float(fit.slope), "r2": float(fit.rvalue**2)}
            fits.setdefault(axis, {})[kind] = power
    return fits


def report(result: dict) -> str:
    """The numbers as Markdown."""
    where, rows = result["machine"], result["rows"]
    lines = [
        f"{where['processor']}, accelerator: {where['accelerator']}, {rows[0]['threads']} "
        f"thread(s); median of {rows[0]['steps']} steps.",
        "",
        "| model | group | tokens | completions | TRL (s) | kit (s) | TRL / kit | kit's tokens a "
        "second | of the limit | peak MiB, TRL | kit |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        theirs, ours = (row["median_seconds"][kind]["step"] for kind in TRAINERS)
        per_second = row["completions"] * row["mean_length"] / ours
        lines.append(
            f"| {row['size']} | {row['num_generations']} | {row['mean_length']:.0f} | "
            f"{row['completions']} | {theirs:.2f} | {ours:.2f} | {theirs / ours:.2f} | "
            f"{per_second:,.0f} | {row['limit']['step'] / ours:.0%} | "
            f"{row['peak_mib']['trl']:.0f} | {row['peak_mib']['kit']:.0f} |"
        )
    lines.append("")
    for axis, fits in result["exponents"].items():
        powers = [f"{of['power']:.2f} ({kind}, R² {of['r2']:.2f})" for kind, of in fits.items()]
        name = AXES[axis].split(",")[0]
        lines.append(f"Seconds a step grow as {name} to the power of {' and '.join(powers)}.")
    return "\n".join(lines) + "\n"


def figure(result: dict) -> Figure:
    """Seconds of a step over each axis, both trainers and the limit, on logarithmic scales."""
    columns = {**{f"median_seconds.{kind}.step": kind for kind in TRAINERS}, "limit.step": "limit"}
    rows = pd.json_normalize(result["rows"])
    drawing = Figure(figsize=(4 * len(result["exponents"]), 3.2), layout="constrained")
    panels = drawing.subplots(1, len(result["exponents"]), squeeze=False, sharey=True)[0]
    for panel, axis in zip(panels, result["exponents"], strict=True):
        curves = rows[rows["axis"] == axis].set_index(axis)[[*columns]].rename(columns=columns)
        curves.plot(ax=panel, loglog=True, style=["C1o-", "C0o-", "k:"], xlabel=AXES[axis])
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="seconds a step")
    return drawing
