"""Record a few problems' groups during a run, and make one HTML page to step through them.

`train(..., record=Recorder(folder))` records, `page(folder)` makes the page and needs no model.
"""

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from jinja2 import Environment
from markupsafe import Markup

from grpo_kit.course.viewer import group_html
from grpo_kit.flow import FlowGRPO, OfflineTraces
from grpo_kit.rewards import question_text
from grpo_kit.runs import REPLAY
from grpo_kit.self_verification import ONE_UPDATE
from grpo_kit.training import PromptBatches
from grpo_kit.visible import visible

TEMPLATE = Path(__file__).parent / "templates" / "replay.html.j2"


class Recorder:
    """Samples the groups of a few problems as a run goes: `train(..., record=Recorder(folder))`.

    It writes `replay.jsonl` into `output_dir`, the run's folder: a line per recorded step, with the
    groups as `viewer` shows them. Its random numbers are its own, the same at each step, and leave
    the run alone; but a reward that remembers answers (a judge's cache) remembers these, too.

    every: steps from one record to the next, besides the first and the last; None = a fifteenth of
    the run. problems: how many, the first of the task's.
    """

    def __init__(self, output_dir: str | Path, every: int | None = None, problems: int = 4):
        self.file, self.every, self.problems = Path(output_dir) / REPLAY, every, problems

    @torch.no_grad()
    def __call__(self, prompts: PromptBatches, source: Any, step: int, last: bool) -> None:
        if isinstance(source, (FlowGRPO, OfflineTraces)):
            raise ValueError("episodes of several turns are not recorded: leave `record` out.")
        config, task = prompts.config, prompts.task
        if step % (self.every or max(1, config.max_steps // 15)) and not last:
            return
        rows = list(task.train.select(range(min(self.problems, len(task.train)))))
        chosen = prompts.of(rows, prompts.rewards)
        size = {"generation_batch_size": len(rows) * config.num_generations}
        chosen.config = replace(config, **ONE_UPDATE, **size, dynamic_sampling_rounds=0)
        state = SimpleNamespace(global_step=step, max_steps=config.max_steps)
        state.progress = min(step / config.max_steps, 1.0)
        with torch.random.fork_rng(devices=[]):  # a reward's, perhaps
            groups = _groups(chosen, state)
        with open(self.file, "a", encoding="utf-8") as file:  # a kill may have cut the line before
            file.write("\n" + json.dumps({"step": step, "groups": groups}))


def _groups(prompts: PromptBatches, state: Any) -> list[dict]:
    """Sample a group for each row, as `group_html` takes it."""
    (batch,) = prompts(torch.Generator().manual_seed(prompts.seed), state, {})
    size, decode, groups = prompts.config.num_generations, prompts.policy.tokenizer.decode, []
    tokens = [[decode([token]) for token in ids] for ids in batch.rollouts.completion_lists()]
    for start in range(0, len(tokens), size):
        group, row = slice(start, start + size), batch.examples[start]
        groups.append({
            "prompt": f"{question_text(row['prompt'])} (right: {row.get('answer')})",
            "tokens": tokens[group],
            "rewards": [None if x != x else x for x in batch.rewards[group].tolist()],
            "advantages": batch.advantages[group].tolist(),
        })  # fmt: skip
    return groups


def page(folder: str | Path) -> str:
    """Return the replay of the run in `folder`, one HTML file that loads nothing.

    Raises ValueError where there is no recording, or one that cannot be read.
    """
    folder, frames = Path(folder), {}
    try:
        for line in (folder / REPLAY).read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # empty, or cut by a kill
                continue
            views = "\n".join(group_html(**group) for group in record["groups"])
            frames[int(record["step"])] = Markup(views)  # of a step that comes twice, the later
    except FileNotFoundError:
        remedy = "record one by `grpo-kit train --replay` or `train(..., record=Recorder(FOLDER))`"
        raise ValueError(f"{folder} holds no {REPLAY} of a run: {remedy}.") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{folder / REPLAY} cannot be read ({type(error).__name__}: {error})"
        raise ValueError(f"{problem}: record the run anew.") from error
    if not frames:
        raise ValueError(f"{folder / REPLAY} holds no whole step: record the run anew.")
    template = TEMPLATE.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.S)[1]  # the only one that may run
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Environment(autoescape=True).from_string(template).render(
        title=visible(folder.resolve().name), frames=sorted(frames.items()), allowed=allowed
    )  # fmt: skip
