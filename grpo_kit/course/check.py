"""Instant checks of the notebooks' exercises: `check.<name>(your_function)` shows one line.

It never raises, whatever the function does. An exercise needs a case for each typical mistake: the
tests break its notebook's solution in every small way, and its cases must notice.
"""

import copy
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, SupportsFloat

import torch
from torch import Tensor, tensor

from grpo_kit.objective import group_advantages, kl_term, policy_loss
from grpo_kit.rewards import group_similarities
from grpo_kit.rewards.judge.texts import CRITERIA
from grpo_kit.training import pass_at_k as estimate_pass_at_k

MARKS = {"right": "✔ right", "wrong": "✘ not yet", "not done": "… not done yet"}


@dataclass(frozen=True)
class Verdict:
    """`state` is "right", "wrong" or "not done"; shown as one line."""

    state: str
    message: str

    def __bool__(self) -> bool:
        return self.state == "right"

    def __repr__(self) -> str:
        return f"{MARKS[self.state]}: {self.message}"


@dataclass(frozen=True)
class Exercise:
    """A function to be written; call this with a solution for the verdict.

    `cases`: hint for a solution that fails -> its arguments and, last, the expected result.
    `praise`: what a right solution is told. `call`: calls the solution with a case's arguments.
    """

    task: str
    cases: dict[str, tuple]
    praise: str
    call: Callable = lambda function, *arguments: function(*arguments)

    def __call__(self, function: Callable) -> Verdict:
        # A copy of the cases, as a solution may change its arguments.
        name = getattr(function, "__name__", "function")
        for number, (hint, (*arguments, expected)) in enumerate(copy.deepcopy(self.cases).items()):
            call = f"{name}({_text(arguments)[1:-1]})"
            try:
                result = self.call(function, *arguments)
                if number == 0 and (result is None or result is Ellipsis):
                    return Verdict("not done", "the function returns nothing so far.")
                if _same(result, expected):
                    continue
                got = _text(result)
            except NotImplementedError:
                return Verdict("not done", "replace the function's body, then run this again.")
            except Exception as error:  # a learner's function may do anything
                got = f"an error, {type(error).__name__}: {error}"
            return Verdict("wrong", f"{call}: expected {_text(expected)}, got {got}. {hint}")
        return Verdict("right", self.praise)


def _same(result: Any, expected: Any) -> bool:
    """Whether they are equal: numbers nearly, tensors and tuples as lists."""
    result = result.tolist() if isinstance(result, Tensor) else result
    expected = expected.tolist() if isinstance(expected, Tensor) else expected
    if isinstance(expected, list):
        alike = isinstance(result, (list, tuple)) and len(result) == len(expected)
        return alike and all(map(_same, result, expected))
    if expected is None or isinstance(expected, str):
        return type(result) is type(expected) and result == expected
    number = isinstance(result, SupportsFloat)
    return number and math.isclose(result, expected, rel_tol=1e-4, abs_tol=1e-5)


def _text(value: Any, width: int = 400) -> str:
    """A value in one line: tensors as lists, numbers rounded."""
    value = value.tolist() if isinstance(value, Tensor) else value
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    if isinstance(value, list):
        text = f"[{', '.join(_text(item) for item in value)}]"
    return text if len(text) <= width else f"{text[: width - 2]}…{text[-1]}"


def _solved(reference: Callable, inputs: dict[str, tuple]) -> dict[str, tuple]:
    """Cases of which `reference` gives the expected results."""
    return {hint: (*arguments, reference(*arguments)) for hint, arguments in inputs.items()}


# --- notebook 00
pass_at_k = Exercise("(n, correct, k): the unbiased estimate of pass@k (arXiv 2107.03374)", {
    "With no right sample, none can be among k of them.": (8, 0, 8, 0.0),
    "pass@1 is the share of right samples.": (8, 3, 1, 3 / 8),
    "Only 5 are wrong, so any 6 hold a right one.": (8, 3, 6, 1.0),
    "1 - (1 - c/n)^k draws with replacement.": (8, 3, 2, estimate_pass_at_k(8, 3, 2)),
}, "k samples drawn without putting any back.")  # fmt: skip


def _as_a_trainer_does(function: Callable, completions: list, answer: list[str]) -> Any:
    n = len(answer)
    prompts = [[{"role": "user", "content": "How many?"}]] * n
    columns = {"prompts": prompts, "completion_ids": [[1, 2]] * n, "difficulty": [2] * n}
    return function(completions=completions, answer=answer, **columns)


def _said(*texts: str) -> list:
    return [[{"role": "assistant", "content": text}] for text in texts]


near_miss_reward = Exercise("(completions, answer, **columns): 1 - |error| / 10, at least 0", {
    "Return one number per completion: 1 if right, 0.1 less for each that it is off.":
        (_said("<answer>12</answer>", "<answer>15</answer>"), ["12", "12"], [1.0, 0.7]),
    "Too small is as bad as too large.": (_said("<answer>9.5</answer>"), ["12"], [0.75]),
    "Far off is 0, not below.": (_said("<answer>90</answer>"), ["12"], [0.0]),
    "Where there is no number to read, pay 0.": (_said("Twelve, I think.", "<answer>12</answer>",
        "12: <answer>twelve</answer>"), ["12", "12", "12"], [0.0, 1.0, 0.0]),
    "The last answer counts, and nothing after it.":
        (_said("<answer>3</answer> No: <answer>13</answer>, after 2 tries."), ["12"], [0.9]),
}, "any GRPO trainer that speaks TRL's protocol can train on it.", _as_a_trainer_does)  # fmt: skip

# --- notebook 01
SCORED = tensor([1.0, 0.0, math.nan, 0.5, math.nan, math.nan, 0.2, 0.7])
scored_advantages = Exercise("(rewards, num_generations): NaN = not scored", _solved(
    group_advantages, {
    "Where all are scored, it is the advantage of Step 2.": (tensor([1.0, 0.0, 0.0, 1.0]), 4),
    "The mean of what is scored is 0.5, and its std 0.5.": (SCORED[:4], 4),
    "Each group has its own mean, std and number of scored answers.": (SCORED, 4),
    "The ε matters where the std is small.": (tensor([0.51, 0.5, math.nan]), 3),
}), "the siblings of an answer that nobody scored do not notice it.")  # fmt: skip


def _no_gradient(ratio: Tensor, advantages: Tensor, epsilon: float) -> Tensor:
    logps = ratio.log().requires_grad_()
    old, mask = torch.zeros_like(ratio), torch.ones_like(ratio)
    policy_loss(logps, old, advantages, mask, epsilon=epsilon).backward()
    return logps.grad == 0


clipped_away = Exercise("(ratio, advantages, epsilon): where is the gradient 0?", _solved(
    _no_gradient, {
    f"Which term does min() take, for A > 0 and for A < 0? (ε = {eps})":
        (tensor([[1.0, 1.1, 1.3, 0.7, 0.9]] * 2), tensor([0.5, -0.5]), eps)
    for eps in (0.2, 0.05, 0.5)
}), "clipping stops a step that has gone far enough, never one back.")  # fmt: skip


def _weights(mask: Tensor, loss_type: str, max_completion_length: int) -> Tensor:
    logps, advantages = torch.zeros(mask.shape, requires_grad=True), -torch.ones(len(mask))
    options = {"loss_type": loss_type, "max_completion_length": max_completion_length}
    policy_loss(logps, None, advantages, mask, **options).backward()
    return logps.grad


MASK = tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]).bool()
token_weights = Exercise("(mask, loss_type, max_completion_length): (N, T)", _solved(_weights, {
    "First each answer's mean, then the mean of the answers.": (MASK, "grpo", 8),
    "One mean over all unmasked tokens.": (MASK, "dapo", 8),
    "The divisor is a constant: answers times max_completion_length.": (MASK, "dr_grpo", 8),
}), "under grpo a token of a short answer weighs more than one of a long one.")  # fmt: skip

# --- notebook 01b
REWARDS = tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.1, -0.2, 0.7])
leave_one_out = Exercise("(rewards, num_generations): reward minus the others' mean (RLOO)", {
    "The others of four are three.": (REWARDS[:4], 4, [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
    "The others are of its group.": (REWARDS, 4, group_advantages(REWARDS, 4, "none") * 4 / 3),
}, "it is G/(G-1) times the advantage without std: the same direction, a larger step.")  # fmt: skip

NEW = tensor([[-0.2, -1.1, -0.1], [-0.9, -0.4, -3.0]])
OLD = tensor([[-0.3, -1.5, -0.1], [-0.6, -0.3, -1.0]])
FULL = torch.ones(2, 3).bool()
sequence_ratio = Exercise("(logps, old_logps, mask): exp of the mean log-ratio, (N,)", _solved(
    lambda new, old, mask: ((new - old) * mask).sum(1).div(mask.sum(1)).exp(), {
    "The mean of 0.1, 0.4 and 0 is 1/6; its exp is 1.18.": (NEW, OLD, FULL),
    "The second answer has two tokens: the mean is over these.":
        (NEW, OLD, tensor([[True, True, True], [True, True, False]])),
}), "one ratio, the geometric mean, for all tokens of an answer.")  # fmt: skip


def _with_gradient(function: Callable, logps: Tensor, *others: Tensor) -> Any:
    """The values, and what their sum's gradient by `logps` is."""
    variable = logps.clone().requires_grad_()
    values = function(variable, *others)
    if not isinstance(values, Tensor) or not values.requires_grad:
        return values
    return [values.detach(), torch.autograd.grad(values.sum(), variable)[0]]


REFERENCE = tensor([[-0.7, -0.9, -0.1], [-0.9, -2.4, -1.5]])
unbiased_kl = Exercise("(logps, old_logps, ref_logps): values and gradient of ratio * k3", {
    f"{hint} (Shown: the values, then their gradient by logps.)": (NEW, old, REFERENCE,
        _with_gradient(lambda *given: kl_term(*given, FULL), NEW, old, REFERENCE))
    for hint, old in {
        "Where the ratio is 1 the values are those of k3, but its gradient counts.": NEW,
        "The ratio is exp(logps - old_logps).": OLD}.items()
}, "both sums are there: the gradient is that of the KL.", _with_gradient)  # fmt: skip

overlong_penalty = Exercise("(lengths, longest, cache): 0, then a line down to -1 at longest", {
    "With 20 and 8, the fall begins after 12 tokens.": ([5, 12, 16], 20, 8, [0.0, 0.0, -0.5]),
    "It reaches -1 at `longest`, and stays.": ([20, 18, 35], 20, 8, [-1.0, -0.75, -1.0]),
    "The line has the slope of 1 / cache.": ([90, 85, 100, 300], 100, 20, [-0.5, -0.25, -1, -1]),
}, "a soft fine: it starts before the limit cuts an answer off.")  # fmt: skip

# --- notebook 02
SQUARE = tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
SEVERAL = tensor([[1.0, 0.2], [0.3, 1.0], [0.5, 0.5], [2.0, 1.0], [0.1, 1.0], [1.0, 0.0]])
leave_one_out_similarity = Exercise("(embeddings, num_generations): cosine, (N,)", _solved(
    lambda embeddings, n: group_similarities(embeddings, n, leave_one_out=True), {
    "The others of the first one point along the second axis: their cosine is 0.": (SQUARE, 3),
    "The others are those of the same group.": (SEVERAL, 3),
}), "the divisor of the mean does not matter to a cosine.")  # fmt: skip

RIGHT = tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
BONUS = tensor([0.5, 0.0, 0.9, 0.9, 0.1, 0.2, 0.1, 0.8, 0.3])
gated_advantage = Exercise("(accuracy, bonus, weight, num_generations): pushed right answers", {
    "Without weight, only accuracy is left.": (RIGHT, BONUS, 0.0, 3, group_advantages(RIGHT, 3)),
    "The two right answers of the first group have a mean bonus of 0.25; nobody else moves.":
        (RIGHT, BONUS, 0.4, 3, group_advantages(RIGHT, 3) + tensor([0.1, -0.1] + 7 * [0.0])),
}, "an all-wrong group teaches nothing again, and the weight counts.")  # fmt: skip

# --- notebook 03
BEST, MIXED = dict.fromkeys(CRITERIA, 5), dict(zip(CRITERIA, (5, 4, 3, 3), strict=True))
judgement_rewards = Exercise("(judgements): four whole numbers 1 to 5 -> -0.5 to 0.5, or None", {
    "The best scores are worth the upper end of the range.": ([BEST], [0.5]),
    "The worst scores are worth the lower end.": ([dict.fromkeys(CRITERIA, 1)], [-0.5]),
    "Each judgement has its own reward.": ([MIXED, BEST], [0.1875, 0.5]),
    "Only the four scores count.": ([MIXED | {"rationale": "Fine.", "length": 9}], [0.1875]),
    "A score is missing.": ([dict.fromkeys((*CRITERIA[1:], "length"), 4)], [None]),
    "Scores go from 1 to 5.": ([BEST | {"grammar": 0}, BEST | {"coherence": 6}], [None, None]),
    'Neither 4.5 nor the text "5" is a whole number, nor is True, though Python counts it as 1.':
        ([MIXED | {"accuracy": score} for score in (4.5, "5", True)], [None] * 3),
}, "what cannot be read is None, never 0.")  # fmt: skip


def _fenced(function: Callable, text: str) -> Any:
    """There are many ways to break a tag: what counts is that none closes and no letter is lost."""
    result = function(text)
    if not isinstance(result, str):
        return result
    before, after = (re.search(r"<\s*/\s*response", t, re.IGNORECASE) for t in (text, result))
    kept = [c for c in result if c.isalnum()] == [c for c in text if c.isalnum()]
    return SAFE if not after and kept and (before or result == text) else result


SAFE = "a text whose tags are broken and whose letters are kept"
fence = Exercise("(text): the text with every `</response>` in it broken, all letters kept", {
    "The plain closing tag must not close.": ("14 </response>", SAFE),
    "Break every one, not just the first.": ("a</response>b</response>c", SAFE),
    "A model reads capitals just as well.": ("</RESPONSE>", SAFE),
    "A model reads blanks inside the tag as well.": ("< /  response >, <\n/\tresponse>", SAFE),
    "A model takes it for closed without the `>`, too.": ("14 </response", SAFE),
    "If you take the tag out, what stood around it forms one.": ("</res</response>ponse>", SAFE),
    "A text without the tag must stay as it is.": ("12 < 15, </respons>, response", SAFE),
}, "what is fenced in stays in.", _fenced)  # fmt: skip

gated_quality = Exercise("(accuracy, quality): quality if right, -0.5 if wrong, None if unknown", {
    "A wrong answer earns the least, however liked.": ([1.0, 0.0], [0.25, 0.5], [0.25, -0.5]),
    "Right and unjudged is None.": ([1.0, 1.0, 0.0], [None, -0.25, None], [None, -0.25, -0.5]),
    "Where nobody knows what is right, pay nothing.": ([None, 1.0], [0.5, 0.5], [None, 0.5]),
}, "the judge decides among right answers only.")  # fmt: skip

# --- notebook 04
mixed_schedule = Exercise("(step, spent): the kinds that each update of a step learns from", {
    "At first one update learns from half a batch of each kind.": (0, 0.0, ["GV"]),
    "It is the share of the run that counts: less than half is spent.": (24, 0.49, ["GV"]),
    "From the middle of the run on, most steps learn from answers alone.": (3, 0.5, ["G"]),
    "Every fifth step adds a second update, on verdicts.": (4, 0.9, ["G", "V"]),
    "Steps are counted from 0: the tenth is step 9.": (9, 0.6, ["G", "V"]),
    "A late step that is no fifth one learns from answers, also the first.": (0, 0.9, ["G"]),
    "Step 5 follows a fifth step.": (5, 0.7, ["G"]),
}, "it asks for verdicts often while they are learnt, and seldom afterwards.")  # fmt: skip

pick = Exercise("(answers, verdicts): place of the first answer with the largest share of Yes", {
    "Two Yes of four beat none of one.": (["7", "9"], [[False], [True, True, False, False]], 1),
    "Of equals take the first.": (["7", "9"], [[True, True], [True, True]], 0),
    "Equal answers are one.": (["7", "9", "7"], [[True, False], [True, False], [True, True]], 0),
    "One Yes of one beats two of four.": (["7", "9"], [[True, True, False, False], [True]], 1),
    "Each verdict on an answer counts the same, whichever of its equals it was about.":
        (["7", "9", "7"], [[True], [True, False, False], [False, False, False]], 1),
    "An answer without verdicts cannot win.": ([None, "9"], [[], [False]], 1),
}, "this is best-of-n with the policy's own verdicts.")  # fmt: skip

# --- notebook 05
LOGITS = tensor([[2.0, 0.0, 1.0, 1.0, 5.0], [0.0, 3.0, 0.0, 0.0, -2.0]])
p_yes = Exercise("(logits, yes, no): P(Yes) of their spellings", _solved(
    lambda z, yes, no: z.softmax(-1)[:, yes].sum(1) / z.softmax(-1)[:, yes + no].sum(1), {
    "Softmax over the two tokens alone.": (LOGITS, [0], [1]),
    "Every spelling adds to its word's probability.": (LOGITS, [0, 2], [1]),
    "Large logits overflow exp.": (LOGITS + 200.0, [0, 2], [1, 3]),
}), "tokens that say neither do not count.")  # fmt: skip


COIN = {  # what is looked at -> what is expected of it
    "one step": "a list of 64 coins",
    "100 steps": "1.0 with probability `share`",
    "one step, other answers": "the same coins",
    "two steps": "different coins",
    "a group": "coins that differ",
    "the global generators": "left alone",
}


def _tossed(function: Callable, which: str, share: float) -> Any:
    """What COIN says of `which` if it is true of the coin, else what was found."""

    def pay(step: int, said: str = "<answer>12</answer>") -> list:
        """8 prompts with 8 completions each."""
        paid = function(
            prompts=[_said(f"How many are {i // 8}?")[0] for i in range(64)],
            completions=_said(*[f"{said} {i}" for i in range(64)]), completion_ids=[[1, 2]] * 64,
            answer=["12"] * 64, share=share, trainer_state=SimpleNamespace(global_step=step),
        )  # fmt: skip
        return paid.tolist() if isinstance(paid, Tensor) else paid

    random.random(), torch.rand(1)  # or a reseeded generator might come to where it was before
    before = random.getstate(), torch.get_rng_state().tolist()
    paid = pay(0)
    if not isinstance(paid, list) or len(paid) != 64 or any(str(one) not in ONES for one in paid):
        return paid
    steps = [pay(step) for step in range(1, 101)]
    mean = sum(map(sum, steps)) / 6400
    holds, found = {
        "one step": (True, paid),
        "100 steps": (abs(mean - share) < 0.03, f"1.0 in {mean:.1%} of the cases"),
        "one step, other answers": (pay(0, "No idea.") == paid, "other coins"),
        "two steps": (steps[0] != steps[1], "the same coins"),
        "a group": (any(len({*step[:8]}) == 2 for step in steps), "one coin for all"),
        "the global generators":
            ((random.getstate(), torch.get_rng_state().tolist()) == before, "used"),
    }[which]  # fmt: skip
    return COIN[which] if holds else found


ONES = ("0", "1", "0.0", "1.0", "False", "True")
coin_flip = Exercise("(completions, share, trainer_state, **columns): 1.0 or 0.0 by chance", {
    hint: (which, share, COIN[which]) for hint, which, share in (
        ("Return a list with 1.0 or 0.0 for each completion.", "one step", 0.5),
        ("The text has no say. Seed by the step alone.", "one step, other answers", 0.5),
        ("Each step tosses anew.", "two steps", 0.5),
        ("Toss for each completion: a group that is paid alike teaches nothing.", "a group", 0.5),
        ("Pay 1.0 with probability `share`.", "100 steps", 0.25),
        ("Use the `share` that is given.", "100 steps", 0.8),
        ("Use a generator of your own: the trainer may draw from the global ones.",
         "the global generators", 0.5),
    )
}, "a reward has to beat this one before it gets any credit.", _tossed)  # fmt: skip

TOLD = tensor([0.7, 0.7, 0.3, 0.0]), tensor([True, False, True, False])
cured_rewards = Exercise("(p, right, shown): log P, by the truth where it is shown", _solved(
    lambda p, right, shown: p.where(~shown, 0.02 + 0.96 * right).clamp(min=1e-4).log(), {
    "Where nothing is shown, the evaluator's own P counts, at least 1e-4.":
        (*TOLD, tensor([False] * 4)),
    "Where all is shown, P is 0.98 or 0.02.": (*TOLD, tensor([True] * 4)),
    "Replace only what is shown.": (*TOLD, tensor([True, False, False, True])),
    "The rest stays.": (*TOLD, tensor([False, True, True, False])),
}), "a few of these tie the reward to the truth.")  # fmt: skip

stop_early = Exercise("(accuracies, patience): index of the best before `patience` others", {
    "Of equals the first: later is not better.": ([0.2, 0.6, 0.6], 5, 1),
    "After two evaluations without a better one, it is over.": ([0.3, 0.2, 0.1, 0.9], 2, 0),
    "A new best starts the count again.": ([0.3, 0.2, 0.4, 0.1, 0.5], 2, 4),
    "Better than the one before is not better than the best.": ([0.5, 0.2, 0.3, 0.4, 0.9], 3, 0),
    "A single evaluation is the best there is.": ([0.5], 1, 0),
}, "a few labels, never trained on, are enough for that.")  # fmt: skip

# --- notebook 06
broadcast = Exercise("(rewards, turns): advantages of a group's turn rows", _solved(
    lambda r, turns: group_advantages(r, len(r)).repeat_interleave(tensor(turns)), {
    "A row a turn gets its episode's advantage.": (tensor([1.0, 0.0, 0.0]), [2, 1, 3]),
    "ε matters where the std is small.": (tensor([0.01, 0.0]), [1, 1]),
    "Mean and std are over episodes, however many turns.": (tensor([1.0, 0.0]), [1, 4]),
}), "one outcome, every turn.")  # fmt: skip

turn_token_weights = Exercise("(lengths): each episode's turn lengths -> token weights", _solved(
    lambda episodes: [1 / len(episodes) / len(turns) / n for turns in episodes for n in turns], {
    "One episode of one turn: the mean over its tokens.": ([[4]],),
    "1/G for each of G episodes.": ([[4], [2]],),
    "1/T_i for each turn of an episode of T_i.": ([[4, 5], [2]],),
    "One number a turn, episode by episode.": ([[3, 1, 2], [6], [2, 2]],),
}), "each episode has the same say, however long it is.")  # fmt: skip

TURNS = [([8, 1, 2], [3, 9]), ([8, 1, 2, 3, 9, 4, 5], [6, 9])]
sampled_mask = Exercise("(turns): (prompt, completion) ids of an episode -> its 0/1 mask", {
    "What the policy sampled is 1; the first prompt is left out.": (TURNS[:1], [1, 1]),
    "What stands between two actions was not sampled: 0.": (TURNS, [1, 1, 0, 0, 1, 1]),
    "Nothing between: nothing masked.": ([([1], [2, 2]), ([1, 2, 2], [2])], [1, 1, 1]),
    "What counts is where a token stands, not which it is.":
        ([([1], [2]), ([1, 2, 2, 2, 3], [3])], [1, 0, 0, 0, 1]),
}, "this is the env_mask that TRL takes.")  # fmt: skip

# --- notebook 07
paired_mean = Exercise("(arm, baseline): values by seed -> the mean of their differences", {
    "The mean of .1, .2, .6.": ({0: 0.5, 1: 0.7, 2: 0.9}, {0: 0.4, 1: 0.5, 2: 0.3}, 0.3),
    "Only seeds that both arms have make a pair.": ({0: 0.5, 3: 0.9}, {3: 0.7}, 0.2),
    "Pairs go by seed, not by place.": ({2: 0.9, 0: 0.1}, {0: 0.0, 2: 0.2, 5: 0.3}, 0.4),
}, "what both runs of a seed owe to it cancels.")  # fmt: skip

any_false = Exercise("(alpha, m): chance of a false verdict among `m` independent claims", {
    "One claim: alpha itself.": (0.05, 1, 0.05),
    "How likely is it that none is false?": (0.05, 14, 1 - 0.95**14),
}, "twenty claims at 5 % are wrong somewhere two times in three.")  # fmt: skip

# --- notebook 08
P_LOGS = tensor([[0.6, 0.2, 0.3], [0.3, 0.9, 0.5]]).log()
Q_LOGS = tensor([[0.3, 0.4, 0.1]] * 2).log()
SEEN = tensor([[1, 1, 1], [1, 1, 0]]).bool()
sequence_weight = Exercise("(old_logps, sampled_logps, mask, cap): one weight an answer, (N,)", {
    "The ratios are 2, 1/2 and 3: multiply them.": (P_LOGS[:1], Q_LOGS[:1], SEEN[:1], 4.0, [3.0]),
    "A token that the mask hides does not count.": (P_LOGS, Q_LOGS, SEEN, 4.0, [3.0, 2.25]),
    "Above the cap an answer is left out: its weight is 0, not the cap.":
        (P_LOGS, Q_LOGS, SEEN, 2.5, [0.0, 2.25]),
    "The policy itself has weight 1, which is not above a cap of 1.":
        (P_LOGS, P_LOGS, SEEN, 1.0, [1.0, 1.0]),
    "exp of a large sum is infinite, and infinity times 0 is no number.":
        (P_LOGS[:1], P_LOGS[:1] - 100, SEEN[:1], 2.0, [0.0]),
}, "one unlikely token can silence a whole answer: that is the price of this mode.")  # fmt: skip

split_groups = Exercise("(rows, processes, size): groups that lie in more than one process", {
    "Groups 0-7, 8-15, 16-23; the second process begins at 12.": (12, 2, 8, 1),
    "Where `rows` is a multiple of `size`, no group is split.": (16, 4, 8, 0),
    "A single row in another process splits a group.": (3, 4, 4, 3),
    "Borders at 12, 24 and 36; 24 is between two groups.": (12, 4, 8, 2),
    "One group in four processes is one split group, not three.": (2, 4, 8, 1),
}, "choose rows a process as a multiple of the group, or gather.")  # fmt: skip

free_rows = Exercise("(n, weight_bytes, cache_bytes, bandwidth, flops): rows, or infinity", {
    "Without a cache: 2e9 bytes at 1e12 a second last as long as 100 rows of 2e9 operations.":
        (1e9, 2e9, 0, 1e12, 1e14, 100.0),
    "Each row's cache is read as well: a row computes 2e-5 s and reads 1e-5 s.":
        (1e9, 2e9, 1e7, 1e12, 1e14, 200.0),
    "A row that reads longer than it computes never catches up.":
        (1e9, 2e9, 3e7, 1e12, 1e14, math.inf),
    "If both take equally long, it never catches up either.": (1, 5.0, 8, 8.0, 2, math.inf),
    "In float32 there are more bytes to read: `weight_bytes`.": (1e9, 4e9, 0, 1e12, 1e14, 200.0),
}, "at long contexts it is infinite: each row then pays for reading its own cache.")  # fmt: skip

# --- notebook 09
zero_spread = Exercise("(rewards, num_generations): the share of groups without spread", {
    "The groups are [1, 1] and [0, 0].": ([1, 1, 0, 0], 2, 1.0),
    "One group of four, with two values.": ([1, 1, 0, 0], 4, 0.0),
    "A group stands together: [0, 1] and [1, 1].": ([0, 1, 1, 1], 2, 0.5),
    "Equal is enough, whatever the value.": ([0.3, 0.3, 0.7, 0.7, 0.1, 0.2], 2, 2 / 3),
    "Rewards may cancel out: [-1, 1] has spread.": ([-1, 1, 0, 0], 2, 0.5),
    "Three of four alike is still a spread.": ([1, 1, 1, 0, 0, 0, 0, 0], 4, 0.5),
}, "without spread there is no advantage, and no gradient.")  # fmt: skip

_FINE = {"loss": 0.0, "grad_norm": 0.4, "frac_reward_zero_std": 0.2,
         "completions/clipped_ratio": 0.1}  # fmt: skip
_CUT, _ALIKE = {"completions/clipped_ratio": 1.0}, {"frac_reward_zero_std": 1.0, "grad_norm": 0.0}
tell = Exercise("(row): not-finite, clipped, no-spread, vanishing-gradient or healthy", {
    "A loss of 0 is healthy, as in case 1.": (_FINE, "healthy"),
    "NaN is not finite.": (_FINE | {"loss": math.nan}, "not-finite"),
    "Infinity is not finite either, nor is minus infinity.": (
        _FINE | {"loss": -math.inf}, "not-finite"),
    "Nine in ten are cut off.": (_FINE | {"completions/clipped_ratio": 0.9}, "clipped"),
    "Eight in ten are not yet nine.": (_FINE | {"completions/clipped_ratio": 0.8}, "healthy"),
    "Nine groups in ten agree.": (_FINE | {"frac_reward_zero_std": 0.9}, "no-spread"),
    "No group has spread, so no gradient is to be expected.": (_FINE | _ALIKE, "no-spread"),
    "Some groups agree in every run.": (_FINE | {"frac_reward_zero_std": 0.8}, "healthy"),
    "There is spread, and still no gradient.": (_FINE | {"grad_norm": 9e-7}, "vanishing-gradient"),
    "A small gradient is a gradient.": (_FINE | {"grad_norm": 1e-6}, "healthy"),
    "What is cut off earns nothing: name the cause, not what follows.": (
        _FINE | _CUT | _ALIKE, "clipped"),
    "The worst comes first.": (_FINE | _CUT | _ALIKE | {"loss": math.nan}, "not-finite"),
}, "that is how grpo-kit doctor begins; it looks at whole runs.")  # fmt: skip

put_back = Exercise("(values, order): values[j] belongs to answer order[j]; in order of answers", {
    "The first value, 0.1, belongs to answer 2.": ([0.1, 0.2, 0.3], [2, 0, 1], [0.2, 0.3, 0.1]),
    "These are in order already.": ([0.3, 0.1, 0.2], [0, 1, 2], [0.3, 0.1, 0.2]),
    "A value that is missing keeps its place, too.": ([1.0, None], [1, 0], [None, 1.0]),
    "Do not sort the values themselves.": (
        [0.9, 0.1, 0.5, 0.5], [3, 0, 2, 1], [0.1, 0.5, 0.5, 0.9]),
    "Each answer keeps its own value.": (
        [0.0, 1.0, 0.5, 0.25], [1, 2, 3, 0], [0.25, 0.0, 1.0, 0.5]),
}, "each answer has its own reward again: case 6 is cured.")  # fmt: skip
