"""The diversity reward: the less a response is like the average of its group, the more it earns.

Source: the Trinity-RFT report (arXiv 2505.17826, §3.4.2), which prints no formula and no code. Two
things are our reconstruction: the form `weight * (1 - similarity)`, and that the weight falls
linearly. The reward ignores correctness: in a group of wrong answers the oddest one wins.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_kit.rewards.embedder import load_embedder
from grpo_kit.rewards.rules import completion_text, correctness

if TYPE_CHECKING:  # imported where it is used: `import grpo_kit.rewards` takes no seconds
    from torch import Tensor


@dataclass(eq=False, repr=False)
class DiversityReward:
    """`weight * (1 - similarity)`: 0 for a response that is like its group's average.

    An empty text earns 0, the least, and is left out of the average. None would spare it the other
    rewards, so that silence would be a way out of a wrong answer. Raises ValueError for an argument
    out of range, and what `load_embedder` raises.
    """

    num_generations: int  # completions per prompt, as in the trainer
    embedder: Any = "minilm"  # for `load_embedder`, or has `encode(texts) -> (n, d) array`
    weight_start: float = 0.5
    weight_end: float = 0.3
    _: KW_ONLY
    only_correct: bool = False  # a wrong answer earns 0; needs the column `answer`
    leave_one_out: bool = False  # compare with the average of the others
    part: str = "response"  # or "reasoning": the text inside the first closed <think>…</think>

    __name__ = "diversity_reward"

    def __post_init__(self):
        if not isinstance(self.num_generations, int) or self.num_generations < 2:
            raise ValueError(f"num_generations={self.num_generations!r} must be 2 or more, an int")
        for name in ("weight_start", "weight_end"):
            if not 0 <= (weight := getattr(self, name)) < math.inf:
                raise ValueError(f"{name}={weight!r} must be 0 or more, or it would pay likeness")
        if self.part not in ("response", "reasoning"):
            raise ValueError(f"part={self.part!r}; choose 'response' or 'reasoning'")
        if isinstance(self.embedder, (str, Path)):
            self.embedder = load_embedder(self.embedder)
        if not callable(getattr(self.embedder, "encode", None)):
            raise ValueError(f"embedder={self.embedder!r} has no method encode: give 'minilm'")
        self._warned = False

    def __call__(
        self, prompts: list, completions: list, completion_ids: list, trainer_state: Any = None,
        log_metric: Callable | None = None, **columns,
    ) -> list[float | None]:  # fmt: skip
        """Return a reward for each completion, from 0 to 2 * weight.

        The weight is that at `trainer_state.global_step / max_steps`, without a state that at 0.
        TRL's `log_metric` gets `diversity/weight`, `diversity/distinct` (share of texts that are
        new in their group) and `diversity/mean_similarity` (of texts that are not empty).

        Raises ValueError for completions that are not complete groups of one prompt each, for
        `only_correct` without the column `answer`, and for unusable embeddings.
        """
        size = self.num_generations
        for start in range(0, len(completions), size):
            if any(prompt != prompts[start] for prompt in prompts[start : start + size]):
                raise ValueError(
                    f"the completions {start} to {start + size - 1} have different prompts: give "
                    f"the trainer's num_generations, not {size}, and complete groups"
                )
        correct = [1.0] * len(completions)
        if self.only_correct:
            correct = correctness(self.__name__, completions, columns)
        texts = [self._text(completion) for completion in completions]
        embeddings = self._embed(texts)
        similarities = group_similarities(embeddings, size, self.leave_one_out).tolist()
        progress = 0.0
        if trainer_state is not None and trainer_state.max_steps > 0:  # TRL's is 0 before training
            progress = trainer_state.global_step / trainer_state.max_steps
        weight = linear_weight(progress, self.weight_start, self.weight_end)
        if log_metric is not None and texts:
            log_metric("diversity/weight", weight)
            distinct = {(i // size, text) for i, text in enumerate(texts)}
            log_metric("diversity/distinct", len(distinct) / len(texts))
            if filled := [s for s, text in zip(similarities, texts, strict=True) if text]:
                log_metric("diversity/mean_similarity", sum(filled) / len(filled))
        return [
            None if right is None else right * weight * (1 - similarity)
            for right, similarity in zip(correct, similarities, strict=True)
        ]

    def _text(self, completion: str | list[dict]) -> str:
        text = completion_text(completion)
        if self.part == "reasoning":
            inside, closed, _ = text.partition("<think>")[2].partition("</think>")
            text = inside if closed else ""
        return text.strip()

    def _embed(self, texts: list[str]) -> Tensor:
        """(N, d) float64 embeddings, a row of zeros for an empty text; equal texts embedded once.

        float64: rounding would tell apart what is alike, and a group's std would magnify that.
        """
        import torch

        distinct = list(dict.fromkeys(text for text in texts if text))
        if not distinct:
            return torch.zeros(len(texts), 1, dtype=torch.float64)
        self._warn_of_truncation(distinct)
        embeddings = self.embedder.encode(distinct)
        try:
            vectors = torch.as_tensor(embeddings, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"the embedder returned no array of numbers: {error}") from error
        if vectors.ndim != 2 or len(vectors) != len(distinct) or not vectors.shape[1]:
            shape, n = tuple(vectors.shape), len(distinct)
            raise ValueError(f"the embedder returned shape {shape} for {n} texts, not ({n}, d)")
        if not vectors.isfinite().all():
            raise ValueError("the embedder returned NaN or infinity: use another, or float32")
        row_of = dict(zip(distinct, vectors, strict=True))
        empty = torch.zeros_like(vectors[0])
        return torch.stack([row_of.get(text, empty) for text in texts])

    def _warn_of_truncation(self, texts: list[str]) -> None:
        window = getattr(self.embedder, "max_seq_length", None)
        tokenizer = getattr(self.embedder, "tokenizer", None)
        if self._warned or window is None or not callable(tokenizer):
            return
        ids = tokenizer(texts, truncation=False, verbose=False)["input_ids"]
        if longer := sum(len(row) > window for row in ids):
            self._warned = True
            warnings.warn(
                f"{longer} of {len(texts)} texts are longer than the embedder's window of {window} "
                "tokens; the rest does not count (no further warning): use a longer window.",
                stacklevel=2,
            )


def group_similarities(
    embeddings: Tensor, num_generations: int, leave_one_out: bool = False
) -> Tensor:
    """Cosine (N,) of each row of `embeddings` (N, d) with the mean of its group.

    `num_generations` rows make a group. With `leave_one_out` the mean is that of the other rows. If
    a row or its mean is zero, the similarity is 1: what cannot be compared must not look different.
    Raises ValueError for embeddings of another shape or type, or rows that make no groups.
    """
    import torch

    embeddings = torch.as_tensor(embeddings)
    if embeddings.ndim != 2 or not embeddings.is_floating_point():
        shape = tuple(embeddings.shape)
        raise ValueError(f"embeddings are {embeddings.dtype} of shape {shape}; give (N, d) floats")
    n, d = embeddings.shape
    if num_generations < 2 or n % num_generations:
        raise ValueError(
            f"{n} embeddings make no groups of num_generations={num_generations}; give the "
            "trainer's num_generations, 2 or more, and complete groups"
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
