"""The meta-evaluation reward: ask a model whether the answer is right, take P("Yes") as the reward.

Source: RLME (arXiv 2601.21268), from summaries of the paper. After prompt and completion each
meta-question is asked, and the probability of "Yes" is read at the next token. No label is used.
The paper's cure for a policy that learns to please its evaluator: show the evaluator the truth
on a small share of the samples.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_kit.rewards.judge.texts import fenced
from grpo_kit.rewards.rules import completion_text

if TYPE_CHECKING:
    from grpo_kit.models import Policy

META_QUESTION = "Is the answer correct?"
STEPS_QUESTION = "Are all steps right?"
LEAST_P = 1e-4  # log P is bounded, or one sure "No" would outweigh the rest of its group
LEAST_MASS = 0.5  # of the next token on Yes and No together, below which a warning is due

logger = logging.getLogger(__name__)


def reference_question(answer: str, question: str = META_QUESTION) -> str:
    """A meta-question with the truth shown, for an evaluator that is given the reference."""
    return f"The reference answer is {answer}. {question}"


def yes_no_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids of the tokens that say Yes and of those that say No.

    They are the spellings (`Yes`, `yes`, `YES`, each also after a space) that are one token; where
    there is none, the first token of the word. Raises ValueError if the two words share a token.
    """

    def encoded(text: str) -> list[int]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return [token for token in ids if token != tokenizer.unk_token_id]

    def tokens(word: str) -> list[int]:
        forms = (word, word.lower(), word.upper())
        spellings = [encoded(space + form) for space in ("", " ") for form in forms]
        single = {ids[0] for ids in spellings if len(ids) == 1}
        return sorted(single) or encoded(word)[:1]

    yes, no = tokens("Yes"), tokens("No")
    if not yes or not no or set(yes) & set(no):
        raise ValueError(
            "Yes and No begin with the same token in this tokenizer, or it cannot write them: take "
            "an evaluator with another tokenizer."
        )
    return yes, no


def as_turns(prompt: str | list[dict], completion: str, question: str) -> list[dict]:
    """The meta-question as the user's next turn after the completion.

    The completion is fenced, lest a policy end its turn and say Yes as somebody else.
    """
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answer = {"role": "assistant", "content": fenced(completion)}
    return [*turns, answer, {"role": "user", "content": question}]


def as_one_message(prompt: str | list[dict], completion: str, question: str) -> list[dict]:
    """The same in one message of the user, for chat templates that do not show earlier turns."""
    text = prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)
    return [{"role": "user", "content": f"{text}\n\n{fenced(completion)}\n\n{question}"}]


class Reading(NamedTuple):
    """P("Yes") of Yes or No, and the share of the next token on the two together."""

    p_yes: float
    mass: float


def read_yes(
    evaluator: Policy, conversations: Sequence[Sequence[list[dict]]], *, batch_size: int = 64
) -> list[list[Reading] | None]:
    """What the evaluator would say next to each of K conversations of N rows, without gradient.

    The beginning that a row's conversations share is run once. A row that is longer than the
    evaluator's context gives None. `batch_size` is in rows. Raises ValueError as `yes_no_tokens`.
    """
    import torch

    if not conversations:
        return []
    n_questions = len(conversations[0])
    encoded = _encode(evaluator, [one for row in conversations for one in row])
    rows = [encoded[i : i + n_questions] for i in range(0, len(encoded), n_questions)]
    readings: list[list[Reading] | None] = [None] * len(rows)
    fitting = [i for i, row in enumerate(rows) if max(map(len, row)) <= evaluator.context_length]
    fitting.sort(key=lambda i: len(rows[i][0]))  # rows of similar length need little padding
    words = yes_no_tokens(evaluator.tokenizer)
    was_training = evaluator.model.training
    evaluator.model.eval()  # a live policy under TRL is in training mode
    try:
        for start in range(0, len(fitting), batch_size):
            part = fitting[start : start + batch_size]
            with torch.no_grad(), evaluator.autocast():
                batch = _read_batch(evaluator, [rows[i] for i in part], words)
            for i, reading in zip(part, batch, strict=True):
                readings[i] = reading
    finally:
        evaluator.model.train(was_training)
    return readings


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
        past = cache and gathered(cache, torch.arange(len(rows), device=device))
        logits = evaluator.model(
            input_ids=ids, attention_mask=attention,
            position_ids=positions(attention)[:, -ids.shape[1] :],
            past_key_values=past, use_cache=past is not None, logits_to_keep=1,
        ).logits[:, -1]  # fmt: skip
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        yes, no = (log_probs[:, index].logsumexp(dim=1) for index in (yes_ids, no_ids))
        p_yes, mass = torch.sigmoid(yes - no), yes.exp() + no.exp()
        for row, *values in zip(readings, p_yes.tolist(), mass.tolist(), strict=True):
            row.append(Reading(*values))
    return readings


def _encode(evaluator: Policy, conversations: list[list[dict]]) -> list[list[int]]:
    try:
        return evaluator.encode(conversations)
    except Exception as error:  # whatever a chat template raises
        raise ValueError(
            f"the evaluator's chat template takes no question after an answer ({error}): give "
            "conversation=as_one_message."
        ) from error


def _common_prefix(row: Sequence[list[int]]) -> int:
    """How many tokens all of `row` begin with, at least one of each left for its own pass."""
    limit = min(map(len, row)) - 1
    return next((i for i in range(limit) if len({ids[i] for ids in row}) > 1), limit)


@dataclass(eq=False, repr=False)
class MetaEvaluationReward:
    """sum_k w_k log P_k("Yes"), or of P itself: what the evaluator thinks of each completion.

    P is normalised over the spellings of Yes and No. None where a conversation is longer than an
    evaluator's context. The policy itself as evaluator makes the reward move with its training;
    under TRL it is `Policy(trainer.model, tokenizer)`, on one process, as a rank cannot run sharded
    weights. `log_metric` gets `meta/p_yes`, `meta/mass` (of the next token on Yes and No) and
    `meta/shown`. Raises ValueError for arguments out of range, a chat template that leaves out a
    part of the answer, and as `yes_no_tokens`.
    """

    evaluator: Policy | Sequence[Policy]  # the probabilities of several are averaged
    questions: str | Sequence[str] = META_QUESTION
    weights: Sequence[float] | None = None  # one a question; None = equal ones that add up to 1
    transform: str = "log"  # as in the paper, bounded below by log 1e-4; or "p"
    truth_fraction: float = 0.0  # share of samples on which the column `answer` is shown
    _: KW_ONLY
    # P("Yes") from text and answer on these samples, where the evaluator cannot compare the two
    truth_reader: Callable[[str, str], float] | None = None
    conversation: Callable[[Any, str, str], list[dict]] = as_turns  # or `as_one_message`
    seed: int = 0  # with the texts, it decides which samples are shown the truth
    batch_size: int = 64  # completions at a time

    __name__ = "meta_evaluation_reward"

    def __post_init__(self):
        several = isinstance(self.evaluator, (list, tuple))
        self.evaluators: list[Policy] = list(self.evaluator) if several else [self.evaluator]
        one = isinstance(self.questions, str)
        self.questions = [self.questions] if one else list(self.questions)
        n = len(self.questions)
        if not self.evaluators or not n:
            raise ValueError("give at least one evaluator and one question.")
        self.weights = [1 / n] * n if self.weights is None else list(self.weights)
        if len(self.weights) != n:
            raise ValueError(f"there are {len(self.weights)} weights for {n} questions; give {n}.")
        if self.transform not in ("log", "p"):
            raise ValueError(f"transform is {self.transform!r}; choose 'log' or 'p'.")
        if not 0 <= self.truth_fraction <= 1:
            raise ValueError(f"truth_fraction is {self.truth_fraction}; give a share, from 0 to 1.")
        self._warned = False
        for evaluator in self.evaluators:
            yes_no_tokens(evaluator.tokenizer)
            self._check_template(evaluator)

    def __call__(
        self, prompts: list, completions: list, completion_ids: list, *,
        log_metric: Callable | None = None, **columns,
    ) -> list[float | None]:  # fmt: skip
        """Return a reward for each of the N completions, strings or lists of messages.

        Raises ValueError if the truth is to be shown and the data has no column `answer`.
        """
        texts = [completion_text(completion) for completion in completions]
        truths = self._truths(prompts, texts, columns)
        rewards: list[float | None] = []
        probabilities, masses = [], []
        value = math.log if self.transform == "log" else float
        for reading in self._read(prompts, texts, truths):
            if reading is None:
                rewards.append(None)
                continue
            p_yes, mass = reading
            rewards.append(
                sum(w * value(max(p, LEAST_P)) for w, p in zip(self.weights, p_yes, strict=True))
            )
            probabilities.append(fmean(p_yes))
            if mass is not None:
                masses.append(mass)
        self._warn_of_low(masses)
        if log_metric is not None:
            for name, values in (("meta/p_yes", probabilities), ("meta/mass", masses)):
                if values:
                    log_metric(name, fmean(values))
            if self.truth_fraction:
                log_metric("meta/shown", fmean(truth is not None for truth in truths))
        return rewards

    def _read(
        self, prompts: list, texts: list[str], truths: list
    ) -> list[tuple[list[float], float | None] | None]:
        """P("Yes") of each question and the lowest mass, for each text; None where it is too long.

        Equal texts of a group are read once. A text that the rule reads has no mass.
        """
        ruled = [truth is not None and self.truth_reader is not None for truth in truths]
        rows, keys = {}, []
        for prompt, text, truth, by_rule in zip(prompts, texts, truths, ruled, strict=True):
            shown = [q if truth is None else reference_question(truth, q) for q in self.questions]
            row = [self.conversation(prompt, text, question) for question in shown]
            keys.append(json.dumps(row))
            if not by_rule:
                rows[keys[-1]] = row
        by_evaluator = [
            read_yes(one, list(rows.values()), batch_size=self.batch_size)
            for one in self.evaluators
        ]
        readings = {key: _mean_reading(own) for key, *own in zip(rows, *by_evaluator, strict=True)}
        return [
            ([self.truth_reader(text, str(truth))] * len(self.questions), None)
            if by_rule
            else readings[key]
            for key, text, truth, by_rule in zip(keys, texts, truths, ruled, strict=True)
        ]

    def _truths(self, prompts: list, texts: list[str], columns: dict) -> list:
        """The reference answer where the evaluator is to see it, else None."""
        if not self.truth_fraction:
            return [None] * len(texts)
        if "answer" not in columns:
            raise ValueError("there is no column `answer` to show: add it, or truth_fraction=0.")
        rng = random.Random(json.dumps([self.seed, prompts, texts]))
        return [
            answer if rng.random() < self.truth_fraction else None for answer in columns["answer"]
        ]

    def _check_template(self, evaluator: Policy) -> None:
        """Raise where the evaluator does not see all of an answer: templates may drop reasoning."""
        answer = "<think>one and one</think><answer>two</answer>"
        messages = self.conversation([{"role": "user", "content": "one"}], answer, "two")
        text = evaluator.tokenizer.decode(_encode(evaluator, [messages])[0])
        if "one and one" not in " ".join(text.split()):
            raise ValueError(
                "the evaluator's chat template leaves out a part of the answer (thinking models "
                "drop earlier reasoning): give conversation=as_one_message."
            )

    def _warn_of_low(self, masses: list[float]) -> None:
        if masses and fmean(masses) < LEAST_MASS and not self._warned:
            self._warned = True
            logger.warning(
                "the evaluator does not answer the question: %.0f %% of its next token is Yes or "
                "No; word the question otherwise, or take another evaluator.",
                100 * fmean(masses),
            )


def _mean_reading(by_evaluator: Sequence[list[Reading] | None]) -> tuple[list[float], float] | None:
    """The evaluators' mean P("Yes") of each question, and the lowest mass; None for a long row."""
    if any(readings is None for readings in by_evaluator):
        return None
    p_yes = [fmean(one.p_yes for one in question) for question in zip(*by_evaluator, strict=True)]
    return p_yes, min(one.mass for readings in by_evaluator for one in readings)
