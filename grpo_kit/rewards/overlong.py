"""The soft overlong penalty of DAPO (arXiv 2503.14476, eq. 13).

Cutting a completion off and calling it wrong punishes sound reasoning for its length. The penalty
instead grows over the last `cache_length` tokens, so that the policy feels the limit coming.
"""

from __future__ import annotations


class OverlongPenalty:
    """A reward of 0 down to -1 by a completion's length in tokens.

    With L = len(completion_ids[i]), Lmax = `max_completion_length`, Lcache = `cache_length`:
    0 for L <= Lmax - Lcache; ((Lmax - Lcache) - L) / Lcache up to Lmax; -1 beyond.

    Raises ValueError unless both are whole numbers of tokens with 1 <= Lcache <= Lmax.
    """

    __name__ = "overlong_penalty"  # what the instance is called in metrics

    def __init__(self, max_completion_length: int, cache_length: int):
        for name, value in (
            ("max_completion_length", max_completion_length),
            ("cache_length", cache_length),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of tokens, 1 or more")
        if cache_length > max_completion_length:
            raise ValueError(
                f"cache_length={cache_length} must not exceed "
                f"max_completion_length={max_completion_length}: choose a shorter cache_length"
            )
        self.max_completion_length = max_completion_length
        self.cache_length = cache_length

    def __call__(
        self, prompts: list, completions: list, completion_ids: list[list[int]], **columns
    ) -> list[float]:
        """Return one penalty a completion; `completion_ids` rows carry no padding."""
        return [self._penalty(len(ids)) for ids in completion_ids]

    def _penalty(self, length: int) -> float:
        excess = length - (self.max_completion_length - self.cache_length)
        return -min(max(excess / self.cache_length, 0.0), 1.0) or 0.0  # `or`: no -0.0
