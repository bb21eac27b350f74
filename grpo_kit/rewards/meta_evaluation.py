"""The meta-evaluation reward: ask a model whether the answer is right, take P("Yes") as the reward.

Source: RLME, "Reinforcement Learning from Meta-Evaluation" (arXiv 2601.21268), from summaries of
the paper. No label is used and no verdict is sampled: after prompt and completion each
meta-question is asked, and the probability of "Yes" is read at the next token. The policy itself, a
frozen copy, another model or several can be the evaluator. The paper's own cure of what a policy
then learns to do to it: show the evaluator the truth on a small share of the samples.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_kit.rewards.judge.texts import fenced
from grpo_kit.rewards.text import completion_text

if TYPE_CHECKING:
    from grpo_kit.models import Policy

META_QUESTION = "Is the answer correct?"
STEPS_QUESTION = "Are all steps right?"

logger = logging.getLogger(__name__)

SPELLINGS = {
    label: [space + form for space in ("", " ") for form in (label, label.lower(), label.upper())]
    for label in ("Yes", "No")
}
LEAST_P = 1e-4  # log P is bounded, or one sure "No" would outweigh the rest of its group
LEAST_MASS = 0.5  # of the next token on Yes and No together, below which a warning is due


def reference_question(answer: str, question: str = META_QUESTION) -> str:
    """A meta-question with the truth shown, for an evaluator that is given the reference."""
    return f"The reference answer is {answer}. {question}"


def yes_no_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids of the tokens that say Yes and of those that say No.

    They are the spellings (`Yes`, `yes`, `YES`, each also after a space) that are one token in this
    tokenizer; where it has none for a word, the first token of `Yes` or `No` as written.

    Raises ValueError where the two words begin with the same token.
    """

    def encoded(text: str) -> list[int]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return [token for token in ids if token != tokenizer.unk_token_id]

    found = {}
    for label, spellings in SPELLINGS.items():
        single = {ids[0] for ids in map(encoded, spellings) if len(ids) == 1}
        found[label] = sorted(single) or encoded(label)[:1]
    yes, no = found["Yes"], found["No"]
    if not yes or not no or set(yes) & set(no):
        raise ValueError(
            "Yes and No begin with the same token in this tokenizer, or it cannot write them, so "
            "that the next token does not tell them apart: take an evaluator with another "
            "tokenizer, or ask for A and B and read those."
        )
    return yes, no


def as_turns(prompt: str | list[dict], completion: str, question: str) -> list[dict]:
    """The meta-question as the user's next turn after the completion.

    Role marks in the completion are broken, here and in `as_one_message`: a policy that is paid for
    a Yes must not be able to end its turn and go on as somebody else.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return [
        *prompt,
        {"role": "assistant", "content": fenced(completion)},
        {"role": "user", "content": question},
    ]


def as_one_message(prompt: str | list[dict], completion: str, question: str) -> list[dict]:
    """The same in one message of the user, for chat templates that do not show earlier turns."""
    asked = prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)
    return [{"role": "user", "content": f"{asked}\n\n{fenced(completion)}\n\n{question}"}]


class Reading(NamedTuple):
    """What an evaluator says to one question: P("Yes") of Yes or No, and the two's share of all."""

    p_yes: float
    mass: float


def read_yes(
    evaluator: Policy,
    conversations: Sequence[Sequence[list[dict]]],
    *,
    batch_size: int = 64,
) -> list[list[Reading] | None]:
    """What the evaluator would say next to each of K conversations of N rows, no text sampled.

    The conversations of a row differ in their last question. What they have in common is run once
    and its cache used for all of them.

    Args:
        evaluator: model and tokenizer; run without gradient.
        conversations: N rows of K conversations, each a list of messages.
        batch_size: rows at a time.

    Returns one `Reading` a conversation, or None for a row that is longer than the evaluator's
    context. Raises ValueError as `yes_no_tokens`.
    """
    import torch

    if not conversations:
        return []
    n_questions = len(conversations[0])
    encoded = _encode(evaluator, [one for row in conversations for one in row])
    rows = [encoded[i : i + n_questions] for i in range(0, len(encoded), n_questions)]
    result: list[list[Reading] | None] = [None] * len(rows)
    fitting = [i for i, row in enumerate(rows) if max(map(len, row)) <= evaluator.context_length]
    fitting.sort(key=lambda i: len(rows[i][0]))  # rows of similar length need little padding
    words = yes_no_tokens(evaluator.tokenizer)
    was_training = evaluator.model.training
    evaluator.model.eval()  # a live policy under TRL is in training mode
    try:
        for start in range(0, len(fitting), batch_size):
            part = fitting[start : start + batch_size]
            with torch.no_grad(), evaluator.autocast():
                readings = _read_batch(evaluator, [rows[i] for i in part], words)
            for i, reading in zip(part, readings, strict=True):
                result[i] = reading
    finally:
        evaluator.model.train(was_training)
    return result


def _read_batch(
    evaluator: Policy, rows: Sequence[list[list[int]]], words: tuple[list[int], list[int]]
) -> list[list[Reading]]:
    """`read_yes` of some rows, each K lists of token ids, all at once."""
    import torch

    from grpo_kit.generation import gathered, left_pad, positions

    device, pad = evaluator.device, evaluator.pad_token_id
    yes_ids, no_ids = (torch.tensor(ids, device=device) for ids in words)
    shared = [_common_prefix(row) for row in rows] if len(rows[0]) > 1 else [0] * len(rows)
    prefix = cache = None
    if any(shared):
        starts = [row[0][:n] for row, n in zip(rows, shared, strict=True)]
        ids, prefix = left_pad(starts, pad, device)
        cache = evaluator.model(
            input_ids=ids, attention_mask=prefix, position_ids=positions(prefix),
            use_cache=True, logits_to_keep=1,
        ).past_key_values  # fmt: skip
    readings: list[list[Reading]] = [[] for _ in rows]
    for k in range(len(rows[0])):
        # the last token of each row stands last: the padding is between prefix and question
        ids, own = left_pad([row[k][n:] for row, n in zip(rows, shared, strict=True)], pad, device)
        attention = own if prefix is None else torch.cat([prefix, own], dim=1)
        seen = cache and gathered(cache, torch.arange(len(rows), device=device))
        logits = evaluator.model(
            input_ids=ids, attention_mask=attention,
            position_ids=positions(attention)[:, -ids.shape[1] :],
            past_key_values=seen, use_cache=seen is not None, logits_to_keep=1,
        ).logits[:, -1]  # fmt: skip
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        yes, no = (log_probs[:, index].logsumexp(dim=1) for index in (yes_ids, no_ids))
        p_yes, mass = torch.sigmoid(yes - no), yes.exp() + no.exp()
        for reading, *said in zip(readings, p_yes.tolist(), mass.tolist(), strict=True):
            reading.append(Reading(*said))
    return readings


def _encode(evaluator: Policy, conversations: list[list[dict]]) -> list[list[int]]:
    try:
        return evaluator.encode(conversations)
    except Exception as error:  # whatever a chat template raises
        raise ValueError(
            f"the evaluator's chat template does not take a question after an answer ({error}): "
            "give conversation=as_one_message, which asks in one message."
        ) from error


def _common_prefix(row: Sequence[list[int]]) -> int:
    """How many tokens all of `row` begin with, at least one of each left for its own pass."""
    limit = min(map(len, row)) - 1
    for place in range(limit):
        if len({ids[place] for ids in row}) > 1:
            return place
    return limit


class MetaEvaluationReward:
    """sum_k w_k log P_k("Yes"), or of P itself: what the evaluator thinks of each completion.

    P is normalised over the spellings of Yes and No (`yes_no_tokens`). None where a conversation is
    longer than an evaluator's context. With the policy itself as the evaluator the reward moves
    with its training; a frozen copy is `models.frozen_copy(policy)`. Under TRL give
    `Policy(trainer.model, tokenizer)` for the former, which works on one process only, as sharded
    weights cannot be run by one rank.

    Args:
        evaluator: a `Policy`, or several, whose probabilities are averaged.
        questions: the meta-questions, each answered by Yes or No.
        weights: one a question; None = equal ones that add up to 1.
        transform: "log", as the paper, bounded below by log 1e-4, or "p".
        truth_fraction: share of the samples on which the evaluator is shown the column `answer`
            (`truth_question(answer, question)` is asked). Which ones depends on seed and texts
            alone: the same on a second run.
        truth_question: words the question that shows the truth.
        truth_reader: what gives P("Yes") on the samples that are shown the truth, called with the
            completion's text and the answer. None asks the evaluator; where that cannot compare
            two answers (the tiny world's goes by the style), a rule does what a larger one would.
        conversation: `as_turns`, or `as_one_message`.
        seed: of the choice of the samples that are shown the truth.
        batch_size: completions at a time.

    TRL's `log_metric` gets `meta/p_yes` and `meta/mass` (share of the next token on Yes and No
    together; a low one says that the evaluator does not answer the question) and, with a
    truth_fraction, `meta/shown`.

    Raises ValueError for no evaluator or question, weights of another number, an unknown transform,
    a truth_fraction outside 0..1, an evaluator whose chat template leaves out a part of the answer,
    and as `yes_no_tokens`.
    """

    __name__ = "meta_evaluation_reward"

    def __init__(
        self,
        evaluator: Policy | Sequence[Policy],
        questions: str | Sequence[str] = META_QUESTION,
        weights: Sequence[float] | None = None,
        transform: str = "log",
        truth_fraction: float = 0.0,
        *,
        truth_question: Callable[[str, str], str] = reference_question,
        truth_reader: Callable[[str, str], float] | None = None,
        conversation: Callable[[Any, str, str], list[dict]] = as_turns,
        seed: int = 0,
        batch_size: int = 64,
    ):
        several = isinstance(evaluator, (list, tuple))
        self.evaluators: list[Policy] = list(evaluator) if several else [evaluator]
        self.questions = [questions] if isinstance(questions, str) else list(questions)
        if not self.evaluators or not self.questions:
            raise ValueError("give at least one evaluator and one question.")
        if weights is None:
            weights = [1 / len(self.questions)] * len(self.questions)
        if len(weights) != len(self.questions):
            raise ValueError(
                f"there are {len(weights)} weights for {len(self.questions)} questions; give one a "
                "question."
            )
        if transform not in ("log", "p"):
            raise ValueError(f"transform is {transform!r}; choose 'log' or 'p'.")
        if not 0 <= truth_fraction <= 1:
            raise ValueError(f"truth_fraction is {truth_fraction}; it is a share, from 0 to 1.")
        for one in self.evaluators:
            yes_no_tokens(one.tokenizer)
        self.weights = list(weights)
        self.transform = transform
        self.truth_fraction = truth_fraction
        self.truth_question = truth_question
        self.truth_reader = truth_reader
        self.conversation = conversation
        self.seed = seed
        self.batch_size = batch_size
        self._warned = False
        self._check_templates()

    def __call__(
        self,
        prompts: list,
        completions: list,
        completion_ids: list[list[int]],
        *,
        log_metric: Callable[[str, float], None] | None = None,
        **columns,
    ) -> list[float | None]:
        """Return a reward for each of the N completions, strings or lists of messages.

        Raises ValueError where the truth is to be shown and the data has no column `answer`.
        """
        texts = [completion_text(completion) for completion in completions]
        truths = self._truths(prompts, texts, columns)
        rows = [
            [
                self.conversation(
                    prompt, text, q if truth is None else self.truth_question(str(truth), q)
                )
                for q in self.questions
            ]
            for prompt, text, truth in zip(prompts, texts, truths, strict=True)
        ]
        # equal completions of a group are read once, and what a rule reads not at all
        ruled = [truth is not None and self.truth_reader is not None for truth in truths]
        keys = [
            None if by_rule else json.dumps(row) for row, by_rule in zip(rows, ruled, strict=True)
        ]
        different = {key: row for key, row in zip(keys, rows, strict=True) if key is not None}
        readings = [
            dict(zip(different, read_yes(one, list(different.values()),
                                         batch_size=self.batch_size), strict=True))
            for one in self.evaluators
        ]  # fmt: skip
        rewards: list[float | None] = []
        probabilities, masses = [], []
        for key, text, truth in zip(keys, texts, truths, strict=True):
            own = [] if key is None else [reading[key] for reading in readings]
            if any(reading is None for reading in own):
                rewards.append(None)
                continue
            if key is None:
                p_yes = [self.truth_reader(text, str(truth))] * len(self.questions)
            else:
                p_yes = [fmean(said.p_yes for said in asked) for asked in zip(*own, strict=True)]
                masses.append(min(said.mass for reading in own for said in reading))
            value = math.log if self.transform == "log" else float
            rewards.append(
                sum(w * value(max(p, LEAST_P)) for w, p in zip(self.weights, p_yes, strict=True))
            )
            probabilities.append(fmean(p_yes))
        if masses:
            self._warn_of_low(fmean(masses))
        if log_metric is not None:
            for name, values in (("meta/p_yes", probabilities), ("meta/mass", masses)):
                if values:
                    log_metric(name, fmean(values))
        if log_metric is not None and self.truth_fraction:
            log_metric("meta/shown", fmean(truth is not None for truth in truths))
        return rewards

    def _truths(self, prompts: list, texts: list[str], columns: dict) -> list:
        """The reference answer where the evaluator is to see it, else None."""
        if not self.truth_fraction:
            return [None] * len(texts)
        if "answer" not in columns:
            raise ValueError(
                "meta_evaluation_reward is to show the truth, but the data has no column `answer`: "
                "add one, or set truth_fraction=0."
            )
        rng = random.Random(json.dumps([self.seed, prompts, texts]))
        return [
            answer if rng.random() < self.truth_fraction else None for answer in columns["answer"]
        ]

    def _check_templates(self) -> None:
        """Do the evaluators see all of an answer? Templates may drop the reasoning of a turn."""
        answer = "<think>one and one</think><answer>two</answer>"
        for one in self.evaluators:
            asked = self.conversation([{"role": "user", "content": "one"}], answer, "two")
            read = one.tokenizer.decode(_encode(one, [asked])[0])
            if "one and one" not in " ".join(read.split()):
                raise ValueError(
                    "the evaluator's chat template leaves out a part of the answer (those of "
                    "thinking models drop earlier reasoning), so that it would judge what it has "
                    "not seen: give conversation=as_one_message."
                )

    def _warn_of_low(self, mass: float) -> None:
        if mass < LEAST_MASS and not self._warned:
            self._warned = True
            logger.warning(
                "the evaluator puts only %.0f %% of its next token on Yes or No: it does not "
                "answer the question, and P(Yes) says little; word the question otherwise, or take "
                "another evaluator.",
                100 * mass,
            )
