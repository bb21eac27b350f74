"""Record a few problems' groups during a run, and make one HTML file of them to drag through.

`Recorder` is what `train` takes as `record`; `page` needs no model. "Then" is a token's probability
under the policy that sampled it, "now" under the one that the run ended with: so each answer shows
what the rest of the training made of it. `python -m grpo_kit.course.replay` makes the replays that
the course ships.
"""

import base64
import copy
import hashlib
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from jinja2 import Environment
from torch import Tensor

from grpo_kit import flow
from grpo_kit.course.doctor import Log, read_log
from grpo_kit.course.plots import CURVE_LABELS
from grpo_kit.flow import Episode, FlowGRPO, Memory, Turn
from grpo_kit.generation import Rollouts, completion_logps
from grpo_kit.models import Policy
from grpo_kit.paths import data_dir, make_output_dir, write_atomic
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward, format_reward, question_text
from grpo_kit.rewards.scoring import reward_names
from grpo_kit.runs import REPLAY
from grpo_kit.self_verification import ONE_UPDATE
from grpo_kit.tasks.tool_questions import tool_questions
from grpo_kit.training import PromptBatches, train
from grpo_kit.visible import shortened, visible

TEMPLATE = Path(__file__).parent / "templates" / "replay.html.j2"
CURVES = {"reward": "reward", "held-out": "eval/pass@1", "entropy": "entropy"}  # name -> label


class Recorder:
    """Samples the groups of a few problems as a run goes: `train(..., record=Recorder(folder))`.

    It writes `replay.jsonl` into `output_dir`, the run's: a line per recorded step, and at the end
    another, with the last policy's log-probabilities. Its random numbers are its own, the same at
    each step. Rewards that remember what they scored (a judge's cache) remember these answers, too.

    every: steps from one record to the next, besides the first and the last; None = `eval_steps`
    or, without evaluations between, a tenth of the run. problems: how many train and test rows.
    """

    def __init__(self, output_dir: str | Path, every: int | None = None, problems: int = 2):
        self.file, self.every, self.problems = Path(output_dir) / REPLAY, every, problems

    @torch.no_grad()
    def __call__(self, prompts: PromptBatches, source: Any, step: int, last: bool) -> None:
        config, task = prompts.config, prompts.task
        every = self.every or config.eval_steps or max(1, config.max_steps // 10)
        if step % every and not last:
            return
        columns, rows = task.train.column_names, []
        for split in (task.train, task.test):
            if set(columns) <= set(split.column_names):  # rewards may need each
                first = split.select_columns(columns).select(range(min(self.problems, len(split))))
                rows.append(list(first))
        known, rows = rows[0], sum(rows, [])
        chosen = prompts.of(rows, prompts.rewards)
        size = {"generation_batch_size": len(rows) * config.num_generations}
        chosen.config = replace(config, **ONE_UPDATE, **size, dynamic_sampling_rounds=0)
        state = SimpleNamespace(global_step=step, max_steps=config.max_steps)
        state.progress = min(step / config.max_steps, 1.0)
        with torch.random.fork_rng(devices=[]):  # a reward's, perhaps
            generator = torch.Generator().manual_seed(prompts.seed)
            episodes, rewards, advantages = _sampled(chosen, source, generator, state)
        names = reward_names(prompts.rewards)
        answers = []
        scored = zip(episodes, rewards.tolist(), advantages.tolist(), strict=True)
        for one, scores, advantage in scored:
            answers.append({
                "split": "training" if one.row in known else "held-out",
                "question": question_text(one.row["prompt"]), "right": str(one.row.get("answer")),
                "reward": one.reward, "rewards": dict(zip(names, scores, strict=True)),
                "advantage": round(advantage, 3), "output": one.output or "",
                "stopped": one.stopped, "turns": _turns(one, prompts.policy),
            })  # fmt: skip
        self._append(step, size=config.num_generations, answers=answers)
        for at, record in _records(self.file.parent).items() if last else ():
            turns = [turn for answer in record["answers"] for turn in answer["turns"]]
            self._append(at, now=_logps(prompts.policy, turns, config.temperature))

    def _append(self, step: int, **recorded: Any) -> None:
        with open(self.file, "a") as file:  # a kill may have cut the line before
            file.write("\n" + json.dumps({"step": step, **recorded}))


def _sampled(
    prompts: PromptBatches, source: Any, generator: torch.Generator, state: Any
) -> tuple[list[Episode], Tensor, Tensor]:
    """A group of each row: N episodes, answers as such of one turn; (N, R) rewards; advantages."""
    if isinstance(source, flow.OfflineTraces):
        source = source.flow
    if isinstance(source, FlowGRPO):
        ours, roles = copy.copy(source), ("executor", "verifier", "generator")
        forgetful = {name: getattr(source.system, name).forgetful() for name in roles}
        ours.prompts, ours.system = prompts, replace(source.system, **forgetful)
        episodes, rewards, _ = ours.episodes(generator, state)
        return episodes, rewards, ours.advantages(episodes)
    (batch,) = prompts(generator, state, {})
    sampled, episodes = batch.rollouts, []
    for i, ids in enumerate(sampled.completion_lists()):
        logps, nats = (x[i, : len(ids)].tolist() for x in (sampled.logps, sampled.entropies))
        asked = sampled.prompt_ids[int(sampled.prompt_index[i])]
        turn = Turn(asked, ids, logps, entropies=nats)
        episodes.append(Episode(i, batch.rewards[i].item(), [turn], batch.examples[i]))
    return episodes, batch.rewards_per_func, batch.advantages


def _turns(episode: Episode, policy: Policy) -> list[dict]:
    """An episode's turns as JSON has them; of an answer the one, without a memory."""
    decode, steps, turns = policy.tokenizer.decode, episode.memory.steps, []
    for t, turn in enumerate(episode.turns):
        turns.append({
            "prompt_ids": turn.prompt_ids, "ids": turn.completion_ids,
            "tokens": [decode([token]) for token in turn.completion_ids],
            "then": _rounded(turn.logprobs), "entropies": _rounded(turn.entropies),
        })  # fmt: skip
        for step in steps[t : t + 1]:
            turns[-1] |= {"request": decode(turn.prompt_ids), "memory": str(Memory(steps[:t]))}
            turns[-1] |= {"call": step.call, "result": step.result, "verdict": step.verdict}
    return turns


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]


def _logps(policy: Policy, turns: list[dict], temperature: float) -> list[list[float]]:
    """`policy`'s log-probabilities of the tokens of each turn."""
    asked, ids = ([turn[name] for turn in turns] for name in ("prompt_ids", "ids"))
    rollouts, pad = Rollouts.given(asked, ids, policy), policy.pad_token_id
    with policy.autocast():
        logps, _ = completion_logps(
            policy.model, rollouts, temperature=temperature, pad_token_id=pad
        )
    return [_rounded(row[: len(own)]) for row, own in zip(logps.tolist(), ids, strict=True)]


# --- the page -------------------------------------------------------------------------------------


def _records(folder: Path) -> dict[int, dict]:
    """What was recorded, by step; of a step that comes twice, after a kill, the later."""
    records: dict[int, dict] = {}
    for line in (folder / REPLAY).read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # empty, or cut by a kill
            continue
        if "answers" in record:
            records[record["step"]] = record
            continue
        answers = records[record["step"]]["answers"]
        turns = (turn for answer in answers for turn in answer["turns"])
        for turn, now in zip(turns, record["now"], strict=True):
            turn["now"] = now
    return dict(sorted(records.items()))


def page(folder: str | Path) -> str:
    """The replay of the run in `folder`, one HTML file that loads nothing.

    Raises ValueError where there is no recording, or one that cannot be read.
    """
    folder, texts = Path(folder), {}
    try:
        records = _records(folder)
        sizes, frames = {record["size"] for record in records.values()}, []
        for record in records.values():
            frames.append(_packed(record["answers"], texts))
        data: dict = {"steps": list(records), "size": sizes.pop(), "frames": frames}
    except FileNotFoundError:
        remedy = "record one by `grpo-kit train --replay` or `train(..., record=Recorder(FOLDER))`"
        raise ValueError(f"{folder} holds no {REPLAY} of a run: {remedy}.") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{folder / REPLAY} cannot be read ({type(error).__name__}: {error})"
        raise ValueError(f"{problem}: record the run anew.") from error
    log, curves = Log(read_log(folder)), []
    for name, metric in CURVES.items():
        points = [p for p in zip(*log.series(name), strict=True) if math.isfinite(p[1])]
        title, unit = CURVE_LABELS[metric]
        curves += [{"title": title, "unit": unit, "points": points}] if points else []
    template = TEMPLATE.read_text(encoding="utf-8")
    allowed = {  # by the policy in the page's head: these two texts and nothing else
        tag: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for tag, text in re.findall(r"<(script|style)>(.*?)</\1>", template, re.S)
    }
    # ASCII alone, and as an escape "<" begins no tag
    text = json.dumps(data | {"curves": curves, "texts": list(texts)}, separators=(",", ":"))
    return Environment(autoescape=True).from_string(template).render(
        title=visible(folder.resolve().name), data=text.replace("<", "\\u003c"), **allowed
    )  # fmt: skip


def _packed(value: Any, texts: dict[str, int]) -> Any:
    """JSON with each text as its place in `texts`, lists of nats in thousandths, and no ids."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in ("ids", "prompt_ids")}
        return {visible(name): _packed(one, texts) for name, one in kept.items()}
    if isinstance(value, list):
        return [round(1000 * x) if isinstance(x, float) else _packed(x, texts) for x in value]
    if isinstance(value, str):
        return texts.setdefault(visible(shortened(value)), len(texts))
    return None if value != value else value  # NaN: not scored


# --- what the course ships ------------------------------------------------------------------------


def ship(output_dir: str | Path, work: str | Path = "runs/replays") -> None:
    """Train like notebooks 01 and 06 on profile `tiny`, in `work`; write the replays of both."""
    torch.set_num_threads(1)
    profile, work, output_dir = PROFILES["tiny"], Path(work), make_output_dir(output_dir)
    config = replace(profile.config, loss_type="grpo", save_steps=10, eval_prompts=0)
    common = {"seed": 0, "resume": True}

    train(
        profile.load_policy(), profile.load_task(), [accuracy_reward, format_reward],
        replace(config, max_steps=30, eval_steps=5, eval_prompts=64), **common,
        output_dir=work / "01_basic_grpo", record=Recorder(work / "01_basic_grpo", every=2),
    )  # fmt: skip
    changes = {"max_steps": 16, "eval_steps": 4, "learning_rate": 3e-4}
    changes |= {"generation_batch_size": 64, "max_completion_length": 48}
    config, task, policy = replace(config, **changes), tool_questions(), profile.load_policy()
    system = profile.load_agents(policy)
    measured = {"system": system, "dataset": task.test, "config": config, "questions": 48}
    train(
        policy, task, [accuracy_reward], config, output_dir=work / "06_flow_grpo", **common,
        batch_source=partial(FlowGRPO, system=system),
        measure=partial(flow.evaluate_episodes, **measured),
        record=Recorder(work / "06_flow_grpo", every=2, problems=1),
    )  # fmt: skip
    for name in ("01_basic_grpo", "06_flow_grpo"):
        write_atomic(output_dir / f"{name}.html", page(work / name))


if __name__ == "__main__":
    ship(data_dir() / "replays")
