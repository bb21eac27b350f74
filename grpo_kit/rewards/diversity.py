"""The diversity reward: the less a response is like the average of its group, the more it earns.

Source: the Trinity-RFT technical report (arXiv 2505.17826, §3.4.2). It embeds the responses to one
prompt, averages the embeddings, pays by the cosine of each response with that average (less similar
earns more) and lets the weight of this reward fall from 0.5 to 0.3 over training. No formula is
printed and no working code is public, so two things are our reconstruction: the form
`weight * (1 - similarity)`, and that the weight falls linearly.

It knows nothing of right and wrong: in a group of wrong answers the oddest one wins. The options of
`DiversityReward` are there to study that.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_kit.rewards.accuracy import correctness
from grpo_kit.rewards.embedder import load_embedder
from grpo_kit.rewards.text import completion_text

if TYPE_CHECKING:  # imported where it is used: `import grpo_kit.rewards` takes no seconds
    from torch import Tensor


class DiversityReward:
    """A reward of `weight * (1 - similarity)`: 0 for a response that is like its group's average.

    Identical texts are embedded once, all that are given together in one call of
    `embedder.encode`. What is longer than the embedder's window is truncated there; the first time,
    a warning says so.

    An empty text earns 0, the least there is, and is left out of its group's average. It is not
    None: what is not scored is spared the other rewards too, so that saying nothing would be a way
    out of a wrong answer.

    Args:
        num_generations: completions per prompt, as the trainer has it.
        embedder: what `load_embedder` takes ("minilm", a folder, a Hub name), or anything with
            `encode(list[str]) -> (n, d) array`.
        weight_start, weight_end: see `linear_weight`.
        only_correct: pay 0 to an answer that `accuracy_reward` finds wrong, and None where it says
            None. The average is still that of all responses. Needs the column `answer`.
        leave_one_out: compare with the average of the others; that of all has the response itself
            in it, so that everyone is a little like it.
        part: "response", or "reasoning": only the text inside the first `<think>…</think>`. Where
            there is none, or it is not closed, the text is empty. White space at the ends is cut.

    Raises ValueError for an argument out of range, and what `load_embedder` raises.
    """

    __name__ = "diversity_reward"  # what the instance is called in metrics

    def __init__(
        self,
        num_generations: int,
        embedder: Any = "minilm",
        weight_start: float = 0.5,
        weight_end: float = 0.3,
        *,
        only_correct: bool = False,
        leave_one_out: bool = False,
        part: str = "response",
    ):
        if not isinstance(num_generations, int) or num_generations < 2:
            raise ValueError(
                f"num_generations={num_generations!r} must be a whole number, 2 or more: a "
                "response alone is its own average"
            )
        for name, weight in (("weight_start", weight_start), ("weight_end", weight_end)):
            if not 0 <= weight < math.inf:
                raise ValueError(
                    f"{name}={weight!r} must be 0 or more: a negative one would pay for being alike"
                )
        if part not in ("response", "reasoning"):
            raise ValueError(f"part={part!r}; choose 'response' or 'reasoning'")
        if isinstance(embedder, (str, Path)):
            embedder = load_embedder(embedder)
        if not callable(getattr(embedder, "encode", None)):
            raise ValueError(
                f"embedder={embedder!r} has no method encode(list of texts): give 'minilm', a "
                "sentence-transformers model or its name"
            )
        self.num_generations = num_generations
        self.embedder = embedder
        self.weight_start, self.weight_end = weight_start, weight_end
        self.only_correct, self.leave_one_out, self.part = only_correct, leave_one_out, part
        self._warned = False

    def __call__(
        self,
        prompts: list,
        completions: list,
        completion_ids: list[list[int]],
        trainer_state: Any = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns,
    ) -> list[float | None]:
        """Return one reward a completion, from 0 to 2 * weight.

        The weight is that at `trainer_state.global_step / trainer_state.max_steps`, or
        `weight_start` without a state (any object with these two will do). A trainer's
        `log_metric`, as TRL passes it, gets `diversity/weight`, `diversity/distinct` (share of
        texts that no earlier one of the group equals) and `diversity/mean_similarity` (of texts
        that are not empty).

        Raises ValueError where completions are not complete groups of one prompt each, where
        `only_correct` finds no column `answer`, and for embeddings that cannot be used.
        """
        self._check_groups(prompts, len(completions))
        correct = [1.0] * len(completions)
        if self.only_correct:
            correct = correctness(self.__name__, completions, columns)
        texts = [self._text(completion) for completion in completions]
        similarities = group_similarities(
            self._embed(texts), self.num_generations, self.leave_one_out
        ).tolist()
        progress = 0.0
        if trainer_state is not None and trainer_state.max_steps > 0:  # TRL's is 0 before training
            progress = trainer_state.global_step / trainer_state.max_steps
        weight = linear_weight(progress, self.weight_start, self.weight_end)
        if log_metric is not None and texts:
            log_metric("diversity/weight", weight)
            distinct = {(i // self.num_generations, text) for i, text in enumerate(texts)}
            log_metric("diversity/distinct", len(distinct) / len(texts))
            if said := [s for s, text in zip(similarities, texts, strict=True) if text]:
                log_metric("diversity/mean_similarity", sum(said) / len(said))
        return [
            None if right is None else right * weight * (1 - similarity)
            for right, similarity in zip(correct, similarities, strict=True)
        ]

    def _check_groups(self, prompts: list, n: int) -> None:
        size = self.num_generations
        if n % size:
            raise ValueError(
                f"diversity_reward got {n} completions, no multiple of num_generations={size}: "
                "give it the trainer's num_generations, and every process complete groups"
            )
        for start in range(0, n, size):
            if any(prompt != prompts[start] for prompt in prompts[start : start + size]):
                raise ValueError(
                    f"the completions {start} to {start + size - 1} have different prompts and are "
                    f"no group: give diversity_reward the trainer's num_generations (it has "
                    f"{size}), and keep groups in one piece"
                )

    def _text(self, completion: str | list[dict]) -> str:
        text = completion_text(completion)
        if self.part == "reasoning":
            inside, closed, _ = text.partition("<think>")[2].partition("</think>")
            text = inside if closed else ""
        return text.strip()

    def _embed(self, texts: list[str]) -> Tensor:
        """(N, d) float64 embeddings, a row of zeros for an empty text.

        float64, as rounding would tell apart what is alike, and a group's std would blow that up.
        """
        import torch

        distinct = list(dict.fromkeys(text for text in texts if text))
        if not distinct:
            return torch.zeros(len(texts), 1, dtype=torch.float64)
        self._warn_of_truncation(distinct)
        result = self.embedder.encode(distinct)
        try:
            vectors = torch.as_tensor(result, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"the embedder returned what is no (n, d) array of numbers: {error}"
            ) from error
        if vectors.ndim != 2 or len(vectors) != len(distinct) or not vectors.shape[1]:
            raise ValueError(
                f"the embedder returned shape {tuple(vectors.shape)} for {len(distinct)} texts; it "
                f"must be ({len(distinct)}, d), one row a text"
            )
        if not vectors.isfinite().all():
            raise ValueError(
                "the embedder returned NaN or infinity: use another one, or float32 where it "
                "computes in half precision"
            )
        row_of = dict(zip(distinct, vectors, strict=True))
        empty = torch.zeros_like(vectors[0])
        return torch.stack([row_of.get(text, empty) for text in texts])

    def _warn_of_truncation(self, texts: list[str]) -> None:
        window = getattr(self.embedder, "max_seq_length", None)
        tokenizer = getattr(self.embedder, "tokenizer", None)
        if self._warned or window is None or not callable(tokenizer):  # an embedder of one's own
            return
        ids = tokenizer(texts, truncation=False, verbose=False)["input_ids"]
        if longer := sum(len(row) > window for row in ids):
            self._warned = True
            warnings.warn(
                f"{longer} of {len(texts)} texts are longer than the embedder's window of {window} "
                "tokens, and what comes after it does not count; an embedder with a longer window "
                "would see it. This is said once.",
                stacklevel=2,
            )


def group_similarities(
    embeddings: Tensor, num_generations: int, leave_one_out: bool = False
) -> Tensor:
    """Cosine of each embedding with the mean of its group, or with the mean of the others in it.

    Where one of the two is zero there is no cosine and the similarity is 1: what cannot be compared
    must not look different. A zero embedding leaves the cosines of the others as they are, since it
    only shortens their mean.

    Args:
        embeddings: (N, d) float tensor or array; the rows of a group stand together.
        num_generations: rows of a group, 2 or more; divides N.
        leave_one_out: leave each row out of the mean that it is compared with.

    Returns:
        (N,) from -1 to 1, in the precision of `embeddings`.

    Raises:
        ValueError: embeddings of another shape or not float, or rows that make no groups.
    """
    import torch

    embeddings = torch.as_tensor(embeddings)
    if embeddings.ndim != 2 or not embeddings.is_floating_point():
        raise ValueError(
            f"embeddings are {embeddings.dtype} of shape {tuple(embeddings.shape)}; give (N, d) "
            "floats, a row a response"
        )
    n, d = embeddings.shape
    if num_generations < 2 or n % num_generations:
        raise ValueError(
            f"{n} embeddings cannot be split into groups of num_generations={num_generations}; it "
            "must be 2 or more and divide their number"
        )
    groups = embeddings.reshape(n // num_generations, num_generations, d)
    means = groups.mean(1, keepdim=True)
    if leave_one_out:
        means = (groups.sum(1, keepdim=True) - groups) / (num_generations - 1)
    lengths = groups.norm(dim=-1) * means.norm(dim=-1)
    cosines = (groups * means).sum(-1) / lengths
    return torch.where(lengths > 0, cosines, 1.0).clamp(-1, 1).flatten()


def linear_weight(progress: float, weight_start: float = 0.5, weight_end: float = 0.3) -> float:
    """The weight at `progress` through training: a straight line from 0 (start) to 1 (end)."""
    return weight_start + (weight_end - weight_start) * min(max(progress, 0.0), 1.0)
