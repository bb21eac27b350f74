"""Look at one group of rollouts: an HTML view, each token coloured by its advantage.

Self-contained HTML without scripts, so that it shows in JupyterLab, Colab, a rendered page and a
file. Whatever a policy writes is escaped: it is text, never markup.
"""

from __future__ import annotations

import html
from collections.abc import Sequence


def group_html(
    prompt: str,
    tokens: Sequence[Sequence[str]],
    rewards: Sequence[float | None],
    advantages: Sequence[float],
    weights: Sequence[Sequence[float]] | None = None,
) -> str:
    """A prompt and its G completions, best first.

    Args:
        prompt: text of the question.
        tokens: G lists of decoded tokens.
        rewards: G rewards; None = not scored.
        advantages: G advantages; green above 0, red below, deeper where larger.
        weights: optional G lists of one factor in 0..1 a token (how much of the advantage it gets,
            after clipping, say); all 1 by default.

    Raises ValueError if the lists do not have the same lengths.
    """
    n = len(tokens)
    if not len(rewards) == len(advantages) == n:
        raise ValueError(
            f"{n} completions, {len(rewards)} rewards and {len(advantages)} advantages: "
            "give one each."
        )
    if weights is None:
        weights = [[1.0] * len(row) for row in tokens]
    if [len(row) for row in weights] != [len(row) for row in tokens]:
        raise ValueError("weights and tokens differ in length; give one weight a token.")
    largest = max((abs(a) for a in advantages), default=0.0) or 1.0
    rows = []
    for i in sorted(range(n), key=lambda i: -advantages[i]):
        reward = "not scored" if rewards[i] is None else f"{rewards[i]:.2f}"
        spans = "".join(
            f'<span style="background:{_colour(advantages[i] / largest * weight)}">'
            f"{_visible(token)}</span>"
            for token, weight in zip(tokens[i], weights[i], strict=True)
        )
        rows.append(
            f'<tr><td style="{_CELL}text-align:right">{reward}</td>'
            f'<td style="{_CELL}text-align:right">{advantages[i]:+.2f}</td>'
            f'<td style="{_CELL}text-align:left;font-family:monospace">{spans}</td></tr>'
        )
    head = "".join(
        f'<th style="{_CELL}text-align:left">{name}</th>'
        for name in ("reward", "advantage", "completion")
    )
    return (
        f'<div style="overflow-x:auto"><p><b>{_visible(prompt)}</b></p>'
        f'<table style="border-collapse:collapse"><tr>{head}</tr>{"".join(rows)}</table></div>'
    )


_CELL = "padding:2px 8px;vertical-align:top;"


def _colour(strength: float) -> str:
    """Green for positive, red for negative strength in -1..1; readable on light and dark pages."""
    red, green, blue = (46, 160, 67) if strength > 0 else (218, 54, 51)
    return f"rgba({red},{green},{blue},{min(abs(strength), 1.0) * 0.6:.2f})"


def _visible(text: str) -> str:
    return html.escape(text).replace("\n", "⏎<br>")
