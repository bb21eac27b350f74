"""The GRPO loop: sample groups, score them, compare, update, evaluate, save.

`train` is the loop, on one device (several are TRL's). Its stages are `PromptBatches` (sample,
score, compare), `Learner` (update) and `evaluate`. Groups whose advantages are all zero never reach
the model again, each prompt runs once per update for its whole group, and the first update of a
batch, being on-policy, needs no old log-probabilities.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import get_scheduler

from grpo_kit import hooks, objective
from grpo_kit.config import GRPOConfig
from grpo_kit.generation import Rollouts, check_lengths, completion_logps, reply, sample_groups
from grpo_kit.models import Policy, reference_of, weights_hash
from grpo_kit.paths import writing
from grpo_kit.rewards.rules import accuracy_reward, lenient_accuracy_reward
from grpo_kit.rewards.scoring import (
    PROTOCOL,
    RewardError,
    check_columns,
    check_rewards,
    reward_name,
    reward_names,
    score_texts,
)
from grpo_kit.runs import Run, RunFiles
from grpo_kit.tasks import Task


def train(
    policy: Policy,
    task: Task,
    rewards: Sequence[Callable],
    config: GRPOConfig,
    *,
    output_dir: str | Path,
    seed: int,
    resume: bool = False,
    batch_source: Callable[[PromptBatches], Any] | None = None,
    advantages: Callable[[Tensor, int], Tensor] | None = None,
    surrogate: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
    aggregate: Callable[..., Tensor] | None = None,
    measure: Callable[[Policy], dict[str, float]] | None = None,
    record: Callable[[PromptBatches, Any, int, bool], None] | None = None,
    correct: Callable = accuracy_reward,
) -> Run:
    """Train `policy` in place by GRPO and return its history.

    `surrogate` and `aggregate` are also tried out on small invented tensors before the run, and a
    surrogate is called once more for each micro-batch, for the log: they should not count calls.

    Args:
        policy: model and tokenizer; the model's weights change.
        task: `train` rows to learn from, `test` rows to evaluate on.
        rewards: callables under TRL's reward protocol; a coroutine function may be among them.
        output_dir: gets `history.jsonl`, `run.json` and `checkpoint.pt` as the run goes.
        seed: of the order of prompts and of sampling.
        resume: go on from the checkpoint in `output_dir`; without one, start.
        batch_source: builds the training batches. Gets the default `PromptBatches`, whose interface
            it must match, e.g. `partial(SelfVerification, strategy="mixed")`.
        advantages: in place of `objective.group_advantages` with the config's `scale_rewards` and
            `baseline`: (rewards (N,) float, NaN = not scored; num_generations) -> (N,) float.
        surrogate: in place of `objective.surrogate` with the config's clips: (logps, old_logps
            (N, T) float, nats; advantages (N,); mask (N, T) bool) -> (N, T), what each token adds
            to the loss. `old_logps` is `logps.detach()` in the first update of a batch.
        aggregate: in place of `objective.aggregate` with the config's `loss_type`: (per_token,
            mask (N, T); num_items_in_batch, num_sequences_in_batch: tokens and completions of the
            whole batch, by keyword) -> scalar. Importance weights, the KL of `beta` and the
            weights of an episode's turns are in `per_token`.
        measure: numbers of the policy to log wherever it is evaluated.
        record: called before the first step and after each, with prompts, batch source, step, and
            whether it is the last; e.g. `course.replay.Recorder`. It must leave the run alone.
        correct: a reward that is 1 for a right completion; evaluations and batch sources use it.

    Raises:
        ValueError: something does not fit together; said before any compute where possible.
        RuntimeError: the folder cannot be written or another process writes there, its checkpoint
            is damaged, the loss is not finite, or no completion could be scored for several steps
            in a row. The last checkpoint stays good.
    """
    own = {"advantages": advantages, "surrogate": surrogate, "aggregate": aggregate}
    prompts = PromptBatches(policy, task, rewards, config, seed, advantages, correct)
    source = batch_source(prompts) if batch_source else prompts
    policy.model.eval()  # dropout would make the policy another one at every pass
    learner = Learner(policy, config, surrogate, aggregate)
    generator = torch.Generator().manual_seed(seed)
    start = run_start(policy, source.name, prompts)
    start |= {name: hook and hooks.hook_name(hook) for name, hook in own.items()}
    evaluated = partial(evaluate_run, policy, task, config, measure, seed, correct=correct)

    with ExitStack() as until_the_end:
        until_the_end.enter_context(writing(output_dir))
        files = RunFiles(output_dir, config, seed, start)
        checkpoint = files.resume(policy.device) if resume else files.begin()
        if checkpoint is not None:
            learner.load_state_dict(checkpoint["learner"])
            source.load_state_dict(checkpoint["batch_source"])
            generator.set_state(checkpoint["generator"].cpu())
        step = checkpoint["step"] if checkpoint else 0
        progress = until_the_end.enter_context(progress_bar(config, step))
        if not files.run.history and config.eval_on_start:
            files.log({"step": 0, "num_generated_tokens": 0, **evaluated()})
        if record and not step:
            record(prompts, source, 0, False)
        while (spent := _spent(config, step, files.tokens)) < 1:
            started = time.perf_counter()
            state = SimpleNamespace(global_step=step, max_steps=config.max_steps, progress=spent)
            metrics, stats, names = {}, {}, {}  # of the sampling, of the update, of rewards

            with errors_named(step + 1, files.remedy):
                for batch in source(generator, state, metrics):  # sample, score, compare
                    names |= dict.fromkeys(batch.names)
                    if batch.rewards.isnan().all():
                        continue
                    # the first update of a step moves the schedule on, and is the one in the log
                    update = learner.update(batch, scheduled=not stats)
                    stats = stats or update

            step += 1
            tokens = files.tokens + int(metrics.pop("generated_tokens"))
            done = {"step": step, "num_generated_tokens": tokens}
            row = done | metrics | stats | done  # whatever a reward has logged
            files.count_unscored(row, scored=bool(stats) or not names, names=list(names))
            row["step_time"] = time.perf_counter() - started
            last = _spent(config, step, tokens) == 1
            if last or (config.eval_steps and step % config.eval_steps == 0):
                row |= evaluated(between=not last)
            files.log(row)
            if record:  # before the checkpoint: what a resumed run does not do again is recorded
                record(prompts, source, step, last)
            if last or (config.save_steps and step % config.save_steps == 0):
                sources = {"batch_source": source.state_dict(), "generator": generator.get_state()}
                files.save_checkpoint(step, learner=learner.state_dict(), **sources)
            show_progress(progress, row)
        return files.finish()


# --- before the first step ------------------------------------------------------------------------


def run_start(policy: Policy, source: str, prompts: PromptBatches) -> dict:
    """What a run is besides its config: batch source and rewards by name, data and weights."""
    parameters = list(policy.model.parameters())
    # LoRA's own weights begin at random, so with it the frozen ones tell which model this is
    frozen = [p for p in parameters if not p.requires_grad]
    data = json.dumps([prompts.prompt_ids, prompts.task.train.to_dict()], default=str)
    start = {}
    if prompts.correct is not accuracy_reward:  # older runs have no such entry
        start["correct"] = reward_name(prompts.correct)
    return start | {
        "batch_source": source,
        "rewards": reward_names(prompts.rewards),
        "data": hashlib.sha256(data.encode()).hexdigest()[:12],
        "first weights": weights_hash(frozen or parameters, samples=64),
    }


def _spent(config: GRPOConfig, step: int, tokens: int) -> float:
    """How much of its steps or tokens a run has used up, 0..1."""
    share = tokens / config.max_generated_tokens if config.max_generated_tokens else 0.0
    return min(max(step / config.max_steps, share), 1.0)


@contextmanager
def errors_named(step: int, remedy: str) -> Iterator[None]:
    """Say at which step a reward raised or the loss was not finite, and what to do."""
    try:
        yield
    except FloatingPointError as error:
        raise RuntimeError(f"{error} at step {step}; {remedy}.") from None
    except RewardError as error:
        raise RewardError(f"{error} This was at step {step}; {remedy}.") from error.__cause__


def progress_bar(config: GRPOConfig, done: int, engine: str = "grpo") -> tqdm:
    """A bar of the run's steps, on stdout: in a notebook, stderr looks like a failure."""
    return tqdm(desc=engine, initial=done, total=config.max_steps, file=sys.stdout)


def show_progress(progress: tqdm, row: dict) -> None:
    shown = {"reward": row.get("reward"), "pass@1": row.get("eval/pass@1")}
    shown = {name: f"{value:.2f}" for name, value in shown.items() if value is not None}
    progress.set_postfix(shown, refresh=False)
    progress.update()


# --- sample, score, compare -----------------------------------------------------------------------


@dataclass
class Batch:
    """Scored rollouts: N rows, complete groups."""

    rollouts: Rollouts
    names: list[str]  # of the R rewards
    rewards_per_func: Tensor  # (N, R), NaN = not scored
    rewards: Tensor  # (N,), combined
    advantages: Tensor  # (N,)
    num_generations: int
    examples: list[dict]  # N, the row of data that each completion answers
    logged: dict[str, list[float]] = field(default_factory=dict)  # by rewards
    generated_tokens: int = 0  # also of groups that were sampled and left out
    episode_index: Tensor | None = None  # (N,) long, ascending, where rows are turns of episodes
    token_weights: Tensor | None = None  # (N, T), times what each token adds to the loss

    def metrics(self) -> dict[str, float]:
        """What TRL logs of a generation batch, under its names; none of what was not scored."""
        lengths = self.rollouts.lengths.float()
        low, high = _extremes(self.rewards.view(-1, self.num_generations))
        metrics = _mean_and_std("reward", self.rewards, "reward_std") | {
            "frac_reward_zero_std": (low >= high).float().mean().item(),
            "frac_unscored": self.rewards.isnan().float().mean().item(),
            "completions/mean_length": lengths.mean().item(),
            "completions/clipped_ratio": (~self.rollouts.finished).float().mean().item(),
            "entropy": (self.rollouts.entropies.sum() / lengths.sum()).item(),
        }
        for name, column in zip(self.names, self.rewards_per_func.T, strict=True):
            metrics |= _mean_and_std(f"rewards/{name}/mean", column, f"rewards/{name}/std")
        logged = {name: sum(values) / len(values) for name, values in self.logged.items()}
        return metrics | logged | metrics  # a reward's own names do not replace these

    @staticmethod
    def concatenate(parts: Sequence[Batch]) -> Batch:
        """Several batches, of one group size, as one to update on.

        Their groups are interleaved, so that each optimiser step has something of all. A reward
        that a batch lacks is NaN in `rewards_per_func`. ValueError for batches of weighted tokens.
        """
        if any(part.token_weights is not None for part in parts):
            raise ValueError("weighted batches are not joined: give the joined one token_weights.")
        size = parts[0].num_generations
        names = list(dict.fromkeys(name for part in parts for name in part.names))
        scored = []
        for part in parts:
            columns = torch.full((len(part.rewards), len(names)), math.nan)
            columns[:, [names.index(name) for name in part.names]] = part.rewards_per_func
            scored.append((part.rollouts, columns, part.examples))
        sizes = [len(part.rewards) // size for part in parts]
        groups = torch.cat([(torch.arange(n) + 0.5) / n for n in sizes]).argsort(stable=True)
        rows = (groups[:, None] * size + torch.arange(size)).flatten()
        rollouts, rewards_per_func, examples = _selected(*_joined(scored), rows)
        rewards, advantages = (
            torch.cat([getattr(part, name) for part in parts])[rows]
            for name in ("rewards", "advantages")
        )
        return Batch(
            rollouts, names, rewards_per_func, rewards, advantages, size, examples,
            generated_tokens=sum(part.generated_tokens for part in parts),
        )  # fmt: skip


def _extremes(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and highest value of each row that is not NaN; infinite where all are."""
    return groups.nan_to_num(nan=torch.inf).amin(1), groups.nan_to_num(nan=-torch.inf).amax(1)


def _mean_and_std(name: str, values: Tensor, std: str) -> dict[str, float]:
    """The metrics `name` and `std` of what is scored; none where nothing is."""
    values = values[~values.isnan()]
    if not len(values):
        return {}
    return {name: values.mean().item(), std: values.std().item() if len(values) > 1 else 0.0}


class PromptBatches:
    """The default batch source: groups of completions of the task's prompts, epoch by epoch.

    A batch source is called with the generator, the state of a step (`global_step`, `max_steps`,
    `progress` in 0..1) and the step's `metrics`, into which it writes its own, `generated_tokens`
    among them. It yields batches; `train` learns from each before it asks for the next, so all are
    sampled on-policy. It has a `name`, and a state that a checkpoint keeps.

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
        advantages: Callable | None = None,
        correct: Callable = accuracy_reward,
    ) -> None:
        check_task(task, rewards, config, correct)
        policy.check_template(task.train[0]["prompt"])
        policy.compute_in(config.bf16)
        if config.eval_prompts:
            tested = policy.encode(task.test["prompt"][: config.eval_prompts])
            check_lengths(policy.model, tested, config.max_completion_length, "test prompt")
        self.policy, self.task, self.config, self.seed = policy, task, config, seed
        self.rewards, self.rows, self.correct = list(rewards), task.train, correct
        self.advantages = hooks.advantages_by(advantages, config)  # (rewards, G) -> (N,)
        self.own_advantages = advantages is not None  # a hook, which a batch source may refuse
        self.prompt_ids = policy.encode(task.train["prompt"])
        check_lengths(policy.model, self.prompt_ids, config.max_completion_length)
        self.taken = 0

    def of(self, rows: Sequence[dict], rewards: Sequence[Callable]) -> PromptBatches:
        """The same sampling for other rows of data, each with its `prompt`, and other rewards."""
        other = copy.copy(self)
        other.rows, other.rewards, other.seed, other.taken = rows, list(rewards), 0, 0
        other.prompt_ids = self.policy.encode([row["prompt"] for row in rows])
        return other

    def take(self, count: int) -> list[int]:
        """The next `count` rows of an endless walk, each epoch in its own order."""
        rows: list[int] = []
        while len(rows) < count:
            epoch, place = divmod(self.taken, len(self.rows))
            order = list(range(len(self.rows)))
            random.Random(f"{self.seed}-{epoch}").shuffle(order)
            chosen = order[place : place + count - len(rows)]
            rows += chosen
            self.taken += len(chosen)
        return rows

    def __call__(
        self, generator: torch.Generator, state: Any, metrics: dict, sample=None, **changes
    ) -> Iterator[Batch]:
        """Yield one generation batch of the next prompts, with `changes` to the config.

        With `dynamic_sampling_rounds` (DAPO, arXiv 2503.14476, eq. 11), groups whose answers are
        all right or all wrong, see `dynamic_sampling_metric`, are replaced by groups of further
        prompts, for at most that many rounds. `sample` takes the place of `sample_groups`; it gets
        lists of prompt ids.
        """
        config = dataclasses.replace(self.config, **changes)
        size, rounds = config.num_generations, config.dynamic_sampling_rounds
        missing = config.generation_batch_size // size  # groups
        sample = sample or partial(sample_groups, self.policy, config=config, generator=generator)
        kept: list[Scored] = []
        logged: dict[str, list[float]] = {}
        generated_tokens = 0
        while missing:
            rows = self.take(missing)
            rollouts = sample([self.prompt_ids[row] for row in rows])
            examples = [example for row in rows for example in [self.rows[row]] * size]
            rewards_per_func = score(self.policy, rollouts, examples, self.rewards, state, logged)
            scored = rollouts, rewards_per_func, examples
            generated_tokens += int(rollouts.mask.sum())
            kept.append(self._mixed_groups(scored, config) if rounds else scored)
            missing -= len(kept[-1][2]) // size
            rounds -= 1
        rollouts, rewards_per_func, examples = _joined(kept)
        rewards = objective.combine_rewards(rewards_per_func, config.reward_weights)
        if config.multi_objective_aggregation == "normalize_then_sum":
            weights = config.reward_weights
            advantages = objective.decoupled_advantages(rewards_per_func, size, weights)
        else:
            advantages = self.advantages(rewards, size)
        names = reward_names(self.rewards)
        batch = Batch(
            rollouts, names, rewards_per_func, rewards, advantages, size, examples, logged,
            generated_tokens,
        )  # fmt: skip
        metrics |= batch.metrics() | {"generated_tokens": generated_tokens}
        yield batch

    def _mixed_groups(self, scored: Scored, config: GRPOConfig) -> Scored:
        """The groups in which the completions differ by `dynamic_sampling_metric`."""
        size, names = config.num_generations, reward_names(self.rewards)
        metric = config.dynamic_sampling_metric
        if metric is None:
            metric = reward_name(self.correct) if reward_name(self.correct) in names else "reward"
        if metric == "reward" and config.multi_objective_aggregation == "normalize_then_sum":
            values = objective.decoupled_advantages(scored[1], size, config.reward_weights)
        elif metric == "reward":
            values = objective.combine_rewards(scored[1], config.reward_weights)
        else:
            values = scored[1][:, names.index(metric)]
        low, high = _extremes(values.view(-1, size))
        rows = ((low < high).nonzero() * size + torch.arange(size)).flatten()
        return _selected(*scored, rows)

    def state_dict(self) -> dict:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict) -> None:
        self.taken = state["taken"]


Scored = tuple[Rollouts, Tensor, list[dict]]  # rollouts, rewards_per_func, examples


def _joined(parts: Sequence[Scored]) -> Scored:
    rollouts, rewards_per_func, examples = zip(*parts, strict=True)
    return Rollouts.concatenate(rollouts), torch.cat(rewards_per_func), sum(examples, [])


def _selected(rollouts: Rollouts, rewards_per_func: Tensor, examples: list, rows: Tensor) -> Scored:
    chosen = rollouts.select(rows.to(rollouts.mask.device))
    return chosen, rewards_per_func[rows], [examples[row] for row in rows.tolist()]


def check_task(
    task: Task, rewards: Sequence[Callable], config: GRPOConfig, correct: Callable = accuracy_reward
) -> None:
    """Raise ValueError where rows, rewards and config do not fit together."""
    check_rewards(rewards)
    if not callable(correct) or isinstance(correct, type):
        raise TypeError(f"correct is {correct!r:.80}; give a reward, such as accuracy_reward.")
    names = [*reward_names(rewards), "reward", None]
    if config.dynamic_sampling_metric not in names:
        given = f"dynamic_sampling_metric is {config.dynamic_sampling_metric!r}"
        raise ValueError(f"{given}; choose one of {', '.join(map(repr, names))}.")
    if config.reward_weights is not None and len(config.reward_weights) != len(rewards):
        given = f"reward_weights has {len(config.reward_weights)} values"
        raise ValueError(f"{given} for {len(rewards)} rewards; give one a reward.")
    for name, split in (("train", task.train), ("test", task.test)):
        if not len(split):
            raise ValueError(f"the {name} rows of task {task.name!r} are empty; give at least one.")
        rows = f"the {name} rows of task {task.name!r} have"
        if taken := [column for column in split.column_names if column in PROTOCOL]:
            problem = f"{rows} the column {taken[0]!r}, which rewards get from the trainer"
            raise ValueError(f"{problem}; rename it.")
        if not isinstance(split[0].get("prompt"), list):
            messages = '[{"role": "user", "content": "What is 1 + 1?"}]'
            raise ValueError(f"{rows} no column 'prompt' of messages; give each row {messages}.")
    for reward in rewards:
        check_columns(reward, task.train.column_names, f"task {task.name!r}")
    if not config.eval_prompts:
        return
    if correct is not accuracy_reward:
        check_columns(correct, task.test.column_names, f"the test rows of task {task.name!r}")
    elif not have_answers(task.test):
        warnings.warn(
            f"The test rows of task {task.name!r} have nothing in a column 'answer': accuracy, "
            "pass@1 and pass@k are not measured. Add it, or say what is right by `correct=`.",
            stacklevel=4,
        )


def have_answers(rows: Any) -> bool:
    """Whether a dataset says what is right in its column `answer`, for one row at least."""
    return "answer" in rows.column_names and any(a is not None for a in rows["answer"])


def score(
    policy: Policy, rollouts: Rollouts, examples: Sequence[dict], rewards: Sequence[Callable],
    state: Any = None, logged: dict[str, list[float]] | None = None,
) -> Tensor:  # fmt: skip
    """Rewards of all completions, (N, R), see `score_texts`; `examples` are their rows of data."""
    ids = rollouts.completion_lists()
    return score_texts(policy.decode(ids), ids, examples, rewards, state, logged)


# --- update ---------------------------------------------------------------------------------------

# of completions and their prompts that a CPU takes in one pass: more take memory and save no time
PASS_TOKENS = 2048
KL_OPTIONS = ("beta", "use_bias_correction_kl", "importance_sampling_level")


class Learner:
    """What learns from batches: AdamW over the trained weights, its schedule, the reference.

    float16 arithmetic (GPUs before Ampere have no bfloat16) scales the loss, since its smallest
    gradients would be 0; a step whose gradient overflows is skipped, and the next is scaled less.
    `surrogate` and `aggregate` are those of `train`.

    Raises ValueError where no weight of the policy requires a gradient.
    """

    def __init__(
        self,
        policy: Policy,
        config: GRPOConfig,
        surrogate: Callable | None = None,
        aggregate: Callable | None = None,
    ) -> None:
        self.policy, self.config = policy, config
        self.surrogate, self.own_surrogate = hooks.surrogate_by(surrogate, config), surrogate
        self.aggregate = hooks.aggregate_by(aggregate, config)
        self.parts_add_up = hooks.adds_up(self.aggregate)
        self.may_cut = self.parts_add_up and hooks.acts_by_row(self.surrogate)
        self.parameters = [p for p in policy.model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError("no weight of the policy requires a gradient; is it a frozen copy?")
        matrices = [p for p in self.parameters if p.dim() > 1]
        vectors = [p for p in self.parameters if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
            fused=True,
        )
        self.schedule = get_scheduler(
            config.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=config.max_steps * config.updates_per_step,
        )
        in_float16 = policy.half == torch.float16
        self.scaler = torch.amp.GradScaler(policy.device.type, 2.0**12, enabled=in_float16)
        self.reference = reference_of(policy) if config.beta else None
        self.all_rows = (  # rows without advantage have a gradient, or count
            self.reference is not None
            or not self.may_cut
            or not hooks.ignores_zero_advantages(self.surrogate)
        )
        self.kl_options = {name: getattr(config, name) for name in KL_OPTIONS}

    def update(self, batch: Batch, *, scheduled: bool = True) -> dict[str, float]:
        """All optimiser steps of one generation batch; returns TRL's metrics.

        In the first of these steps old log-probabilities equal the current ones, so they are
        computed only where more follow. Without `scheduled` the learning rate stays what it is.

        Raises FloatingPointError, and leaves the weights alone, where the loss is not finite.
        """
        whole, config = self._loss_inputs(batch), self.config
        cap, stats = config.importance_sampling_cap, {}
        mismatch: list[Tensor] = []  # between the sampler's log-probabilities and the policy's
        for micro_batches, divisors in self._optimizer_batches(batch, whole["mask"]):
            loss = 0.0
            for rows in micro_batches:
                logps = self._logps(self.policy.model, batch, rows)
                inputs = {name: _cut(values, rows, logps) for name, values in whole.items()}
                if cap is not None:
                    old = logps.detach() if inputs["old_logps"] is None else inputs["old_logps"]
                    sampled = _cut(batch.rollouts.logps, rows, logps)
                    weights = objective.importance_weights(old, sampled, cap)
                    inputs["token_weights"] = weights * inputs.get("token_weights", 1.0)
                    mismatch.append((old - sampled)[inputs["mask"]].abs())
                functions = self.surrogate, self.aggregate
                part = objective.loss_by(*functions, logps, **inputs, **self.kl_options, **divisors)
                if not self.parts_add_up:
                    part = part / len(micro_batches)
                self.scaler.scale(part).backward()
                loss += part.item()
                share = self._share(inputs["mask"], whole["mask"])
                for name, value in self._stats(logps, inputs).items():
                    stats[name] = stats.get(name, 0.0) + value * share
            step = self._optimizer_step(batch, loss, bool(micro_batches), scheduled)
        if mismatch and not (mean := torch.cat(mismatch).nanmean()).isnan():  # NaN: unknown
            stats["sampling/sampling_logp_difference/mean"] = mean.item()
        return {**step, **stats}

    def _optimizer_batches(self, batch: Batch, mask: Tensor) -> Iterator[tuple[list[Tensor], dict]]:
        """The micro-batches of each optimiser step, and what its loss is divided by."""
        # Turns of one episode stay together: an optimiser step takes whole episodes.
        episode, active = _episodes(batch), self._active(batch)
        episodes, size = int(episode[-1]) + 1, self.config.optimizer_batch_size
        for _ in range(self.config.num_iterations):
            for start in range(0, episodes, size):
                chosen = (start <= episode) & (episode < start + size) & active
                sequences = min(start + size, episodes) - start
                divisors = {  # an even share of the batch's tokens, as in TRL
                    "num_items_in_batch": mask.sum() * sequences / episodes,
                    "num_sequences_in_batch": sequences,
                }
                yield self._micro_batches(chosen.nonzero()[:, 0], batch), divisors

    def _stats(self, logps: Tensor, inputs: dict) -> dict[str, float]:
        """Shares of what was clipped and the KL, of one micro-batch."""
        batch = (logps, inputs["old_logps"], inputs["advantages"], inputs["mask"])
        if self.own_surrogate is None:
            stats = objective.policy_loss_stats(*batch, **self.surrogate.keywords)
        else:
            stats = hooks.cut_off_stats(self.surrogate, *batch)
        if self.reference is not None:
            stats["kl"] = objective.mean_kl(logps, inputs["ref_logps"], inputs["mask"])
        return stats

    def _share(self, mask: Tensor, whole: Tensor) -> float:
        """How much the stats of rows with `mask` count in the mean over the batch."""
        counted = mask.sum().item() / max(whole.sum().item(), 1)
        if self.config.importance_sampling_level == "sequence":
            counted = len(mask) / len(whole)
        return counted / self.config.num_iterations

    def _active(self, batch: Batch) -> Tensor:
        """(N,) bool: the rows that the loss needs."""
        if self.all_rows:
            return torch.ones(len(batch.advantages), dtype=torch.bool)
        return batch.advantages != 0

    def _logps(self, model, batch: Batch, rows: Tensor) -> Tensor:
        part = batch.rollouts.select(rows)
        with self.policy.autocast():
            temperature, pad = self.config.temperature, self.policy.pad_token_id
            return completion_logps(model, part, temperature=temperature, pad_token_id=pad)[0]

    @torch.no_grad()
    def _all_logps(self, model, batch: Batch) -> Tensor:
        """(N, T) log-probabilities of all active rows, without gradient."""
        result = torch.zeros(batch.rollouts.mask.shape, device=batch.rollouts.mask.device)
        rows = torch.arange(len(result))[self._active(batch)]
        for part in self._micro_batches(rows, batch):
            logps = self._logps(model, batch, part)
            result[part, : logps.shape[1]] = logps
        return result

    def _loss_inputs(self, batch: Batch) -> dict[str, Tensor | None]:
        """Arguments of `policy_loss` for all N rows, without those that the config leaves out."""
        config, mask = self.config, batch.rollouts.mask
        if config.mask_truncated_completions:
            mask = mask & batch.rollouts.finished[:, None]
        inputs = {"mask": mask, "advantages": batch.advantages.to(mask.device), "old_logps": None}
        if self.reference is not None:
            model, context = self.reference
            with context():
                inputs["ref_logps"] = self._all_logps(model, batch)
        if config.updates_per_step > 1:
            inputs["old_logps"] = self._all_logps(self.policy.model, batch)
        if config.top_entropy_quantile < 1:  # by the entropies at sampling
            entropies = batch.rollouts.entropies
            chosen = objective.high_entropy(entropies, mask, config.top_entropy_quantile)
            inputs["token_weights"] = chosen.float()
        if batch.token_weights is not None:
            given = batch.token_weights.to(mask.device)
            inputs["token_weights"] = given * inputs.get("token_weights", 1.0)
        if batch.episode_index is not None and config.loss_type == "grpo":
            episode = _episodes(batch)
            inputs["turn_weights"] = (1 / episode.bincount()[episode]).to(mask.device)
        return inputs

    def _optimizer_step(
        self, batch: Batch, loss: float, has_gradient: bool, scheduled: bool
    ) -> dict[str, float]:
        if has_gradient:
            self.scaler.unscale_(self.optimizer)
        limit = self.config.max_grad_norm or math.inf
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        overflow = not math.isfinite(grad_norm.item())
        finite = math.isfinite(loss) and (not overflow or self.scaler.get_scale() > 1)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        if finite and has_gradient:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif finite:
            self.optimizer.step()  # moves nothing: no group had a gradient
        if finite and scheduled:
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not finite:
            rewards = batch.rewards.nan_to_num()
            span = f"rewards from {rewards.min():.3g} to {rewards.max():.3g}"
            problem = "loss or gradient is not finite, so that update was not made"
            raise FloatingPointError(f"{problem} ({span}; lower learning_rate)")
        return {
            "loss": loss,
            **({} if overflow else {"grad_norm": grad_norm.item()}),
            **({"loss_scale": self.scaler.get_scale()} if self.scaler.is_enabled() else {}),
            "learning_rate": learning_rate,
        }

    def _micro_batches(self, rows: Tensor, batch: Batch) -> list[Tensor]:
        """`rows` in micro-batches: completions of a prompt together, short ones first."""
        lengths, prompts = batch.rollouts.lengths.cpu(), batch.rollouts.prompt_index.cpu()
        size = self.config.per_device_train_batch_size or self.config.optimizer_batch_size
        if self.policy.device.type == "cpu" and self.may_cut:
            read = (batch.rollouts.prompt_ids[i] for i in prompts[rows].unique())  # each run once
            tokens = int(lengths[rows].sum()) + sum(map(len, read))
            size = min(size, math.ceil(len(rows) / max(math.ceil(tokens / PASS_TOKENS), 1)))
        if len(rows) <= size:
            return [rows] if len(rows) else []
        rows = rows[prompts[rows].argsort(stable=True)]
        longest = torch.zeros_like(lengths).scatter_reduce(0, prompts[rows], lengths[rows], "amax")
        return list(rows[longest[prompts[rows]].argsort(stable=True)].split(size))

    def state_dict(self) -> dict:
        weights = self.policy.model.named_parameters()
        return {
            "model": {name: p.detach() for name, p in weights if p.requires_grad},
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.policy.model.load_state_dict(state["model"], strict=False)  # with LoRA, the trained
        for name in ("optimizer", "schedule", "scaler"):
            getattr(self, name).load_state_dict(state[name])


def _episodes(batch: Batch) -> Tensor:
    """(N,) long: the episode of each row; without episodes each row is its own."""
    rows = torch.arange(len(batch.advantages))
    return rows if batch.episode_index is None else batch.episode_index.cpu()


def _cut(values: Tensor | None, rows: Tensor, logps: Tensor) -> Tensor | None:
    """The given rows, trimmed to the width of `logps` where there is a value a token."""
    if values is None:
        return None
    return values[rows, : logps.shape[1]] if values.dim() == 2 else values[rows]


# --- evaluate -------------------------------------------------------------------------------------


def evaluate_run(
    policy: Policy, task: Task, config: GRPOConfig, measure: Callable | None, seed: int,
    between: bool = False, correct: Callable = accuracy_reward,
) -> dict[str, float]:  # fmt: skip
    """`evaluate` and `measure` at one of a run's ends or, on fewer test rows, `between` them."""
    measured, rows = measure(policy) if measure else {}, task.test
    measured = {name: float(value) for name, value in measured.items()}  # numpy's are no JSON
    if between and config.eval_prompts_between is not None:
        rows = rows.select(range(min(config.eval_prompts_between, len(rows))))
    return evaluate(policy, rows, config, seed=seed, correct=correct) | measured


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, from `correct` of n.

    1 - C(n - c, k) / C(n, k): Codex (arXiv 2107.03374), eq. 1.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k is {k} with {n} samples; it must be between 1 and {n}.")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def evaluate(
    policy: Policy, dataset, config: GRPOConfig, *, seed: int = 0,
    correct: Callable = accuracy_reward,
) -> dict[str, float]:  # fmt: skip
    """Greedy accuracy, pass@1 and pass@k on the first `config.eval_prompts` rows of `dataset`.

    A completion is right if the reward `correct` is 1; a row that it does not score is left out.
    Samples are drawn at `config.temperature`, `config.num_generations_eval` a prompt (k is that
    number), with a generator of their own, so that evaluating changes nothing of the training.
    `between/…` is the same of the first `config.eval_prompts_between` rows, for curves that show
    the same problems everywhere. `…/lenient/…`, beside `accuracy_reward` alone, is by
    `lenient_accuracy_reward`; `…/mean_length/wrong` is of the sampled completions that are wrong.
    {} without rows, or without any `answer` for `accuracy_reward`.
    """
    rows = dataset.select(range(min(config.eval_prompts, len(dataset))))
    strict = correct is accuracy_reward
    if not len(rows) or strict and not have_answers(rows):
        return {}
    prompts, examples, samples = rows["prompt"], list(rows), config.num_generations_eval
    rollouts = reply(
        policy, prompts, 1 + samples, greedy_first=True, temperature=config.temperature,
        generator=torch.Generator().manual_seed(seed),
        max_new_tokens=config.max_completion_length,
        batch_size=config.evaluation_batch_size // samples * (1 + samples),
    )  # fmt: skip
    repeated = [example for example in examples for _ in range(1 + samples)]
    readings = [correct, lenient_accuracy_reward] if strict else [correct]
    values = score(policy, rollouts, repeated, readings).view(len(rows), 1 + samples, -1)
    lengths = rollouts.lengths.view(-1, 1 + samples)[:, 1:]
    warn_if_graded(correct, values[..., 0])
    measured, fewer = _accuracy("eval", values, lengths), config.eval_prompts_between
    if fewer and fewer < len(rows):
        measured |= _accuracy("between", values[:fewer], lengths[:fewer])
    return measured


def warn_if_graded(correct: Callable, values: Tensor) -> None:
    """Warn where what says what is right gives points, but never 1: then nothing counts."""
    if not (values == 1).any() and values.nan_to_num().any():
        most = f"{reward_name(correct)} is {values.nan_to_num().max():g} at most"
        warnings.warn(f"{most}; what says what is right has to be 1 for it.", stacklevel=3)


def _accuracy(name: str, values: Tensor, lengths: Tensor) -> dict[str, float]:
    """Metrics of P prompts, without those that are not scored; {} where none is.

    `values` (P, 1 + S, 1 or 2): the greedy answer first, by `correct` and, if given, leniently.
    `lengths` (P, S): of the samples, in tokens.
    """
    scored = ~values.isnan().any(2).any(1)
    right, lengths = values[scored] == 1, lengths[scored.to(lengths.device)]
    counts, samples = right[:, 1:, 0].sum(1).tolist(), lengths.shape[1]
    if not counts:
        return {}
    measured = {
        f"{name}/greedy": right[:, 0, 0].float().mean().item(),
        f"{name}/pass@1": sum(counts) / (samples * len(counts)),
        f"{name}/pass@{samples}": fmean(pass_at_k(samples, c, samples) for c in counts),
        f"{name}/mean_length": lengths.float().mean().item(),
        f"{name}/n": len(counts),
    }
    wrong = lengths[~right[:, 1:, 0].to(lengths.device)]
    if len(wrong):
        measured[f"{name}/mean_length/wrong"] = wrong.float().mean().item()
    for lenient in right[..., 1:].unbind(2):
        measured[f"{name}/lenient/greedy"] = lenient[:, 0].float().mean().item()
        measured[f"{name}/lenient/pass@1"] = lenient[:, 1:].float().mean().item()
    return measured
