"""Record a few problems' groups during a run, and make of them one HTML file to drag through.

`Recorder` is what `train` takes as `record`; `page` needs no model. "Then" is a token's probability
under the policy that sampled it, "now" under the policy that the run ended with: so each answer
says what the rest of the training made of it. `python -m grpo_kit.course.replay` makes the replays
that the course ships.
"""

import base64
import copy
import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from jinja2 import Environment

from grpo_kit.course.doctor import Log, read_log
from grpo_kit.course.plots import CURVE_LABELS
from grpo_kit.flow import (
    FlowGRPO,
    Memory,
    OfflineTraces,
    Turn,
    episode_advantages,
    evaluate_episodes,
)
from grpo_kit.generation import Rollouts, completion_logps
from grpo_kit.models import Policy
from grpo_kit.paths import data_dir, make_output_dir, write_atomic
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward, format_reward, question_text
from grpo_kit.rewards.scoring import reward_name
from grpo_kit.runs import REPLAY
from grpo_kit.self_verification import ONE_UPDATE
from grpo_kit.tasks.tool_questions import tool_questions
from grpo_kit.training import PromptBatches, train

TEMPLATE = Path(__file__).parent / "templates" / "replay.html.j2"
CURVES = {"reward": "reward", "held-out": "eval/pass@1", "entropy": "entropy"}  # name -> label


class Recorder:
    """Samples the groups of a few problems as a run goes: `train(..., record=Recorder(folder))`.

    It writes `replay.jsonl` into `output_dir`, the run's: a line per recorded step, and at the end
    one more for each, with the last policy's log-probabilities of its tokens. It has random numbers
    of its own, the same at each step. Rewards that remember what they scored, such as a judge's
    cache, remember these answers, too.

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
        splits = [task.train]
        if set(task.test.column_names) >= set(task.train.column_names):  # what rewards may need
            splits.append(task.test.select_columns(task.train.column_names))
        some = [split.select(range(min(self.problems, len(split)))) for split in splits]
        rows = [row for split in some for row in split]
        chosen = prompts.of(rows, prompts.rewards)
        size = len(rows) * config.num_generations
        changes = {**ONE_UPDATE, "generation_batch_size": size, "dynamic_sampling_rounds": 0}
        chosen.config = replace(config, **changes)
        state = SimpleNamespace(global_step=step, max_steps=config.max_steps)
        state.progress = min(step / config.max_steps, 1.0)
        with torch.random.fork_rng(devices=[]):
            answers = _answers(chosen, source, torch.Generator().manual_seed(prompts.seed), state)
        for answer in answers:
            row = answer.pop("row")
            answer |= {"split": "training" if row in [*some[0]] else "held-out"}
            answer |= {"question": question_text(row["prompt"]), "right": row.get("answer", "")}
        self._append({"step": step, "size": config.num_generations, "answers": answers})
        if last:
            for at, record in _records(self.file.parent).items():
                now = _logps_now(prompts.policy, record["answers"], config.temperature)
                self._append({"step": at, "last": step, "now": now})

    def _append(self, line: dict) -> None:
        with open(self.file, "a") as file:  # begins anew, as a kill may have cut the last line
            file.write("\n" + json.dumps(line))


def _answers(prompts: PromptBatches, source: Any, generator: torch.Generator, state: Any) -> list:
    """One group of each row of `prompts`, as JSON has them; those of a row stand together."""
    policy, names = prompts.policy, [reward_name(reward) for reward in prompts.rewards]
    source = source.flow if isinstance(source, OfflineTraces) else source
    if isinstance(source, FlowGRPO):
        flow, system = copy.copy(source), source.system
        roles = {n: getattr(system, n).forgetful() for n in ("executor", "verifier", "generator")}
        flow.prompts, flow.system = prompts, replace(system, **roles)
        episodes, columns, _ = flow.episodes(generator, state)
        scale = prompts.config.scale_rewards
        advantages = episode_advantages(episodes, flow.per, scale_rewards=scale)
        rewards = [one.reward for one in episodes]
        answers = [
            {
                "row": one.row, "output": one.output, "stopped": one.stopped,
                "turns": [
                    _turn(turn, policy) | {
                        "request": policy.tokenizer.decode(turn.prompt_ids),
                        "memory": str(Memory(one.memory.steps[:t])),
                        "call": step.call, "result": step.result, "verdict": step.verdict,
                    }
                    for t, (turn, step) in enumerate(zip(one.turns, one.memory.steps, strict=True))
                ],
            }
            for one in episodes
        ]  # fmt: skip
    else:
        (batch,) = prompts(generator, state, {})
        sampled, columns, advantages = batch.rollouts, batch.rewards_per_func, batch.advantages
        rewards, answers = batch.rewards.tolist(), []
        for i, ids in enumerate(sampled.completion_lists()):
            given = sampled.prompt_ids[int(sampled.prompt_index[i])]
            logps, nats = (x[i, : len(ids)].tolist() for x in (sampled.logps, sampled.entropies))
            turn = Turn(given, ids, logps, entropies=nats)
            answers.append({"row": batch.examples[i], "turns": [_turn(turn, policy)]})
    for answer, reward, scores, advantage in zip(
        answers, rewards, columns.tolist(), advantages.tolist(), strict=True
    ):
        answer |= {"advantage": advantage, "reward": _known(reward)}
        answer["rewards"] = dict(zip(names, map(_known, scores), strict=True))
    return answers


def _known(value: float | None) -> float | None:
    """None for a NaN, which JSON does not have."""
    return None if value is None or math.isnan(value) else value


def _turn(turn: Turn, policy: Policy) -> dict:
    return {
        "prompt_ids": turn.prompt_ids, "ids": turn.completion_ids,
        "tokens": [policy.tokenizer.decode([token]) for token in turn.completion_ids],
        "then": [round(value, 4) for value in turn.logprobs],
        "entropies": [round(value, 4) for value in turn.entropies],
    }  # fmt: skip


def _logps_now(policy: Policy, answers: Sequence[dict], temperature: float) -> list[list[float]]:
    """`policy`'s log-probabilities of the tokens of all turns, one list a turn."""
    turns = [turn for answer in answers for turn in answer["turns"]]
    ids = [turn["ids"] for turn in turns]
    rollouts = Rollouts.given([turn["prompt_ids"] for turn in turns], ids, policy)
    options = {"temperature": temperature, "pad_token_id": policy.pad_token_id}
    with policy.autocast():
        logps = completion_logps(policy.model, rollouts, **options)[0].tolist()
    return [
        [round(value, 4) for value in row[: len(own)]] for row, own in zip(logps, ids, strict=True)
    ]


# --- the page -------------------------------------------------------------------------------------


def _records(folder: Path) -> dict[int, dict]:
    """What was recorded of each step; of a line that comes twice, after a kill, the later.

    ValueError where there is nothing.
    """
    records: dict[int, dict] = {}
    lines = (folder / REPLAY).read_text().splitlines() if (folder / REPLAY).is_file() else []
    for line in lines:
        try:
            line = json.loads(line)
        except ValueError:  # empty, or cut by a kill
            continue
        if "answers" in line:
            records[line["step"]] = line
        else:
            records[line["step"]] |= {"last": line["last"], "now": line["now"]}
    if not records:
        remedy = "record one by `grpo-kit train --replay` or `train(..., record=Recorder(FOLDER))`"
        raise ValueError(f"{folder} holds no {REPLAY} of a run: {remedy}.")
    return dict(sorted(records.items()))


def page(folder: str | Path) -> str:
    """The replay of the run in `folder`, one HTML file that loads nothing.

    Raises ValueError where there is no recording, or one that cannot be read.
    """
    folder = Path(folder)
    try:
        data = _data(_records(folder))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        problem = f"{folder / REPLAY} cannot be read ({type(error).__name__}: {error})"
        raise ValueError(f"{problem}: record the run anew.") from error
    log = Log(read_log(folder))
    for name, metric in CURVES.items():
        points = [p for p in zip(*log.series(name), strict=True) if math.isfinite(p[1])]
        if points:
            title, unit = CURVE_LABELS[metric]
            data["curves"].append({"title": title, "unit": unit, "points": points})
    template = TEMPLATE.read_text(encoding="utf-8")
    allowed = {  # by the policy in the page's head: these two texts and nothing else
        tag: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for tag, text in re.findall(r"<(script|style)>(.*?)</\1>", template, re.S)
    }
    # as a JSON escape, "<" ends no element; json.dumps leaves nothing but ASCII
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    environment = Environment(autoescape=True)
    return environment.from_string(template).render(
        title=f"{visible(folder.resolve().name)}: replay", data=text, **allowed
    )


def visible(text: str) -> str:
    """`text` with its control and format characters (bidi, ANSI, zero width) as escapes."""
    return "".join(
        "⏎\n" if c == "\n" else f"\\u{ord(c):04x}" if unicodedata.category(c)[0] == "C" else c
        for c in re.sub("[\u2028\u2029]", "\n", text)
    )


def _data(records: dict[int, dict]) -> dict:
    """What the page shows, its texts in one table, since most come again and again."""
    texts: dict[str, int] = {}

    def place(text: str | None) -> int:
        return texts.setdefault(visible(str(text or "")), len(texts))

    last = max(records)
    frames, problems = [], []
    for record in records.values():
        scored = record.get("last") == last  # else the run was killed before its end
        now = iter(record["now"] if scored else [])
        answers = [
            {
                "reward": answer["reward"], "rewards": list(answer["rewards"].values()),
                "advantage": round(answer["advantage"], 3),
                "output": place(answer.get("output")), "stopped": place(answer.get("stopped")),
                "turns": [
                    {
                        "tokens": [place(token) for token in turn["tokens"]],
                        "then": _shares(turn["then"]), "now": _shares(next(now)) if scored else [],
                        "nats": [round(100 * value) for value in turn["entropies"]],
                        **{name: place(turn[name]) for name in TOLD if name in turn},
                    }
                    for turn in answer["turns"]
                ],
            }
            for answer in record["answers"]
        ]  # fmt: skip
        starts = range(0, len(answers), record["size"])
        frames.append([answers[i : i + record["size"]] for i in starts])
        problems = [
            {name: place(record["answers"][i][name]) for name in ("split", "question", "right")}
            for i in starts
        ]
    names = [place(name) for name in record["answers"][0]["rewards"]]
    flow = "call" in record["answers"][0]["turns"][0]
    return {
        "steps": list(records), "flow": flow, "names": names, "problems": problems,
        "frames": frames, "curves": [], "texts": list(texts),
    }  # fmt: skip


TOLD = ("request", "memory", "call", "result", "verdict")  # of an episode's turn, beside its tokens


def _shares(logps: Sequence[float]) -> list[int]:
    """Probabilities in thousandths."""
    return [round(1000 * math.exp(value)) for value in logps]


# --- what the course ships ------------------------------------------------------------------------


def ship(output_dir: str | Path, work: str | Path = "runs/replays") -> list[Path]:
    """Train like notebooks 01 and 06 on profile `tiny`, into `work`, and write both replays."""
    torch.set_num_threads(1)
    profile = PROFILES["tiny"]
    config = replace(profile.config, loss_type="grpo", save_steps=10)
    changes = {"max_steps": 30, "eval_steps": 5, "eval_prompts": 64}
    basic, task = replace(config, **changes), profile.load_task()
    folders = [Path(work) / name for name in ("01_basic_grpo", "06_flow_grpo")]
    train(
        profile.load_policy(), task, [accuracy_reward, format_reward], basic, seed=0, resume=True,
        output_dir=folders[0], record=Recorder(folders[0], every=2),
    )  # fmt: skip
    changes = {"max_steps": 16, "eval_steps": 4, "eval_prompts": 0, "learning_rate": 3e-4}
    changes |= {"generation_batch_size": 64, "max_completion_length": 48}
    of_turns, task, policy = replace(config, **changes), tool_questions(), profile.load_policy()
    system = profile.load_agents(policy)
    options = {"system": system, "dataset": task.test, "config": of_turns, "questions": 48}
    train(
        policy, task, [accuracy_reward], of_turns, output_dir=folders[1], seed=0, resume=True,
        batch_source=partial(FlowGRPO, system=system),
        measure=partial(evaluate_episodes, **options), record=Recorder(folders[1], every=2),
    )  # fmt: skip
    pages = [make_output_dir(output_dir) / f"{folder.name}.html" for folder in folders]
    for folder, file in zip(folders, pages, strict=True):
        write_atomic(file, page(folder))
    return pages


if __name__ == "__main__":
    print(*ship(data_dir() / "replays"))
