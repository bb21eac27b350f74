"""The GRPO loop: collect groups, score them, turn rewards into advantages, update, log.

`train` is the loop, `evaluate` measures a policy, and the functions between them are its stages in
order. The loop is on one device and knows nothing of several processes (that is TRL's). What makes
it quick: groups whose advantages are all zero are not run through the model, each prompt is run
once per update with its cache shared by the group, micro-batches are sorted by length, and the
first update of a batch, being on-policy, needs no old log-probabilities.

A run can be killed at any instant: `history.jsonl` grows a line a step, checkpoints are written
under another name and renamed, and `resume=True` goes on from the last one with the same numbers
that an unbroken run has on the same CPU.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from torch import Tensor
from tqdm import tqdm

from grpo_kit import backends, objective
from grpo_kit.config import GRPOConfig
from grpo_kit.generation import Rollouts, check_lengths, completion_logps, reply
from grpo_kit.models import Policy, reference_of
from grpo_kit.paths import make_output_dir, write_atomic
from grpo_kit.rewards import accuracy_reward
from grpo_kit.tasks import Task

CHECKPOINT, HISTORY, RUN = "checkpoint.pt", "history.jsonl", "run.json"


@dataclass
class Run:
    """What a run left: `history`, a plain dict a step with TRL's metric names, and its folder.

    `start`: what it began from, see `what_it_starts_from`.
    """

    output_dir: Path
    config: GRPOConfig
    seed: int
    history: list[dict] = field(default_factory=list)
    start: dict = field(default_factory=dict)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, where it was logged."""
        rows = [row for row in self.history if name in row]
        return [row["step"] for row in rows], [row[name] for row in rows]


def train(
    policy: Policy,
    task: Task,
    rewards: Sequence[Callable],
    config: GRPOConfig,
    *,
    output_dir: str | Path,
    seed: int,
    resume: bool = False,
    collector: Callable[[PromptCollector], Any] | None = None,
    measure: Callable[[Policy], dict[str, float]] | None = None,
) -> Run:
    """Train `policy` in place by GRPO and return its history.

    Args:
        policy: model and tokenizer; the model's weights change.
        task: `train` rows to learn from, `test` rows to evaluate on.
        rewards: callables under TRL's reward protocol; a coroutine function may be among them.
        config: see `GRPOConfig`.
        output_dir: gets `history.jsonl`, `run.json` and `checkpoint.pt` as the run goes.
        seed: of the order of prompts and of sampling.
        resume: go on from the checkpoint in `output_dir`; without one, start.
        collector: makes what steps learn from out of a `PromptCollector`, which is the default and
            shows what one has, e.g. `partial(SelfVerification, strategy="mixed")`.
        measure: numbers of the policy to log wherever it is evaluated.

    Raises:
        ValueError: something does not fit together; said before any compute where possible.
        RuntimeError: the folder cannot be written, the loss is not finite, or no completion could
            be scored for several steps in a row. The last checkpoint stays good.
    """
    prompts = PromptCollector(policy, task, rewards, config, seed)
    source = collector(prompts) if collector else prompts
    if config.eval_prompts:
        tested = policy.encode(task.test["prompt"][: config.eval_prompts])
        check_lengths(policy.model, tested, config.max_completion_length, "test prompt")
    output_dir = make_output_dir(output_dir)
    for unfinished in output_dir.glob(f".{CHECKPOINT}.*.partial"):  # of a run that was killed
        unfinished.unlink()
    policy.model.eval()  # dropout would make the policy another one at every pass
    start = what_it_starts_from(policy, source, prompts)

    reference = reference_of(policy) if config.beta else None
    optimizer, schedule = make_optimizer(policy, config)
    scaler = make_scaler(policy)
    backend = backends.choose(policy, config.sampling_backend)
    generator = torch.Generator().manual_seed(seed)
    run = Run(output_dir, config, seed, start=start)
    first = unscored = tokens = 0
    saved = "no checkpoint has been saved yet"

    if resume and (output_dir / CHECKPOINT).exists():
        state = torch.load(output_dir / CHECKPOINT, weights_only=True, map_location=policy.device)
        lines = (output_dir / HISTORY).read_text().splitlines()
        check_same_run(state, config, seed, start, lines, output_dir)
        policy.model.load_state_dict(state["model"], strict=False)  # with LoRA, what is trained
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        scaler.load_state_dict(state.get("scaler", {}))
        generator.set_state(state["generator"].cpu())
        source.load_state_dict(state["collector"])
        first, unscored, tokens = state["step"], state["unscored"], state["tokens"]
        run.history = [json.loads(line) for line in lines[: state["lines"]]]
        saved = f"resume from the checkpoint of step {first} in {output_dir}"
    write_atomic(output_dir / HISTORY, "".join(json.dumps(row) + "\n" for row in run.history))

    def log(row: dict) -> None:
        run.history.append(row)
        with open(output_dir / HISTORY, "a") as file:
            file.write(json.dumps(row) + "\n")

    def save(step: int) -> None:
        nonlocal saved
        state = {
            "model": {k: v for k, v in policy.model.state_dict().items() if k in trained},
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "scaler": scaler.state_dict(),
            "generator": generator.get_state(),
            "collector": source.state_dict(),
            "step": step,
            "unscored": unscored,
            "tokens": tokens,
            "lines": len(run.history),
            "config": dataclasses.asdict(config),
            "seed": seed,
            "start": start,
        }
        temporary = output_dir / f".{CHECKPOINT}.{os.getpid()}.partial"
        try:
            torch.save(state, temporary)
            os.replace(temporary, output_dir / CHECKPOINT)
            saved = f"resume from the checkpoint of step {step} in {output_dir}"
        finally:
            temporary.unlink(missing_ok=True)

    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}

    def evaluated() -> dict[str, float]:
        measured = measure(policy) if measure else {}
        return evaluate(policy, task.test, config, seed=seed) | measured

    def spent(step: int) -> float:
        share = tokens / config.max_generated_tokens if config.max_generated_tokens else 0.0
        return min(max(step / config.max_steps, share), 1.0)

    if first == 0 and not run.history and config.eval_on_start:
        log({"step": 0, "num_generated_tokens": 0, **evaluated()})
    progress = tqdm(
        desc="grpo" if backend == "plain" else f"grpo, sampling {backend}",
        initial=first,
        total=config.max_steps,
        file=sys.stdout,  # in a notebook, stderr looks like a failure
    )
    for step in range(first, config.max_steps):
        if spent(step) == 1:  # resumed after its last step
            break
        started = time.perf_counter()
        state = SimpleNamespace(global_step=step, max_steps=config.max_steps, progress=spent(step))
        metrics: dict[str, float] = {}
        stats: dict[str, Any] = {}
        batches: list[Batch] = []
        for batch in source(generator, state, metrics):
            batches.append(batch)
            if batch.rewards.isnan().all():
                continue
            # of several updates of a step the first is the one that the schedule counts and the
            # log tells about
            counted = None if stats else schedule
            made = update(policy, reference, optimizer, counted, batch, config, scaler)
            if not made.pop("finite"):
                raise RuntimeError(
                    f"loss or gradient is not finite at step {step + 1} (rewards from "
                    f"{batch.rewards.nan_to_num().min():.3g} to "
                    f"{batch.rewards.nan_to_num().max():.3g}); that update was not made; lower "
                    f"learning_rate; {saved}."
                )
            stats = stats or made
        tokens += int(metrics.pop("generated_tokens"))
        row = {"step": step + 1, "num_generated_tokens": tokens, **metrics, **stats}
        if batches and not stats:
            unscored += 1
            row["unscored_steps"] = unscored
            if unscored >= config.max_unscored_steps:
                log(row)
                names = dict.fromkeys(name for batch in batches for name in batch.names)
                raise RuntimeError(
                    f"no completion could be scored for {unscored} steps in a row (up to step "
                    f"{step + 1}): look at what {', '.join(names)} return; {saved}."
                )
        else:
            unscored = 0
        row["step_time"] = time.perf_counter() - started
        done = spent(step + 1) == 1
        if done or (config.eval_steps and (step + 1) % config.eval_steps == 0):
            row |= evaluated()
        log(row)
        if done or (config.save_steps and (step + 1) % config.save_steps == 0):
            save(step + 1)
        shown = {
            "reward": f"{row['reward']:.2f}" if "reward" in row else "none",
            **{k[5:]: f"{v:.2f}" for k, v in row.items() if k in ("eval/pass@1",)},
        }
        progress.set_postfix(shown, refresh=False)
        progress.update()
        if done:
            break
    progress.close()
    write_atomic(
        output_dir / RUN,
        json.dumps(
            {
                "config": dataclasses.asdict(config),
                "seed": seed,
                "start": start,
                "history": run.history,
            },
            indent=1,
        ),
    )
    return run


# --- before the first step ------------------------------------------------------------------------


def reward_name(reward: Callable) -> str:
    """The reward's `__name__`, else its class's; the part of the metric `rewards/<name>/mean`."""
    return getattr(reward, "__name__", type(reward).__name__)


_PROTOCOL = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric")


def check_task(task: Task, rewards: Sequence[Callable], config: GRPOConfig) -> None:
    """Raise ValueError where rows, rewards and config do not fit together."""
    if not rewards:
        raise ValueError("there are no rewards; give at least one.")
    if config.reward_weights is not None and len(config.reward_weights) != len(rewards):
        raise ValueError(
            f"reward_weights has {len(config.reward_weights)} values for {len(rewards)} rewards; "
            "give one a reward."
        )
    for name, split in (("train", task.train), ("test", task.test)):
        if not len(split):
            raise ValueError(f"the {name} rows of task {task.name!r} are empty; give at least one.")
    for reward in rewards:
        check_columns(reward, task.train.column_names, f"task {task.name!r}")


def check_columns(reward: Callable, columns: Sequence[str], what: str) -> None:
    """Raise ValueError where the reward takes a column that `what`, in words, lacks."""
    for parameter in inspect.signature(reward).parameters.values():
        needed = (
            parameter.default is parameter.empty
            and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and parameter.name not in _PROTOCOL
        )
        if needed and parameter.name not in columns:
            raise ValueError(
                f"the reward {reward_name(reward)} needs a column {parameter.name!r}, which "
                f"{what} lacks; it has {', '.join(columns)}."
            )


def what_it_starts_from(policy: Policy, source: Any, prompts: PromptCollector) -> dict:
    """What a run is besides its config: collector and rewards by name, prompts, weights by hash."""
    parameters = list(policy.model.parameters())
    weights = hashlib.sha256()
    # LoRA's own weights begin at random, so with it the frozen ones tell which model this is
    for parameter in [p for p in parameters if not p.requires_grad] or parameters:
        values = parameter.detach().flatten()
        sample = values[:: max(1, len(values) // 64)]
        weights.update(sample.float().cpu().numpy().tobytes())
    return {
        "collector": source.name,
        "rewards": [reward_name(reward) for reward in prompts.rewards],
        "prompts": hashlib.sha256(json.dumps(prompts.prompt_ids).encode()).hexdigest()[:12],
        "first weights": weights.hexdigest()[:12],
    }


def check_same_run(
    state: dict, config: GRPOConfig, seed: int, start: dict, lines: list[str], output_dir: Path
) -> None:
    """Raise ValueError if a checkpoint is of another run than this one or than its history."""
    before = {**state["config"], "seed": state["seed"], **state["start"]}
    now = {**dataclasses.asdict(config), "seed": seed, **start}
    differences = [
        f"{name} {before.get(name)!r} there, {now.get(name)!r} here"
        for name in now
        if before.get(name) != now.get(name)
    ]
    if differences:
        raise ValueError(
            f"{output_dir} holds a run of another configuration ({'; '.join(differences)}): "
            "resume with the same one, or choose another folder."
        )
    kept = lines[: state["lines"]]
    if len(kept) < state["lines"] or (kept and json.loads(kept[-1])["step"] != state["step"]):
        raise ValueError(
            f"{output_dir} holds a checkpoint of step {state['step']} and the history of another "
            "run, which was started over it and ended before its first checkpoint: start again "
            "without resume, or choose another folder."
        )


def make_optimizer(policy: Policy, config: GRPOConfig):
    """AdamW over the trained weights, and transformers' schedule of that name."""
    from transformers import get_scheduler

    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("no weight of the policy requires a gradient; is it a frozen copy?")
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for p in parameters if p.dim() > 1],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        fused=True,
    )
    schedule = get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=config.max_steps * config.updates_per_step,
    )
    return optimizer, schedule


def make_scaler(policy: Policy) -> torch.amp.GradScaler:
    """Scales the loss where arithmetic is in float16, whose smallest gradients would be 0.

    Elsewhere it does nothing. (GPUs before Ampere, Colab's T4 among them, have no bfloat16.)
    """
    enabled = policy.half == torch.float16
    return torch.amp.GradScaler(policy.device.type, init_scale=2.0**12, enabled=enabled)


class Cursor:
    """An endless walk over the training rows, each epoch in its own order; `taken` is its state."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.seed, self.taken = n, seed, 0
        self._epoch, self._order = -1, []

    def take(self, count: int) -> list[int]:
        rows = []
        for _ in range(count):
            epoch, place = divmod(self.taken, self.n)
            if epoch != self._epoch:
                self._order = list(range(self.n))
                random.Random(f"{self.seed}-{epoch}").shuffle(self._order)
                self._epoch = epoch
            rows.append(self._order[place])
            self.taken += 1
        return rows


# --- collect and score ----------------------------------------------------------------------------


@dataclass
class Batch:
    """Scored rollouts: N rows, complete groups."""

    rollouts: Rollouts
    names: list[str]
    table: Tensor  # (N, R), NaN = not scored
    rewards: Tensor  # (N,), combined
    advantages: Tensor  # (N,)
    num_generations: int
    examples: list[dict]  # N, the row of data that each completion answers
    logged: dict[str, list[float]] = field(default_factory=dict)  # by rewards, see `score`
    generated_tokens: int = 0  # also of groups that were sampled and left out
    episode_index: Tensor | None = None  # (N,) long, ascending, where rows are turns of episodes

    def metrics(self) -> dict[str, float]:
        """What TRL logs of a generation batch, under its names; no mean of nothing scored."""
        lengths = self.rollouts.lengths.float()
        groups = self.rewards.view(-1, self.num_generations)
        low = groups.nan_to_num(nan=torch.inf).amin(1)
        high = groups.nan_to_num(nan=-torch.inf).amax(1)
        scored = self.rewards[~self.rewards.isnan()]
        metrics: dict[str, float] = {}
        if len(scored):
            metrics["reward"] = scored.mean().item()
            metrics["reward_std"] = scored.std().item() if len(scored) > 1 else 0.0
        metrics |= {
            "frac_reward_zero_std": (low >= high).float().mean().item(),
            "frac_unscored": self.rewards.isnan().float().mean().item(),
            "completions/mean_length": lengths.mean().item(),
            "completions/clipped_ratio": (~self.rollouts.finished).float().mean().item(),
            "entropy": (self.rollouts.entropies.sum() / lengths.sum()).item(),
        }
        for name, column in zip(self.names, self.table.T, strict=True):
            values = column[~column.isnan()]
            if len(values):
                metrics[f"rewards/{name}/mean"] = values.mean().item()
                metrics[f"rewards/{name}/std"] = values.std().item() if len(values) > 1 else 0.0
        return metrics | {name: sum(values) / len(values) for name, values in self.logged.items()}

    @staticmethod
    def concatenate(parts: Sequence[Batch]) -> Batch:
        """Several batches, of one group size, as one to update on, their groups interleaved.

        So that each optimiser step on a part of it has something of all. Where a batch lacks a
        reward that another has, the table holds NaN.
        """
        size = parts[0].num_generations
        names = list(dict.fromkeys(name for part in parts for name in part.names))
        tables = []
        for part in parts:
            table = torch.full((len(part.rewards), len(names)), math.nan)
            table[:, [names.index(name) for name in part.names]] = part.table
            tables.append(table)
        places = torch.cat(
            [(torch.arange(n) + 0.5) / n for n in (len(part.rewards) // size for part in parts)]
        )
        groups = places.argsort(stable=True)
        rows = (groups[:, None] * size + torch.arange(size)).flatten()
        examples = [example for part in parts for example in part.examples]
        rollouts = Rollouts.concatenate([part.rollouts for part in parts])
        return Batch(
            rollouts.select(rows.to(rollouts.mask.device)),
            names,
            torch.cat(tables)[rows],
            torch.cat([part.rewards for part in parts])[rows],
            torch.cat([part.advantages for part in parts])[rows],
            size,
            [examples[row] for row in rows.tolist()],
            generated_tokens=sum(part.generated_tokens for part in parts),
        )


class PromptCollector:
    """What a step learns from: groups of completions of the task's prompts, epoch by epoch.

    A collector is called with the generator, the state of a step (`global_step`, `max_steps`,
    `progress` in 0..1) and a dict. It yields the batches to learn from; each is learnt from before
    the next is asked for, so that all are sampled on-policy. What is to be logged it puts into the
    dict, `generated_tokens` among it. It has a `name`, and a state that a checkpoint keeps.

    Raises ValueError where rows, rewards, config and the model's context do not fit together.
    """

    name = "prompts"

    def __init__(
        self,
        policy: Policy,
        task: Task,
        rewards: Sequence[Callable],
        config: GRPOConfig,
        seed: int,
    ) -> None:
        check_task(task, rewards, config)
        self.policy, self.task, self.rewards = policy, task, list(rewards)
        self.config, self.seed = config, seed
        policy.check_template(task.train[0]["prompt"])
        self.prompt_ids = policy.encode(task.train["prompt"])
        check_lengths(policy.model, self.prompt_ids, config.max_completion_length)
        self.cursor = Cursor(len(self.prompt_ids), seed)

    def __call__(self, generator: torch.Generator, state: Any, metrics: dict) -> Iterator[Batch]:
        batch = self.batch(generator, state)
        metrics |= batch.metrics() | {"generated_tokens": batch.generated_tokens}
        yield batch

    def batch(self, generator: torch.Generator, state: Any, **changes) -> Batch:
        """One generation batch of the next prompts, with `changes` to the config."""
        config = dataclasses.replace(self.config, **changes)
        return collect(
            self.policy, self.task, self.prompt_ids, self.rewards, config, self.cursor, generator,
            state,
        )  # fmt: skip

    def state_dict(self) -> dict:
        return {"taken": self.cursor.taken}

    def load_state_dict(self, state: dict) -> None:
        self.cursor.taken = state["taken"]


def collect(
    policy: Policy,
    task: Task,
    prompt_ids: list[list[int]],
    rewards: Sequence[Callable],
    config: GRPOConfig,
    cursor: Cursor,
    generator: torch.Generator,
    state: Any,
) -> Batch:
    """Sample and score one generation batch.

    The batch is sampled in `rollout_chunks` parts; coroutine rewards of a part, such as a judge
    behind an endpoint, are under way while the next is sampled. With `dynamic_sampling_rounds`
    (DAPO, arXiv 2503.14476, eq. 11), groups without spread are replaced by groups of further
    prompts, for at most that many rounds.
    """
    wanted = config.generation_batch_size // config.num_generations
    parts: list[tuple[Rollouts, Tensor, list[dict]]] = []
    logged: dict[str, list[float]] = {}

    def examples_of(rows: list[int]) -> list[dict]:
        repeated = ([task.train[row]] * config.num_generations for row in rows)
        return [example for group in repeated for example in group]

    def sample(rows: list[int], portal: BlockingPortal) -> tuple[Rollouts, Callable[[], Tensor]]:
        rollouts = backends.sample(
            policy,
            [prompt_ids[row] for row in rows],
            config.num_generations,
            backend=backends.choose(policy, config.sampling_backend),
            max_new_tokens=config.max_completion_length,
            temperature=config.temperature,
            generator=generator,
        )
        ids = rollouts.completion_lists()
        return rollouts, start_scoring(
            policy.decode(ids), ids, examples_of(rows), rewards, portal, state, logged
        )

    missing, generated_tokens = wanted, 0
    for round_ in range(config.dynamic_sampling_rounds + 1):
        rows = cursor.take(missing)
        size = math.ceil(missing / config.rollout_chunks)
        with start_blocking_portal() as portal:
            chunks = [sample(rows[i : i + size], portal) for i in range(0, missing, size)]
            table = torch.cat([finish() for _, finish in chunks])
        rollouts = Rollouts.concatenate([rollouts for rollouts, _ in chunks])
        generated_tokens += int(rollouts.mask.sum())
        examples = examples_of(rows)
        if round_ < config.dynamic_sampling_rounds:
            combined = objective.combine_rewards(table, config.reward_weights)
            spread = objective.group_advantages(combined, config.num_generations).view(
                -1, config.num_generations
            )
            groups = spread.abs().amax(1).nonzero()[:, 0]
            kept = (
                groups[:, None] * config.num_generations + torch.arange(config.num_generations)
            ).flatten()
            if len(kept):
                selected = rollouts.select(kept.to(rollouts.mask.device))
                parts.append((selected, table[kept], [examples[i] for i in kept.tolist()]))
            missing -= len(groups)
        else:
            parts.append((rollouts, table, examples))
            missing = 0
        if not missing:
            break
    table = torch.cat([table for _, table, _ in parts])
    combined = objective.combine_rewards(table, config.reward_weights)
    size = config.num_generations
    if config.multi_objective_aggregation == "normalize_then_sum":
        advantages = objective.decoupled_advantages(table, size, config.reward_weights)
    else:
        advantages = objective.group_advantages(combined, size, config.scale_rewards)
    return Batch(
        Rollouts.concatenate([rollouts for rollouts, _, _ in parts]),
        [reward_name(reward) for reward in rewards],
        table,
        combined,
        advantages,
        size,
        [example for _, _, examples in parts for example in examples],
        logged,
        generated_tokens,
    )


def score(
    policy: Policy,
    rollouts: Rollouts,
    examples: Sequence[dict],
    rewards: Sequence[Callable],
    state: Any = None,
    logged: dict[str, list[float]] | None = None,
) -> Tensor:
    """Rewards of all completions, (N, R) float32: `score_texts` of what they say."""
    ids = rollouts.completion_lists()
    return score_texts(policy.decode(ids), ids, examples, rewards, state, logged)


def score_texts(
    texts: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    examples: Sequence[dict],
    rewards: Sequence[Callable],
    state: Any = None,
    logged: dict[str, list[float]] | None = None,
) -> Tensor:
    """Rewards of N texts, (N, R) float32, NaN where a reward returned None.

    Completions reach a reward as TRL passes them for prompts that are messages: a list with one
    assistant message. As in TRL, a reward gets `trainer_state` and may call `log_metric(name,
    value)`; the values are collected in `logged`.

    Raises ValueError or TypeError, naming the reward, for too few values, a NaN, or no number.
    """
    logged = {} if logged is None else logged
    with start_blocking_portal() as portal:
        return start_scoring(texts, completion_ids, examples, rewards, portal, state, logged)()


def start_scoring(
    texts: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    examples: Sequence[dict],
    rewards: Sequence[Callable],
    portal: BlockingPortal,
    state: Any,
    logged: dict[str, list[float]],
) -> Callable[[], Tensor]:
    """Start the coroutine rewards, all together; the function returned runs the others and waits.

    Coroutines run in `portal`, an event loop in another thread (a notebook has one in this), so
    that other work can go on meanwhile. See `score_texts`.
    """
    arguments = {
        "prompts": [example["prompt"] for example in examples],
        "completions": [[{"role": "assistant", "content": text}] for text in texts],
        "completion_ids": list(completion_ids),
        "trainer_state": state,
        "log_metric": lambda name, value: logged.setdefault(name, []).append(float(value)),
        **{
            name: [example[name] for example in examples]
            for name in examples[0]
            if name != "prompt"
        },
    }

    async def awaited(reward: Callable) -> Any:
        return await reward(**arguments)

    async def result_of(awaitable: Awaitable) -> Any:
        return await awaitable

    under_way = {
        i: portal.start_task_soon(awaited, reward)
        for i, reward in enumerate(rewards)
        if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__)
    }

    def finish() -> Tensor:
        results = {i: r(**arguments) for i, r in enumerate(rewards) if i not in under_way}
        results |= {i: future.result() for i, future in under_way.items()}
        for i, result in results.items():
            if inspect.isawaitable(result):  # of a lambda or partial around a coroutine function
                results[i] = portal.call(result_of, result)
        columns = [
            checked(reward_name(reward), results[i], len(texts)) for i, reward in enumerate(rewards)
        ]
        return torch.tensor(columns, dtype=torch.float32).T

    return finish


def checked(name: str, values: Any, n: int) -> list[float]:
    """A reward's `values` of `n` completions as floats, NaN for None; see `score_texts`."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(
            f"the reward {name} returned a {type(values).__name__}; it must return a list of "
            "one number or None a completion."
        )
    if len(values) != n:
        raise ValueError(
            f"the reward {name} returned {len(values)} values for {n} completions; return one each."
        )
    numbers = []
    for i, value in enumerate(values):
        if value is None:
            numbers.append(math.nan)
            continue
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"the reward {name} returned {value!r} for completion {i}; it must be a number or "
                "None."
            ) from None
        if not math.isfinite(number):
            raise ValueError(
                f"the reward {name} returned {number} for completion {i}; return None for what "
                "could not be scored."
            )
        numbers.append(number)
    return numbers


# --- update ---------------------------------------------------------------------------------------


def update(
    policy: Policy,
    reference: Callable | None,
    optimizer,
    schedule,
    batch: Batch,
    config: GRPOConfig,
    scaler: torch.amp.GradScaler | None = None,
) -> dict[str, Any]:
    """All optimiser steps of one generation batch; returns TRL's metrics and whether all went well.

    Old log-probabilities are those of the weights before the first of these steps: for that step
    itself they equal the current ones, so they are only computed where more steps follow. Without
    a `schedule` the learning rate stays what it is. With a `scaler` (see `make_scaler`) a step
    whose gradient overflows is skipped, and the next is scaled less.
    """
    scaler = scaler or torch.amp.GradScaler(enabled=False)
    rollouts, advantages = batch.rollouts, batch.advantages.to(batch.rollouts.mask.device)
    mask = rollouts.mask
    if config.mask_truncated_completions:
        mask = mask & rollouts.finished[:, None]
    n, width = mask.shape
    size = config.optimizer_batch_size
    micro_size = config.per_device_train_batch_size or size
    # Turns of one episode stay together: an optimiser step takes whole episodes.
    episode = torch.arange(n) if batch.episode_index is None else batch.episode_index.cpu()
    episodes, turn_weights = int(episode[-1]) + 1, None
    if batch.episode_index is not None and config.loss_type == "grpo":
        turn_weights = (1 / episode.bincount()[episode]).to(mask.device)
    # Without advantage there is no gradient, unless by a KL term; to bnpo such tokens count.
    active = batch.advantages != 0
    if reference is not None or config.loss_type == "bnpo":
        active = torch.ones(n, dtype=torch.bool)

    def scored(model, rows: Tensor) -> Tensor:
        part = rollouts.select(rows)
        with policy.autocast():
            return completion_logps(
                model, part, temperature=config.temperature, pad_token_id=policy.pad_token_id
            )[0]

    def whole(model) -> Tensor:
        """(N, T) log-probabilities of all active rows, without gradient."""
        result = torch.zeros(n, width, device=mask.device)
        with torch.no_grad():
            for rows in _micro_batches(torch.arange(n)[active], rollouts, micro_size):
                part = scored(model, rows)
                result[rows, : part.shape[1]] = part
        return result

    ref_logps = None
    if reference is not None:
        with reference() as model:
            ref_logps = whole(model)
    needs_old = config.updates_per_step > 1 or config.importance_sampling_cap is not None
    old_logps = whole(policy.model) if needs_old else None
    weights = None
    if config.importance_sampling_cap is not None:
        weights = objective.truncated_importance_weights(
            old_logps, rollouts.logps, config.importance_sampling_cap
        )
    loss_arguments = {
        "loss_type": config.loss_type,
        "epsilon": config.epsilon,
        "epsilon_high": config.epsilon_high,
        "importance_sampling_level": config.importance_sampling_level,
    }
    sums: dict[str, float] = {}
    for _ in range(config.num_iterations):
        for start in range(0, episodes, size):
            rows = ((start <= episode) & (episode < start + size)).nonzero()[:, 0]
            # each optimiser step gets an even share of the whole batch's tokens, as in TRL
            sequences = min(start + size, episodes) - start
            tokens = mask.sum() * sequences / episodes
            total, grad_norm = 0.0, torch.tensor(0.0)
            micro_batches = _micro_batches(rows[active[rows]], rollouts, micro_size)
            for part in micro_batches:
                logps = scored(policy.model, part)
                cut = (part, slice(0, logps.shape[1]))
                arguments = dict(
                    old_logps=None if old_logps is None else old_logps[cut],
                    advantages=advantages[part],
                    mask=mask[cut],
                    ref_logps=None if ref_logps is None else ref_logps[cut],
                    **loss_arguments,
                )
                loss = objective.policy_loss(
                    logps,
                    beta=config.beta,
                    use_bias_correction_kl=config.use_bias_correction_kl,
                    max_completion_length=config.max_completion_length,
                    num_items_in_batch=tokens,
                    num_sequences_in_batch=sequences,
                    truncated_importance_weights=None if weights is None else weights[cut],
                    turn_weights=None if turn_weights is None else turn_weights[part],
                    **arguments,
                )
                if config.loss_type == "bnpo":  # local by definition: the mean of micro-batches
                    loss = loss / len(micro_batches)
                scaler.scale(loss).backward()
                total += loss.item()
                share = mask[cut].sum().item() / max(mask.sum().item(), 1)
                if config.importance_sampling_level == "sequence":
                    share = len(part) / n
                for name, value in objective.policy_loss_stats(logps, **arguments).items():
                    sums[name] = sums.get(name, 0.0) + value * share / config.num_iterations
            if micro_batches:
                scaler.unscale_(optimizer)
                grad_norm = torch.nn.utils.clip_grad_norm_(
                    [p for p in policy.model.parameters() if p.requires_grad],
                    config.max_grad_norm or math.inf,
                )
            overflow = not math.isfinite(grad_norm.item())
            finite = math.isfinite(total) and (not overflow or scaler.get_scale() > 1)
            learning_rate = optimizer.param_groups[0]["lr"]
            if finite:
                if micro_batches:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()  # moves nothing: no group had a gradient
                if schedule is not None:
                    schedule.step()
            optimizer.zero_grad(set_to_none=True)
            if not finite:
                return {"finite": False}
    return {
        "finite": True,
        "loss": total,
        **({} if overflow else {"grad_norm": grad_norm.item()}),
        **({"loss_scale": scaler.get_scale()} if scaler.is_enabled() else {}),
        "learning_rate": learning_rate,
        **sums,
    }


def _micro_batches(rows: Tensor, rollouts: Rollouts, size: int) -> list[Tensor]:
    """`rows` in parts of at most `size`, a prompt's next to each other, short completions first."""
    if len(rows) <= size:
        return [rows] if len(rows) else []
    longest: dict[int, int] = {}
    lengths, prompts = rollouts.lengths.tolist(), rollouts.prompt_index.tolist()
    for row in rows.tolist():
        longest[prompts[row]] = max(longest.get(prompts[row], 0), lengths[row])
    ordered = sorted(rows.tolist(), key=lambda row: (longest[prompts[row]], prompts[row], row))
    return [torch.tensor(ordered[i : i + size]) for i in range(0, len(ordered), size)]


# --- evaluate -------------------------------------------------------------------------------------


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, from `correct` of n.

    1 - C(n - c, k) / C(n, k): Codex (arXiv 2107.03374), eq. 1.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k is {k} with {n} samples; it must be between 1 and {n}.")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def evaluate(
    policy: Policy,
    dataset,
    config: GRPOConfig,
    *,
    seed: int = 0,
    correct: Callable = accuracy_reward,
) -> dict[str, float]:
    """Greedy accuracy, pass@1 and pass@k on the first `config.eval_prompts` rows of `dataset`.

    A completion is right if the reward `correct` gives it 1. Samples are drawn at
    `config.temperature`, `config.num_generations_eval` a prompt (k is that number), with a
    generator of their own, so that evaluating changes nothing of the training. {} for a dataset
    without the column `answer`.
    """
    if "answer" not in dataset.column_names or not config.eval_prompts:
        return {}
    rows = dataset.select(range(min(config.eval_prompts, len(dataset))))
    examples, samples = list(rows), config.num_generations_eval
    options = {
        "max_new_tokens": config.max_completion_length,
        "batch_size": config.evaluation_batch_size,
    }
    best = reply(policy, rows["prompt"], do_sample=False, **options)
    greedy = score(policy, best, examples, [correct])[:, 0] == 1
    sampled = reply(
        policy,
        rows["prompt"],
        samples,
        temperature=config.temperature,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
    repeated = [example for example in examples for _ in range(samples)]
    right = score(policy, sampled, repeated, [correct])[:, 0] == 1
    counts = right.view(-1, samples).sum(1).tolist()
    return {
        "eval/greedy": greedy.float().mean().item(),
        "eval/pass@1": sum(counts) / (samples * len(counts)),
        f"eval/pass@{samples}": sum(pass_at_k(samples, c, samples) for c in counts) / len(counts),
        "eval/mean_length": sampled.lengths.float().mean().item(),
        "eval/n": len(greedy),
    }
