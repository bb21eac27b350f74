"""The meta-evaluation reward: ask a model whether the answer is right, take P("Yes") as the reward.

Source: RLME (arXiv 2601.21268), from summaries of the paper. Its cure for a policy that learns to
please its evaluator: show the evaluator the truth on a small share of the samples.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_kit.rewards.judge.texts import fenced
from grpo_kit.rewards.rules import column, completion_text

if TYPE_CHECKING:
    from grpo_kit.models import Policy

META_QUESTION = "Is the answer correct?"
STEPS_QUESTION = "Are all steps right?"
BREVITY_QUESTION = "Is the answer short?"
LEAST_P = 1e-4  # log P is bounded, or one sure "No" would outweigh the rest of its group


def reference_question(answer: str, question: str = META_QUESTION) -> str:
    """A meta-question after the reference answer, which the evaluator then knows."""
    return f"The reference answer is {answer}. {question}"


def yes_no_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids of the spellings of Yes and of No that are one token, else of the word's first token."""

    def tokens(word: str) -> list[int]:
        forms = [space + form for space in ("", " ") for form in (word, word.lower(), word.upper())]
        spellings = [
            [token for token in ids if token != tokenizer.unk_token_id]
            for ids in tokenizer(forms, add_special_tokens=False)["input_ids"]
        ]
        return sorted({ids[0] for ids in spellings if len(ids) == 1}) or spellings[0][:1]

    yes, no = tokens("Yes"), tokens("No")
    if not yes or not no or set(yes) & set(no):
        raise ValueError("Yes and No share their first token, or the tokenizer lacks them.")
    return yes, no


def as_turns(prompt: str | list[dict], completion: str, question: str) -> list[dict]:
    """The meta-question as the user's next turn after the completion, which cannot end its own."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answer = {"role": "assistant", "content": fenced(completion)}
    return [*turns, answer, {"role": "user", "content": question}]


class Reading(NamedTuple):
    p_yes: float  # P("Yes") of Yes or No
    mass: float  # the share of the next token on the two together


def read_yes(
    evaluator: Policy, conversations: Sequence[Sequence[list[dict]]], *, batch_size: int = 64
) -> list[list[Reading] | None]:
    """What the evaluator would say next to each of K conversations of N rows, without gradient.

    None for a row with a conversation beyond the context. `batch_size` is in conversations.
    """
    import torch

    from grpo_kit.generation import fitting_batches, last_logits

    ids = evaluator.encode([one for row in conversations for one in row])
    readings: list[Reading | None] = [None] * len(ids)
    spellings = yes_no_tokens(evaluator.tokenizer)
    for part in fitting_batches(evaluator, ids, batch_size):
        logits = last_logits(evaluator, [ids[i] for i in part])[:, -1]
        log_probs = torch.log_softmax(logits, dim=-1)
        yes, no = (log_probs[:, tokens].logsumexp(dim=1) for tokens in spellings)
        p_yes, mass = torch.sigmoid(yes - no), yes.exp() + no.exp()
        for i, *values in zip(part, p_yes.tolist(), mass.tolist(), strict=True):
            readings[i] = Reading(*values)
    left = iter(readings)
    by_row = [[next(left) for _ in row] for row in conversations]
    return [None if None in row else row for row in by_row]


@dataclass(eq=False, repr=False)
class MetaEvaluationReward:
    """sum_k w_k log P_k("Yes"), or of P itself: what the evaluator thinks of each completion.

    None beyond an evaluator's context. The evaluator may be the policy: under TRL, on one process,
    `Policy(trainer.model, tokenizer)`. ValueError for a template that hides an answer's reasoning.
    """

    evaluator: Policy | Sequence[Policy]  # the probabilities of several are averaged
    questions: str | Sequence[str] = META_QUESTION
    weights: Sequence[float] | None = None  # one a question; None = equal ones that add up to 1
    transform: str = "log"  # as in the paper, bounded below by log 1e-4; or "p"
    truth_fraction: float = 0.0  # share of samples on which the column `answer` is shown
    _: KW_ONLY
    # P("Yes") from text and answer on these samples, where the evaluator cannot compare the two
    truth_reader: Callable[[str, str], float] | None = None

    __name__ = "meta_evaluation_reward"

    def __post_init__(self):
        several = isinstance(self.evaluator, (list, tuple))
        self.evaluators: list[Policy] = list(self.evaluator) if several else [self.evaluator]
        if isinstance(self.questions, str):
            self.questions = [self.questions]
        n = len(self.questions)
        if not n:
            raise ValueError("there are no questions; give one, as META_QUESTION.")
        self.weights = [1 / n] * n if self.weights is None else self.weights
        if len(self.weights) != n:
            raise ValueError(f"there are {len(self.weights)} weights for {n} questions; give {n}.")
        if self.transform not in ("log", "p") or not 0 <= self.truth_fraction <= 1:
            found = f"transform={self.transform!r}, truth_fraction={self.truth_fraction}"
            raise ValueError(f"{found}: choose 'log' or 'p', and a share from 0 to 1.")
        answer = "<think>one and one</think><answer>two</answer>"  # templates may drop reasoning
        for evaluator in self.evaluators:
            yes_no_tokens(evaluator.tokenizer)
            evaluator.check_template(as_turns("one", answer, META_QUESTION))

    def __call__(
        self, prompts: list, completions: list, completion_ids: list, *,
        log_metric: Callable | None = None, **columns,
    ) -> list[float | None]:  # fmt: skip
        """Raises ValueError if the truth is to be shown without a column `answer`."""
        texts = [completion_text(completion) for completion in completions]
        truths = [None] * len(texts)
        if self.truth_fraction:
            answers = column(columns, "answer", "truth_fraction")
            rng = random.Random(json.dumps([0, prompts, texts]))  # a resumed run shows the same
            truths = [a if rng.random() < self.truth_fraction else None for a in answers]
        readings = self._read(prompts, texts, truths)
        value = math.log if self.transform == "log" else float
        probabilities = [fmean(p_yes) for p_yes, _ in readings if p_yes]
        masses = [mass for _, mass in readings if mass is not None]
        for name, values in (("meta/p_yes", probabilities), ("meta/mass", masses)):
            if values and log_metric is not None:
                log_metric(name, fmean(values))
        return [
            p_yes
            and sum(w * value(max(p, LEAST_P)) for w, p in zip(self.weights, p_yes, strict=True))
            for p_yes, _ in readings
        ]

    def _read(self, prompts: list, texts: list[str], truths: list) -> list[tuple]:
        """P("Yes") of each question and the lowest mass, for each text; equal ones read once."""
        rows, readings, keys = {}, {}, []
        for i, (prompt, text, truth) in enumerate(zip(prompts, texts, truths, strict=True)):
            if truth is not None and self.truth_reader is not None:
                keys.append(str(i))
                p_yes = self.truth_reader(text, str(truth))
                readings[keys[-1]] = ([p_yes] * len(self.questions), None)
                continue
            questions = self.questions
            if truth is not None:
                questions = [reference_question(truth, question) for question in questions]
            row = [as_turns(prompt, text, question) for question in questions]
            keys.append(json.dumps(row))
            rows[keys[-1]] = row
        by_evaluator = [read_yes(evaluator, list(rows.values())) for evaluator in self.evaluators]
        for key, *own in zip(rows, *by_evaluator, strict=True):
            if None not in own:
                questions = zip(*own, strict=True)
                p_yes = [fmean(one.p_yes for one in question) for question in questions]
                readings[key] = (p_yes, min(one.mass for row in own for one in row))
        return [readings.get(key, (None, None)) for key in keys]
