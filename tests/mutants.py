"""Mutants: deliberate breaks of the kit, each with the test that notices it.

    python tests/mutants.py    break the package in each of these ways, in memory, run the test, and
                               write the table to data/results/mutants.json

`test_mutants.py` does the same as tests. Where a snippet that a mutant replaces changes, the list
here has to follow. A fork server imports what is heavy and is forked for each mutant.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "data" / "results" / "mutants.json"
TIMEOUT = 600  # seconds that a run of tests may take
HEAVY = "torch transformers datasets pandas scipy.stats pydantic anyio hypothesis pytest".split()
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(HEAVY)  # and nothing of the kit


@dataclass(frozen=True)
class Mutant:
    """A break: in `file` of the checkout `old`, which occurs there once, becomes `new`.

    what: the bug in a sentence, for readers. killed_by: node id of one test that fails with it.
    """

    name: str
    what: str
    file: str
    old: str
    new: str
    killed_by: str


def mutants_of(text: str) -> Iterator[Mutant]:
    """Those of a text: name and what, file, old (-) and new (+) lines, and the test, of each."""
    for block in text.strip().split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith("#")]
        old, new = ("\n".join(x[2:] for x in lines[2:-1] if x[0] == sign) for sign in "-+")
        yield Mutant(*lines[0].split(": ", 1), lines[1], old, new, lines[-1])


BREAKS = """
# rewards become advantages
advantage-sign: The sign of the advantage is flipped: what is worse than its group is reinforced.
grpo_kit/objective.py
- centred = groups - groups.nanmean(dim=1, keepdim=True)
+ centred = groups.nanmean(dim=1, keepdim=True) - groups
tests/test_exact_oracle.py::test_dr_grpo_is_the_exact_policy_gradient[2-graded]

std-ddof-0: The std of a group is that of a population (ddof 0), not of a sample.
grpo_kit/objective.py
- return (variance * count / (count - 1)).sqrt()
+ return variance.masked_fill(count < 2, torch.nan).sqrt()
tests/test_objective.py::test_std_has_ddof_one_and_epsilon_1e_4

none-is-0: A reward that is missing (None) counts as 0, which moves the advantages of its siblings.
grpo_kit/objective.py
- return (rewards_per_func[:, used] * weights[used]).sum(dim=1)
+ return (rewards_per_func[:, used].nan_to_num(0.0) * weights[used]).sum(dim=1)
tests/test_objective.py::test_one_unscored_reward_leaves_siblings_alone

group-constant: A constant is added to the rewards of one group, which centring hides from the \
update.
grpo_kit/training.py
- advantages = self.advantages(rewards, size)
+ rewards[:size] += 0.25
+             advantages = self.advantages(rewards, size)
tests/test_training.py::test_the_reward_of_a_batch_is_the_weighted_sum_of_its_columns[group]

columns-out-of-step: Completions are scored by other prompts' answers: they stand prompt by \
prompt, the data's columns round by round.
grpo_kit/training.py
- [example for row in rows for example in [self.rows[row]] * size]
+ [self.rows[row] for row in rows] * size
tests/test_training.py::test_every_completion_meets_the_columns_of_its_own_prompt[256-0]

# the loss
kl-reversed: The KL term takes the log-ratio of policy and reference the wrong way round.
grpo_kit/objective.py
-     d = ref_logps - logps
+     d = logps - ref_logps
tests/test_exact_oracle.py::test_k1_and_k3_are_unbiased_and_k2_is_not

clip-max: The loss takes the larger of the clipped and the plain term, so that nothing is bounded.
grpo_kit/objective.py
- per_token = -torch.min(bounded * advantages, clipped * advantages)
+ per_token = -torch.max(bounded * advantages, clipped * advantages)
tests/test_exact_oracle.py::test_gradient_equals_the_chain_rule_written_out

truncated-in-the-divisor: Truncated completions are left out of the loss, and their tokens still \
divide it.
grpo_kit/training.py
- "num_items_in_batch": mask.sum() * sequences / episodes
+ "num_items_in_batch": batch.rollouts.mask.sum() * sequences / episodes
tests/test_training.py::test_what_is_left_out_is_not_in_the_divisor_either

masked-in-the-divisor: Masked tokens, of truncated completions say, leave the sum but not the \
count it is divided by.
grpo_kit/objective.py
- tokens = mask.sum() if loss_type == "bnpo"
+ tokens = mask.numel() if loss_type == "bnpo"
tests/test_objective.py::test_growing_a_masked_row_changes_nothing[dapo-token]

micro-batches-averaged: Losses of micro-batches are averaged, though each is already its share of \
the whole.
grpo_kit/training.py
- if not self.parts_add_up:
+ if True:
tests/test_training.py::test_micro_batches_make_the_same_update[dapo]

old-logps-anew: Old log-probabilities are computed anew at every update, so that the ratio is \
always 1.
grpo_kit/training.py
- functions, logps, **inputs,
+ functions, logps, **inputs | {"old_logps": logps.detach()},
tests/test_training.py::test_second_update_from_one_batch_has_a_ratio

# sampling and scoring tokens
eos-masked: The EOS is left out of the mask: the policy never learns when to stop.
grpo_kit/generation.py
- mask[rows, t] = True
+ mask[rows, t] = ~torch.isin(tokens, eos)
tests/test_generation.py::test_mask_counts_the_eos_even_where_it_is_the_padding_id

one-eos: Of several EOS ids only the first ends a completion.
grpo_kit/generation.py
- ended = torch.isin(tokens, eos)
+ ended = tokens == eos[0]
tests/test_generation.py::test_every_eos_id_stops_a_row_and_is_counted

rows-mixed-up: When finished rows leave the batch, they leave the cache but not the list of newest \
tokens, so that completions are mixed up.
grpo_kit/generation.py
- decoding.step(kept, tokens[kept])
+ decoding.step(kept, tokens[: len(kept)])
tests/test_generation.py::test_sampler_and_scorer_agree_with_a_plain_log_softmax[0.7]

padding-shifts-positions: Padding on the left shifts the positions of a prompt's tokens.
grpo_kit/generation.py
- positions = (attention.cumsum(dim=1) - 1).clamp(min=0)
+ positions = torch.arange(attention.shape[1], device=attention.device).expand_as(attention)
tests/test_decoder.py::test_each_family_samples_as_its_rows_alone_would[gpt2]

logps-shifted: Log-probabilities are off by one: each position is scored with the token before its \
own.
grpo_kit/decoder.py
- tokens = rollouts.completion_ids[:, : packed.states.shape[1]][real]
+ tokens = rollouts.completion_ids.roll(1, dims=1)[:, : packed.states.shape[1]][real]
tests/test_generation.py::test_sampler_and_scorer_agree_with_a_plain_log_softmax[1.0]

temperature-forgotten: The temperature is used in sampling and left out of the trainer's \
log-probabilities.
grpo_kit/training.py
- temperature, pad = self.config.temperature, self.policy.pad_token_id
+ temperature, pad = 1.0, self.policy.pad_token_id
tests/test_training.py::test_training_takes_log_probabilities_at_the_sampler_s_temperature

# runs and measurements
resume-repeats-prompts: A resumed run forgets which prompts it has had and begins with the first \
ones anew.
grpo_kit/training.py
- self.taken = state["taken"]
+ self.taken = 0
tests/test_training.py::test_a_killed_and_resumed_run_equals_an_unbroken_one[3]

resume-forgets-adam: A resumed run begins with new moments of Adam.
grpo_kit/training.py
- for name in ("optimizer", "schedule", "scaler"):
+ for name in ("schedule", "scaler"):
tests/test_training.py::test_a_killed_and_resumed_run_equals_an_unbroken_one[3]

schedule-counts-updates: A step that learns from two batches moves the learning-rate schedule on \
twice.
grpo_kit/training.py
- scheduled=not stats
+ scheduled=True
tests/test_self_verification.py::test_verdicts_are_sampled_from_the_policy_that_learns_from_them

pass-at-k-biased: pass@k is 1 - (1 - c/n)^k, which is biased: as if samples were drawn with \
replacement.
grpo_kit/training.py
- return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
+ return 1.0 - (1.0 - correct / n) ** k
tests/test_training.py::\
test_pass_at_k_is_the_share_of_k_subsets_with_a_right_one[4-2-2-0.8333333333333334]

# rewards
similarity-paid: The diversity reward pays what is like the rest of its group.
grpo_kit/rewards/diversity.py
- right * weight * (1 - similarity)
+ right * weight * similarity
tests/rewards/test_diversity.py::test_golden_rewards_by_hand

judge-sees-no-response: The judge is shown the question twice and the response never.
grpo_kit/rewards/judge/reward.py
- self.judge.prompt(question, response)
+ self.judge.prompt(question, question)
tests/rewards/test_judge.py::\
test_each_judgement_is_asked_with_its_own_question_and_response[quality_prompt]

timeout-scored-0: A judgement that timed out is scored 0.
grpo_kit/rewards/judge/reward.py
- judgements[key].reward if key in judgements else None
+ judgements[key].reward if key in judgements else 0.0
tests/rewards/test_judge.py::test_a_failed_judgement_is_none_and_counted_with_its_reason

yes-not-normalised: P(Yes) is that among all tokens, not normalised over Yes and No.
grpo_kit/rewards/meta_evaluation.py
- p_yes, mass = torch.sigmoid(yes - no), yes.exp() + no.exp()
+ p_yes, mass = yes.exp(), yes.exp() + no.exp()
tests/rewards/test_meta_evaluation.py::test_a_shared_cache_reads_what_single_rows_read[2-1]

labels-flipped: Verification labels are flipped: right answers count as wrong ones.
grpo_kit/self_verification.py
- items.append(VerificationItem(question, question, answer, reward == 1))
+ items.append(VerificationItem(question, question, answer, reward != 1))
tests/test_self_verification.py::test_items_are_labelled_answers_and_what_has_none_is_discarded

items-not-balanced: Verification items are not balanced: one label may be the commoner one.
grpo_kit/self_verification.py
- return balance(chosen, filler, n, seed)
+ return (chosen + filler)[:n]
tests/test_self_verification.py::test_the_size_can_be_asked_for_and_a_missing_label_gives_nothing

# episodes of several turns
turns-are-members: Turns are taken for members of the group, so that long episodes weigh more in \
its mean.
grpo_kit/flow/episodes.py
- range(len(episodes[i].turns) if per == "turn" else 1)
+ range(len(episodes[i].turns))
tests/flow/test_episodes.py::test_per_turn_long_episodes_weigh_more_in_mean_and_std

last-turn-only: An episode's advantage reaches its last turn only.
grpo_kit/flow/training.py
- if self.credit == "final":
+ if self.credit:
tests/flow/test_flow_training.py::test_only_what_the_planner_sampled_is_in_a_batch

memory-not-reset: Memory outlives its question: steps are added to what earlier episodes left.
grpo_kit/flow/rollout.py
- one.memory = one.memory.updated(step)
+ system.memory = vars(system).get("memory", one.memory).updated(step)
+         one.memory = system.memory
tests/flow/test_rollout.py::test_memory_is_new_for_every_query

# the same under TRL, over several processes and machines
half-a-checkpoint: TRL's run resumes from a checkpoint of which another process could not save its \
part.
grpo_kit/trl_bridge.py
- saved = [mark.parent for mark in Path(output_dir).glob(f"checkpoint-*/{IDENTITY}")]
+ saved = list(Path(output_dir).glob("checkpoint-*"))
tests/test_trl_bridge.py::test_a_killed_and_resumed_run_equals_an_unbroken_one_in_prompts_too

plan-forgets-a-moment: The planner counts one of Adam's two moments.
grpo_kit/lab/planner.py
- "optimiser": 2 * (lora or weights),
+ "optimiser": lora or weights,
tests/lab/test_planner.py::test_parts_add_up_by_hand
"""
MUTANTS = tuple(mutants_of(BREAKS))


def broken(mutant: Mutant) -> str:
    """The text of the mutant's file with the break in it."""
    text = (CHECKOUT / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.name}: mend what is `old` in tests/mutants.py"
    return text.replace(mutant.old, mutant.new)


class BrokenModule(SourceFileLoader):
    """Finds and loads one module of the package with the break in it."""

    def __init__(self, mutant: Mutant) -> None:
        name = mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        super().__init__(name, str(CHECKOUT / mutant.file))
        self.source = broken(mutant)

    def find_spec(self, name, path=None, target=None):
        return spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname):
        return compile(self.source, self.path, "exec", dont_inherit=True)


def run_tests(folder: str, nodes: list[str], mutant: Mutant | None) -> None:
    """In a process of its own: pytest on some tests, with the package broken by `mutant`, if any.

    The output goes to a file in `folder`; the exit status is pytest's.
    """
    output = os.open(f"{folder}/output", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.alarm(TIMEOUT)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ["COLUMNS"] = "400"  # no line of the summary is cut
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # nbval's imports take longer than torch's
    os.chdir(CHECKOUT)
    sys.path.insert(0, str(CHECKOUT))
    assert not any(name.split(".")[0] == "grpo_kit" for name in sys.modules)
    finder = mutant and BrokenModule(mutant)
    if finder:
        sys.meta_path.insert(0, finder)
    options = "-x -q -rA --tb=short --color=no -p no:cacheprovider".split()
    status = pytest.main([*nodes, *options, f"--basetemp={folder}/t", f"--rootdir={CHECKOUT}"])
    loaded = finder and sys.modules.get(finder.name)
    if loaded and loaded.__spec__.loader is not finder:
        raise RuntimeError(f"{finder.name} was imported from {loaded.__file__}, unbroken")
    sys.exit(status)


def outcome(nodes: list[str], mutant: Mutant | None = None) -> tuple[int, str]:
    """Exit status (minus the signal, if one ended it) and output of `run_tests`."""
    with tempfile.TemporaryDirectory() as folder:
        child = FORKS.Process(target=run_tests, args=(folder, nodes, mutant))
        child.start()
        child.join()
        return child.exitcode, Path(folder, "output").read_text(errors="replace")


def survived(mutant: Mutant) -> str:
    """Run the mutant's test on the broken package: "" if it killed the mutant, else why not.

    It has to fail in an assertion. An exception would say that the mutant cannot run at all.
    """
    status, output = outcome([mutant.killed_by], mutant)
    failed = re.escape(f"FAILED {mutant.killed_by} - ") + "(assert |AssertionError)"
    if status == 1 and re.search(f"^{failed}", output, re.MULTILINE):
        return ""
    return f"mutant {mutant.name} lives: pytest ended with {status}, no assertion failed\n{output}"


def main() -> int:
    """Run all mutants, write the table, print it; 1 if one lives."""
    rows = []
    for mutant in MUTANTS:
        started = time.perf_counter()
        why = survived(mutant)
        seconds = round(time.perf_counter() - started, 1)
        row = asdict(mutant) | {"killed": not why, "seconds": seconds}
        rows.append({k: v for k, v in row.items() if k not in ("old", "new")})
        print(f"{'LIVES' if why else 'killed'} {seconds:5.1f} s  {mutant.name}", why)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{sum(row['killed'] for row in rows)} of {len(rows)} killed: {RESULTS}")
    return int(not all(row["killed"] for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a thread pool would not live through a fork
    sys.exit(main())
