"""How a step's cost grows: `grpo-kit bench --scaling`.

The comparison of `bench` with larger models, groups and completions, beside the limit that `plan`
computes. Weights are random, so that completions are long.
"""

import json
import tempfile
from pathlib import Path

import torch

from grpo_kit.config import GRPOConfig
from grpo_kit.lab import bench
from grpo_kit.lab.bench import BASE, DEVICE, LARGE, SIZES, SMOL, TRAINERS, step_config
from grpo_kit.paths import data_dir, make_output_dir, write_atomic

AXES = {
    "parameters": "parameters of the model",
    "num_generations": "completions a group, 128 in all",
    "max_completion_length": "most tokens a completion, 16 of them",
}
REAL = "a real shape"  # an axis without a curve


def run(output_dir: Path) -> dict:
    """Measure every point; write `scaling.json` and `scaling.png`, and return the numbers."""
    from grpo_kit.lab.planner import shape_of

    path, rows = make_output_dir(output_dir) / "scaling.json", []
    result, threads = {"machine": bench.machine(), "rows": rows}, torch.get_num_threads()
    for axis, size, config in points():
        print(f"{axis}: {size}, {config.num_generations} a group", flush=True)
        torch.set_num_threads(2 if size == SMOL else threads)
        with tempfile.TemporaryDirectory() as folder:
            model, limits = make_model(Path(folder), size), measure_limits()
            step = bench.compare_steps(model, config, size)
            about = {"parameters": shape_of(folder).parameters, "size": size, "axis": axis}
            about |= {"num_generations": config.num_generations, "limits": limits}
            rows.append(about | {"limit": limit_of(model, config, limits, step)} | step)
        write_atomic(path, json.dumps(result, indent=1))
    torch.set_num_threads(threads)
    figure(rows).savefig(path.with_suffix(".png"), dpi=120)
    return result


def points() -> list[tuple[str, str, GRPOConfig]]:
    """(axis, size of the model, config) of every measurement."""
    grid = [size for size in SIZES if size not in (SMOL, LARGE)]
    sizes = [("parameters", size, step_config(3, 8, 64, 64)) for size in grid]
    groups = [("num_generations", BASE, step_config(3, 2**i, 128, 64)) for i in range(2, 7)]
    lengths = [("max_completion_length", BASE, step_config(3, 8, 16, 2**i)) for i in range(6, 11)]
    real = [(REAL, SMOL, step_config(3, 8, 64, 25))]
    if DEVICE == "cuda":
        real.append((REAL, LARGE, step_config(3, 8, 64, 256)))
    return sizes + groups + lengths + real


def make_model(folder: Path, size: str) -> Path:
    """A model of that size with random weights and the tiny base's tokenizer, saved."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape(size)).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def shape(size: str):
    """The config of a model of that size, with the tiny base's vocabulary."""
    from transformers import AutoConfig

    from grpo_kit.lab.planner import FIELDS

    tokenizer = _tokenizer()
    sizes = {"vocab_size": len(tokenizer)} | dict(zip(FIELDS, SIZES[size], strict=False))
    return AutoConfig.for_model(
        "llama" if size == SMOL else "qwen2", tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        max_position_embeddings=2048, **sizes,
    )  # fmt: skip


def _tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(data_dir() / "tiny-base")


def measure_limits() -> dict[str, float]:
    """This machine's bytes read and floating-point operations per second, in a step's type."""
    cuda = DEVICE == "cuda"
    n, dtype = 8192 if cuda else 1536, getattr(torch, bench.arithmetic())
    source = torch.ones(2**28 if cuda else 2**26, device=DEVICE)  # more than a cache holds
    a, b = torch.randn(2, n, n, device=DEVICE).to(dtype)

    def seconds(function) -> float:
        started = bench.now()
        function()
        return bench.now() - started

    return {
        "bytes_per_second": source.numel() * 4 / min(seconds(source.sum) for _ in range(6)),
        "flops_per_second": 2 * n**3 / min(seconds(lambda: a @ b) for _ in range(6)),
    }


def limit_of(policy_dir: Path, config: GRPOConfig, limits: dict, step: dict) -> dict[str, float]:
    """The least seconds that generation and update of a step can take here, by `plan`."""
    from grpo_kit.lab.planner import GPU, plan
    from grpo_kit.profiles import Profile

    bandwidth, tflops = limits["bytes_per_second"] / 1e9, limits["flops_per_second"] / 1e12
    least = plan(
        Profile("bench", config, policy=str(policy_dir), device=DEVICE),
        gpu=GPU("this machine", 1.0, bandwidth, tflops),
        prompt_length=round(step["prompt_length"]),
        mean_share=step["mean_length"] / config.max_completion_length,
        reached=1.0,
    )
    return {**least.seconds, "step": sum(least.seconds.values())}


def report(result: dict) -> str:
    """A line of text a measurement: TRL's and the kit's step, and what the kit reaches."""
    import pandas as pd

    rows = pd.json_normalize(result["rows"])
    trl, kit = (rows[f"median_seconds.{trainer}.step"] for trainer in TRAINERS)
    table = rows[["size", "num_generations", "completions", "mean_length"]].assign(**{
        "TRL (s)": trl, "kit (s)": kit, "TRL / kit": trl / kit,
        "tokens a second": rows["completions"] * rows["mean_length"] / kit,
        "share of the limit": rows["limit.step"] / kit,
        "sampling": rows["limit.generation"] / rows["median_seconds.kit.generation"],
        "update": rows["limit.update"] / rows["median_seconds.kit.update"],
        "TRL (MiB)": rows["peak_mib.trl"], "kit (MiB)": rows["peak_mib.kit"],
    })  # fmt: skip
    return f"{result['machine']['processor']}\n{table.round(2).to_string(index=False)}"


def figure(rows: list[dict]):
    """Seconds of a step over each axis, both trainers and the limit: a matplotlib figure."""
    import pandas as pd
    from matplotlib.figure import Figure

    columns = {**{f"median_seconds.{kind}.step": kind for kind in TRAINERS}, "limit.step": "limit"}
    drawing = Figure(figsize=(12, 3.2), layout="constrained")
    panels = drawing.subplots(1, len(AXES), sharey=True)
    for panel, (axis, label) in zip(panels, AXES.items(), strict=True):
        group = pd.json_normalize([row for row in rows if row["axis"] == axis])
        curves = group.set_index(axis)[[*columns]].rename(columns=columns)
        curves.plot(ax=panel, loglog=True, style=["C1o-", "C0o-", "k:"], xlabel=label)
        panel.set_xticks(curves.index, group["size"] if axis == "parameters" else curves.index)
        panel.set_xticks([], minor=True)
    panels[0].set(ylabel="seconds per step")
    return drawing
