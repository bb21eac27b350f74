"""Instant checks of the notebooks' exercises: `check.<name>(your_function)`.

Each shows one line, right, wrong or not done yet, and never raises, whatever the function does. A
verdict is true only if the function is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from grpo_kit.objective import group_advantages, policy_loss
from grpo_kit.rewards import group_similarities
from grpo_kit.training import pass_at_k as reference_pass_at_k

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


def _judge(function: Callable, cases: Iterable[tuple[tuple, Any, str]], praise: str) -> Verdict:
    """Call `function` with the arguments of each case (arguments, expected, hint)."""
    for arguments, expected, hint in cases:
        try:
            result = function(*arguments)
        except NotImplementedError:
            return Verdict("not done", "replace the body of the function, then run this again.")
        except Exception as error:  # a learner's function may do anything
            return Verdict("wrong", f"it raised {type(error).__name__}: {error}")
        if result is None or result is Ellipsis:
            return Verdict("not done", "the function returns nothing so far.")
        problem = _difference(result, expected)
        if problem:
            return Verdict("wrong", f"{problem}. {hint}")
    return Verdict("right", praise)


def _difference(result: Any, expected: Any) -> str:
    """What is wrong with `result`, in words; empty if nothing is."""
    if isinstance(expected, list):
        if isinstance(result, torch.Tensor) and result.ndim:
            result = result.double().tolist()  # so that a difference is named by its place
        if not isinstance(result, (list, tuple)):
            return f"expected a list, got a {type(result).__name__}"
        if len(result) != len(expected):
            return f"expected {len(expected)} values, got {len(result)}"
        problems = (_difference(r, e) for r, e in zip(result, expected, strict=True))
        return next((f"value {i}: {p}" for i, p in enumerate(problems) if p), "")
    if expected is None or result is None:
        return "" if result is expected else f"expected {expected}, got {result}"
    try:
        actual = torch.as_tensor(result, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return f"expected numbers, got a {type(result).__name__}"
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    if actual.shape != wanted.shape:
        return f"expected shape {tuple(wanted.shape)}, got {tuple(actual.shape)}"
    if not torch.allclose(actual, wanted, atol=1e-5, rtol=1e-4):
        return f"expected {_short(wanted)}, got {_short(actual)}"
    return ""


def _short(values: torch.Tensor) -> str:
    return str([round(v, 4) for v in values.flatten().tolist()]) if values.ndim else f"{values:.4g}"


# --- notebook 00 ----------------------------------------------------------------------------------


def pass_at_k(function: Callable) -> Verdict:
    """`function(n, correct, k)`: the unbiased estimate of pass@k (Codex, arXiv 2107.03374)."""
    cases = [
        ((8, 0, 8), 0.0, "Nothing right among the samples: nothing can be right among k of them."),
        ((8, 3, 1), 3 / 8, "pass@1 is the share of right samples."),
        ((8, 3, 6), 1.0, "Only 5 are wrong, so any 6 hold a right one."),
        ((8, 3, 2), reference_pass_at_k(8, 3, 2), "1 - (1 - c/n)^k draws with replacement."),
        ((100, 7, 20), reference_pass_at_k(100, 7, 20), "Count the ways to choose k wrong ones."),
    ]
    return _judge(function, cases, "k samples drawn without putting any back.")


def near_miss_reward(function: Callable) -> Verdict:
    """`function(completions, answer, **columns)`: 1 - |error| / 10, at least 0; 0 unread."""

    def call(texts: list[str], answers: list[str]) -> Any:
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        return function(
            prompts=[[{"role": "user", "content": "How many?"}]] * len(texts),
            completions=completions,
            completion_ids=[[1, 2]] * len(texts),
            answer=answers,
            difficulty=[2] * len(texts),
        )

    cases = [
        (
            (["<answer>12</answer>", "<answer>15</answer>"], ["12", "12"]),
            [1.0, 0.7],
            "One number a completion: 1 for the right answer, 0.1 less for each that it is off.",
        ),
        ((["<answer>90</answer>"], ["12"]), [0.0], "Far off is 0, not below."),
        (
            (
                ["Twelve, I think.", "<answer>twelve</answer>", "<answer>12</answer>"],
                ["12", "12", "12"],
            ),
            [0.0, 0.0, 1.0],
            "Where there is no number to read, pay 0.",
        ),
    ]
    return _judge(call, cases, "any GRPO trainer that speaks TRL's protocol can train on it.")


# --- notebook 01 ----------------------------------------------------------------------------------


def leave_one_out(function: Callable) -> Verdict:
    """`function(rewards, num_generations)`: each reward minus the mean of the others (RLOO)."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.1, -0.2, 0.7])
    cases = [
        ((rewards[:4], 4), [2 / 3, -2 / 3, -2 / 3, 2 / 3], "The others of four are three."),
        (
            (rewards, 4),
            (group_advantages(rewards, 4, "none") * 4 / 3).tolist(),
            "The others are those of the same group.",
        ),
        ((rewards[:2], 2), [1.0, -1.0], "A group of two works as well."),
    ]
    return _judge(
        function,
        cases,
        "it is G/(G-1) times the advantage without std: the same direction, a larger step.",
    )


def clipped_away(function: Callable) -> Verdict:
    """`function(ratio, advantages, epsilon)`: True where a token's gradient is exactly 0."""
    ratio = torch.tensor([[1.0, 1.1, 1.3, 0.7, 0.9], [1.0, 1.1, 1.3, 0.7, 0.9]])
    advantages = torch.tensor([0.5, -2.0])

    def truth(epsilon: float) -> list:
        logps = ratio.log().requires_grad_()
        policy_loss(
            logps, torch.zeros_like(logps), advantages, torch.ones(2, 5), epsilon=epsilon
        ).backward()
        return (logps.grad == 0).int().tolist()

    cases = [
        (
            (ratio, advantages, epsilon),
            truth(epsilon),
            "min() keeps the unclipped term where it is the smaller one: with A > 0 only a ratio "
            "above 1 + epsilon is cut off, with A < 0 only one below 1 - epsilon.",
        )
        for epsilon in (0.2, 0.05, 0.5)
    ]
    return _judge(
        function,
        cases,
        "clipping stops a step that has gone far enough, never one back.",
    )


def token_weights(function: Callable) -> Verdict:
    """`function(mask, loss_type, max_completion_length)`: each token's share of the loss, (N, T).

    For loss types "grpo", "dapo" and "dr_grpo".
    """
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]).bool()

    def truth(loss_type: str) -> list:
        logps = torch.zeros(3, 5, requires_grad=True)
        policy_loss(
            logps, None, -torch.ones(3), mask, loss_type=loss_type, max_completion_length=8
        ).backward()
        return logps.grad.tolist()

    hints = {
        "grpo": "First each completion's mean, then the mean of the completions.",
        "dapo": "One mean over all unmasked tokens.",
        "dr_grpo": "The divisor is a constant: completions times max_completion_length.",
    }
    cases = [((mask, name, 8), truth(name), f"{name}: {hint}") for name, hint in hints.items()]
    return _judge(
        function,
        cases,
        "under grpo a token of a short completion weighs more than one of a long one.",
    )


# --- notebook 02 ----------------------------------------------------------------------------------


def leave_one_out_similarity(function: Callable) -> Verdict:
    """`function(embeddings, num_generations)`: cosine with the mean of the others, (N,)."""
    square = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    several = torch.tensor([[1.0, 0.2], [0.3, 1.0], [0.5, 0.5], [2.0, 1.0], [0.1, 1.0], [1.0, 0.0]])
    cases = [
        (
            (square, 3),
            group_similarities(square, 3, leave_one_out=True).tolist(),
            "The others of the first one point along the second axis: their cosine is 0.",
        ),
        (
            (several, 3),
            group_similarities(several, 3, leave_one_out=True).tolist(),
            "The others are those of the same group.",
        ),
    ]
    return _judge(function, cases, "the divisor of the mean does not matter to a cosine.")


def rarity(function: Callable) -> Verdict:
    """`function(styles, num_generations)`: 1 minus the share of each style in its group."""
    cases = [
        (
            (["words", "words", "words", "list"], 4),
            [0.25, 0.25, 0.25, 0.75],
            "Three of four share a style, so each of them earns 1 - 3/4.",
        ),
        (
            (["words", "list", "words", "words"], 2),
            [0.5, 0.5, 0.0, 0.0],
            "Count within the group of num_generations answers, not over all.",
        ),
    ]
    return _judge(function, cases, "no embedder, but somebody must name the styles.")


def gated_advantage(function: Callable) -> Verdict:
    """`function(accuracy, bonus, weight, num_generations)`: a bonus among right answers alone."""
    accuracy = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    bonus = torch.tensor([0.4, 0.0, 0.9, 0.1, 0.9, 0.1, 0.2, 0.3])
    plain = group_advantages(accuracy, 4)
    pushed = plain + torch.tensor([0.1, -0.1, 0, 0, 0, 0, 0, 0])
    cases = [
        ((accuracy, bonus, 0.0, 4), plain.tolist(), "Without weight, only accuracy is left."),
        (
            (accuracy, bonus, 0.5, 4),
            pushed.tolist(),
            "The two right answers of the first group have a mean bonus of 0.2; nobody else moves.",
        ),
    ]
    return _judge(
        function, cases, "an all-wrong group teaches nothing again, and the weight counts."
    )


# --- notebook 03 ----------------------------------------------------------------------------------


def judgement_rewards(function: Callable) -> Verdict:
    """`function(judgements)`: (mean - 1) / 4 - 0.5 of four whole numbers from 1 to 5, or None."""
    names = ("accuracy", "grammar", "informativeness", "coherence")

    def given(*values: Any) -> tuple[list[dict]]:
        return ([dict(zip(names, values, strict=False))],)

    cases = [
        (given(5, 5, 5, 5), [0.5], "The best scores are worth the upper end of the range."),
        (given(1, 1, 1, 1), [-0.5], "The worst scores are worth the lower end."),
        (given(5, 4, 3, 3), [0.1875], "Take the mean, then map 1..5 to -0.5..0.5."),
        (given(5, 4, 3), [None], "A score is missing: there is no judgement."),
        (given(9, 4, 3, 3), [None], "9 is no score from 1 to 5."),
        (given(4.5, 4, 3, 3), [None], "4.5 is no whole number."),
        (given("5", 4, 3, 3), [None], '"5" is text, not a number.'),
        (given(True, 4, 3, 3), [None], "True is no score, though Python counts it as 1."),
    ]
    return _judge(function, cases, "what cannot be read is None, never 0.")


def fence(function: Callable) -> Verdict:
    """`function(text)`: the text with every `</response>` in it broken, all letters kept."""

    def closes_and_keeps(text: str) -> Any:
        result = function(text)
        if not isinstance(result, str):
            return result
        kept = [c for c in result if c.isalnum()] == [c for c in text if c.isalnum()]
        return [bool(re.search(r"<\s*/\s*response", result, re.IGNORECASE)), kept]

    attempts = [
        ("14 </response>", "The plain closing tag still closes."),
        ("a</response>b</response>c", "Break every one, not just the first."),
        ("</RESPONSE>", "A model reads capitals just as well."),
        ("< / response >", "So do blanks inside the tag."),
        ("</res</response>ponse>", "Taking the tag out makes a new one of what stood around it."),
    ]
    told = "value 0: does it still close? value 1: are all letters kept?"
    cases = [((text,), [False, True], f"{hint} ({told})") for text, hint in attempts]
    verdict = _judge(closes_and_keeps, cases, "what is fenced in stays in.")
    plain = "12 < 15, <answer>15</answer>"
    unchanged = [((plain,), [True], "A text without the tag must stay as it is.")]
    return verdict and _judge(lambda text: [function(text) == text], unchanged, verdict.message)


def gated_quality(function: Callable) -> Verdict:
    """`function(accuracy, quality)`: quality of right answers, -0.5 of wrong ones, None of None."""
    cases = [
        (([1.0, 0.0], [0.25, 0.5]), [0.25, -0.5], "A wrong answer earns the least, however liked."),
        (
            ([1.0, 1.0, 0.0], [None, -0.25, None]),
            [None, -0.25, -0.5],
            "No judgement of a right answer is None; a wrong one needs none.",
        ),
        (
            ([None, 1.0], [0.5, 0.5]),
            [None, 0.5],
            "Where nobody knows whether it is right, nothing can be paid.",
        ),
    ]
    return _judge(function, cases, "the judge decides among right answers only.")


# --- notebook 04 ----------------------------------------------------------------------------------


def verdict_rewards(function: Callable) -> Verdict:
    """`function(texts, correct)`: 1.0 where the last Yes or No after the analysis is true."""
    cases = [
        ((["Yes", "No"], [True, True]), [1.0, 0.0], "Both answers are right; one verdict says so."),
        ((["No", "Yes"], [False, False]), [1.0, 0.0], "No is the true verdict on a wrong answer."),
        (
            (["<think>No, wait.</think><answer>Yes</answer>"], [True]),
            [1.0],
            "What the analysis says before </think> is no verdict.",
        ),
        ((["Yes? No."], [False]), [1.0], "Of several the last one counts."),
        ((["the answer is YES"], [True]), [1.0], "Capitals do not matter."),
        ((["I know nothing."], [False]), [0.0], "No verdict earns 0, and 'know' holds no No."),
        ((["<think>Yes, surely"], [True]), [0.0], "The analysis was cut off: there is no verdict."),
    ]
    return _judge(function, cases, "the label is what a verdict is compared with.")


def balanced(function: Callable) -> Verdict:
    """`function(right, wrong, n)`: n // 2 of each, from the front, starting again if too few."""
    cases = [
        ((["a", "b", "c"], ["x", "y"], 4), [["a", "b"], ["x", "y"]], "Take n // 2 of each."),
        ((["a", "b", "c"], ["x", "y"], 5), [["a", "b"], ["x", "y"]], "n // 2 of 5 is 2."),
        (
            (["a"], ["x", "y", "z"], 6),
            [["a", "a", "a"], ["x", "y", "z"]],
            "With too few of one label, start again at its first.",
        ),
        (
            ([], ["x", "y"], 4),
            [[], []],
            "With one label missing, the other alone would teach a constant verdict.",
        ),
    ]

    def as_numbers(right: list, wrong: list, n: int) -> Any:
        result = function(right, wrong, n)
        if not isinstance(result, (list, tuple)) or len(result) != 2:
            return result
        return [list(map(str, half)) == want for half, want in zip(result, expected[n, len(right)],
                                                                   strict=True)]  # fmt: skip

    expected = {(arguments[2], len(arguments[0])): want for arguments, want, _ in cases}
    truths: list = [
        (arguments, [True, True], f"{hint} (value 0: the right ones, value 1: the wrong ones.)")
        for arguments, _, hint in cases
    ]
    return _judge(as_numbers, truths, "always saying Yes is now worth no more than a coin.")


def pick(function: Callable) -> Verdict:
    """`function(answers, verdicts)`: place of the first answer with most Yes for its number."""
    cases = [
        ((["7", "9"], [[True, False], [True, True]]), 1, "Count each answer's Yes."),
        ((["7", "9"], [[True, True], [True, True]]), 0, "Of equals take the first."),
        (
            (["7", "9", "7"], [[True, False], [True, False], [True, True]]),
            0,
            "Equal answers are one: 7 has three Yes of four, and stands first at place 0.",
        ),
        (
            (["7", "9"], [[True, True, False, False], [True]]),
            1,
            "Go by the share of Yes, not by their number: one of one beats two of four.",
        ),
        ((["7", None, "9"], [[False], [], [True]]), 2, "An answer without verdicts cannot win."),
    ]
    return _judge(function, cases, "this is best-of-n with the policy's own verdicts.")


# --- notebook 05 ----------------------------------------------------------------------------------


def p_yes(function: Callable) -> Verdict:
    """`function(logits, yes, no)`: P(Yes) among the spellings of Yes and No; logits (B, V)."""
    logits = torch.tensor([[2.0, 0.0, 1.0, 1.0, 5.0], [0.0, 3.0, 0.0, 0.0, -2.0]])
    probs = logits.softmax(-1)
    several = probs[:, [0, 2]].sum(1) / probs[:, [0, 2, 1, 3]].sum(1)
    single = probs[:, 0] / probs[:, [0, 1]].sum(1)
    cases = [
        ((logits, [0], [1]), single.tolist(), "Softmax over the two tokens alone."),
        (
            (logits, [0, 2], [1, 3]),
            several.tolist(),
            "Add up the probabilities of all spellings of each, then divide.",
        ),
        (
            (logits + 200.0, [0, 2], [1, 3]),
            several.tolist(),
            "Large logits overflow exp: take a softmax first.",
        ),
    ]
    return _judge(function, cases, "tokens that say neither do not count.")


def meta_rewards(function: Callable) -> Verdict:
    """`function(p, weights)`: sum over questions of weight * log(max(p, 1e-4)); p (N, K)."""
    p = torch.tensor([[0.9, 0.5], [0.2, 0.0]])
    floor = torch.tensor(1e-4).log()
    cases = [
        ((p[:1], [1.0, 0.0]), [float(p[0, 0].log())], "A weight of 0 leaves a question out."),
        (
            (p[:1], [0.5, 2.0]),
            [float(0.5 * p[0, 0].log() + 2 * p[0, 1].log())],
            "Weight each question's log, then add up.",
        ),
        (
            (p, [1.0, 1.0]),
            [float(p[0].log().sum()), float(p[1, 0].log() + floor)],
            "log 0 would be minus infinity: bound P below by 1e-4.",
        ),
    ]
    return _judge(function, cases, "one sure No cannot outweigh all the rest of its group.")


def stop_early(function: Callable) -> Verdict:
    """`function(accuracies, patience)`: index of the best before `patience` without a better."""
    cases = [
        (([0.2, 0.6, 0.5], 5), 1, "The best is at 1."),
        (([0.2, 0.6, 0.6], 5), 1, "Of equals the first: later is not better."),
        (([0.3, 0.2, 0.1, 0.9], 2), 0, "After two evaluations without a better one, it is over."),
        (([0.3, 0.2, 0.4, 0.1, 0.5], 2), 4, "A new best starts the count again."),
        (([0.5], 1), 0, "A single evaluation is the best there is."),
    ]
    return _judge(function, cases, "a few labels, never trained on, are enough for that.")


# --- notebook 06 ----------------------------------------------------------------------------------


def broadcast(function: Callable) -> Verdict:
    """`function(rewards, turns)`: of one group's episodes to the advantages of all turn rows."""

    def truth(rewards: list, turns: list) -> list:
        own = group_advantages(torch.tensor(rewards), len(rewards)).tolist()
        return [a for a, n in zip(own, turns, strict=True) for _ in range(n)]

    cases = [
        (([1.0, 0.0], [1, 1]), truth([1.0, 0.0], [1, 1]), "One turn each: notebook 01."),
        (
            ([1.0, 0.0, 0.0], [2, 1, 3]),
            truth([1.0, 0.0, 0.0], [2, 1, 3]),
            "A row a turn, episode by episode, each with its episode's advantage.",
        ),
        (
            ([1.0, 0.0], [1, 4]),
            truth([1.0, 0.0], [1, 4]),
            "Mean and std are over episodes: four turns of one make it no more of a member.",
        ),
        (([1.0, 1.0], [2, 1]), [0.0] * 3, "No spread, no advantage."),
    ]
    return _judge(lambda r, t: function(torch.tensor(r), t), cases, "one outcome, every turn.")


def turn_token_weights(function: Callable) -> Verdict:
    """`function(lengths)`: of each episode's turn lengths to the weight of each token, by turn."""

    def truth(lengths: list) -> list:
        return [1 / len(lengths) / len(turns) / n for turns in lengths for n in turns]

    cases = [
        (([[4]],), truth([[4]]), "One episode of one turn: the mean over its tokens."),
        (([[4], [2]],), truth([[4], [2]]), "1/G for each of G episodes."),
        (([[4, 5], [2]],), truth([[4, 5], [2]]), "1/T_i for each turn of an episode of T_i."),
        (
            ([[3, 1, 2], [6], [2, 2]],),
            truth([[3, 1, 2], [6], [2, 2]]),
            "One number a turn, episode by episode: 1/G times 1/T_i times 1/|a|.",
        ),
    ]
    return _judge(function, cases, "each episode has the same say, however long it is.")


def sampled_mask(function: Callable) -> Verdict:
    """`function(turns)`: (prompt, completion) ids of an appended episode to its 0/1 mask."""
    one = [([1, 2], [3, 9])]
    two = [*one, ([1, 2, 3, 9, 4, 5], [6, 9])]
    three = [*two, ([1, 2, 3, 9, 4, 5, 6, 9, 4], [7])]
    cases = [
        ((one,), [1, 1], "What the policy sampled is 1; the first prompt is left out."),
        ((two,), [1, 1, 0, 0, 1, 1], "What stands between two actions was not sampled: 0."),
        ((three,), [1, 1, 0, 0, 1, 1, 0, 1], "As long as everything after the first prompt."),
        (([([1], [2, 2]), ([1, 2, 2], [2])],), [1, 1, 1], "Nothing between: nothing masked."),
    ]
    return _judge(function, cases, "this is the env_mask that TRL takes.")


# --- notebook 07 ----------------------------------------------------------------------------------


def paired_median(function: Callable) -> Verdict:
    """`function(arm, baseline)`: of two arms' values by seed to the median of their differences."""
    cases = [
        (({0: 0.5, 1: 0.7, 2: 0.6}, {0: 0.4, 1: 0.5, 2: 0.3}), 0.2, "The middle of .1, .2, .3."),
        (
            ({0: 0.9, 1: 0.5, 2: 0.1}, {0: 0.8, 1: 0.1, 2: 0.5}),
            0.1,
            "Difference first, median after: the medians of the two arms are equal here.",
        ),
        (({0: 0.5, 3: 0.9}, {3: 0.7}), 0.2, "Only seeds that both arms have make a pair."),
        (
            ({2: 0.9, 0: 0.1, 1: 0.5}, {0: 0.0, 1: 0.1, 2: 0.2}),
            0.4,
            "Pairs go by seed, not by place.",
        ),
    ]
    return _judge(function, cases, "what both runs of a seed owe to it cancels.")


def any_false(function: Callable) -> Verdict:
    """`function(alpha, m)`: chance of a false verdict among `m` independent claims of chance."""
    cases = [
        ((0.05, 1), 0.05, "One claim: alpha itself."),
        ((0.05, 14), 1 - 0.95**14, "That none is false has the chance (1 - alpha)^m."),
        ((0.01, 100), 1 - 0.99**100, "Not m times alpha, which may be more than 1."),
    ]
    return _judge(function, cases, "twenty claims at 5 % are wrong somewhere two times in three.")


def holm(function: Callable) -> Verdict:
    """`function(p_values)`: Holm's adjusted p-values, in the order given."""
    cases = [
        (([0.03],), [0.03], "A single claim needs no correction."),
        (([0.01, 0.04],), [0.02, 0.04], "The smallest counts m times, the next m - 1 times."),
        (([0.04, 0.01],), [0.04, 0.02], "In the order in which they came."),
        (([0.01, 0.011, 0.9],), [0.03, 0.03, 0.9], "None may be below the one before it."),
        (([0.6, 0.7, 0.8],), [1.0, 1.0, 1.0], "A probability is at most 1."),
    ]
    return _judge(
        function,
        cases,
        "of tables in which nothing is true, at most one in twenty calls anything true.",
    )


# --- notebook 08 ----------------------------------------------------------------------------------


def training_bytes(function: Callable) -> Verdict:
    """`function(n, width)`: bytes of n weights, their gradients and Adam's two moments."""
    cases = [
        ((1_000, 4), 16_000, "Weights, gradients, two moments: four numbers a weight."),
        ((1_543_714_304, 4), 24_699_428_864, "Qwen2.5-1.5B in float32: 23 GiB."),
        ((1_000, 2), 8_000, "`width` is that of each of the four."),
    ]
    return _judge(function, cases, "no smaller batch makes it less; fewer trained weights do.")


def decode_floor(function: Callable) -> Verdict:
    """`function(n, weight_bytes, cache_bytes, rows, bandwidth, flops)`: seconds of a step."""
    cases = [
        ((1e9, 2e9, 0, 1, 1e12, 1e14), 0.002, "One row: the weights are read, 2e9 / 1e12."),
        ((1e9, 2e9, 1e6, 1000, 1e12, 1e16), 0.003, "Each row has its own cache to be read."),
        ((1e9, 2e9, 0, 1000, 1e12, 1e14), 0.02, "With many rows computing takes longer: 2 n rows."),
        ((1e9, 4e9, 0, 1, 1e12, 1e14), 0.004, "In float32 more bytes are read: `weight_bytes`."),
        ((1e9, 4e9, 0, 400, 1e12, 1e14), 0.008, "Of float32, too, 2 n operations a row."),
    ]
    return _judge(function, cases, "few rows cost as much as many: sample them together.")


def split_groups(function: Callable) -> Verdict:
    """`function(rows, processes, size)`: groups that lie in more than one process."""
    cases = [
        ((12, 2, 8), 1, "Groups 0-7, 8-15, 16-23; the second process begins at 12."),
        ((16, 4, 8), 0, "Where `rows` is a multiple of `size`, no group is split."),
        ((4, 6, 8), 3, "A group may fill two processes: each of these does."),
        ((12, 4, 8), 2, "Borders at 12, 24 and 36; 24 is between two groups."),
        ((2, 4, 8), 1, "One group in four processes is one split group, not three."),
    ]
    return _judge(function, cases, "choose rows a process as a multiple of the group, or gather.")
