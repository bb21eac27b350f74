"""Where a step's time goes, by torch.profiler: `grpo-kit bench --profile`."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from grpo_kit import training
from grpo_kit.config import GRPOConfig
from grpo_kit.lab.bench import DEVICE, arithmetic, kit_steps, step_config
from grpo_kit.lab.records import where_it_ran
from grpo_kit.models import load_policy
from grpo_kit.paths import make_output_dir, write_atomic

PARTS = ("sample", "forward", "backward", "optimiser")  # of a step, where it is profiled


def profile_step(policy_dir: Path, config: GRPOConfig) -> list[dict]:
    """By part and operator: calls and milliseconds a step, by torch.profiler.

    "outside operators" is Python and what calls the operators; the profiler makes both longer.
    """

    def label(owner: Any, name: str, part: str):
        return mock.patch.object(owner, name, record_function(part)(getattr(owner, name)))

    steps = kit_steps(load_policy(policy_dir, device=DEVICE), config)
    next(steps)  # the warm-up
    with (
        label(training.backends, "generate", "sample"),
        label(training, "completion_logps", "forward"),
        label(torch.Tensor, "backward", "backward"),
        profile(activities=[ProfilerActivity.CPU]) as profiler,
    ):
        count = sum(1 for _ in steps)
    events, parts = profiler.events(), {"Optimizer.step#AdamW.step": "optimiser"}
    parts |= {part: part for part in PARTS}
    spans = [(e.time_range, parts[e.name]) for e in events if e.name in parts]
    rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for event in events:
        start = event.time_range.start
        part = next((part for span, part in spans if span.start <= start < span.end), None)
        row = rows[part, "outside operators" if event.name in parts else event.name]
        row[0] += 1 / count
        row[1] += event.self_cpu_time_total / 1e3 / count
    return [
        {"part": part, "operator": operator, "calls": calls, "milliseconds": ms}
        for (part, operator), (calls, ms) in sorted(rows.items(), key=lambda item: -item[1][1])
        if part
    ]


def run(output_dir: Path, policy_dir: Path) -> dict:
    """Profile three steps in both arithmetics; add them to `profile.json` under their commit."""
    path = make_output_dir(output_dir) / "profile.json"
    result, where = json.loads(path.read_text()) if path.exists() else {}, where_it_ran(DEVICE)
    for name, bf16 in (("float32", False), (arithmetic(), "auto")):
        config = replace(step_config(3, 8, 128, 64), bf16=bf16)
        result[f"{where['commit']} {name}"] = {**where, "rows": profile_step(policy_dir, config)}
    write_atomic(path, json.dumps(result, indent=1))
    return result


def report(result: dict, most: int = 4) -> str:
    """Milliseconds a step by part, and by the `most` operators of each, a column a profile."""
    import pandas as pd

    from grpo_kit.lab.summary import markdown_table

    columns = {
        name: pd.DataFrame(of["rows"]).groupby(["part", "operator"]).milliseconds.sum()
        for name, of in result.items()
    }
    table, lines = pd.concat(columns, axis=1).fillna(0.0), []
    for part in PARTS:
        own = table.loc[part].sort_values(table.columns[0], ascending=False)
        lines.append([f"**{part}**", *(f"**{value:.0f}**" for value in own.sum())])
        for operator, values in [*own.head(most).iterrows()]:
            lines.append([operator.removeprefix("aten::"), *(f"{value:.0f}" for value in values)])
        lines.append(["the rest", *(f"{value:.0f}" for value in own.iloc[most:].sum())])
    return markdown_table(["milliseconds per step", *table.columns], *lines)
