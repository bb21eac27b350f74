"""Look at one group of rollouts or episodes: an HTML view, coloured by advantage.

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


def episodes_html(
    question: str,
    episodes: Sequence[Sequence[dict[str, str]]],
    endings: Sequence[str],
    rewards: Sequence[float | None],
    advantages: Sequence[float],
) -> str:
    """A question and its G episodes, each to be opened: a row a turn, coloured by the advantage.

    Args:
        question: text.
        episodes: G lists of turns, each a dict of column -> text; all have the same columns.
        endings: G texts, what came out and why it ended.
        rewards, advantages: G each; a reward of None was not scored.

    Opening works without a script (`<details>`); `episodes_text` is for where HTML is not shown.
    Raises ValueError if the lists do not have the same lengths.
    """
    _check_lengths(episodes, endings, rewards, advantages)
    largest = max((abs(a) for a in advantages), default=0.0) or 1.0
    blocks = []
    for i, (turns, ending) in enumerate(zip(episodes, endings, strict=True)):
        colour = _colour(advantages[i] / largest)
        names = list(turns[0]) if turns else []
        head = "".join(f'<th style="{_CELL}text-align:left">{_visible(n)}</th>' for n in names)
        rows = "".join(
            "<tr>"
            + "".join(
                f'<td style="{_CELL}text-align:left">{_visible(turn[name])}</td>' for name in names
            )
            + "</tr>"
            for turn in turns
        )
        blocks.append(
            f'<details style="margin:2px 0"{" open" if not i else ""}>'
            f'<summary style="background:{colour};padding:2px 8px">episode {i + 1}: '
            f"{len(turns)} turn{'s' * (len(turns) != 1)}, {_reward_text(rewards[i])}, "
            f"advantage {advantages[i]:+.2f}</summary>"
            f'<table style="border-collapse:collapse;border-left:6px solid {colour}">'
            f"<tr>{head}</tr>{rows}</table>"
            f'<div style="{_CELL}border-left:6px solid {colour}">{_visible(ending)}</div>'
            "</details>"
        )
    return f'<div style="overflow-x:auto"><p><b>{_visible(question)}</b></p>{"".join(blocks)}</div>'


def episodes_text(
    question: str,
    episodes: Sequence[Sequence[dict[str, str]]],
    endings: Sequence[str],
    rewards: Sequence[float | None],
    advantages: Sequence[float],
) -> str:
    """The same as plain text: a line a turn."""
    _check_lengths(episodes, endings, rewards, advantages)
    lines = [question]
    for i, (turns, ending) in enumerate(zip(episodes, endings, strict=True)):
        told = f"{_reward_text(rewards[i])}, advantage {advantages[i]:+.2f}"
        lines += ["", f"episode {i + 1}: {told}"]
        lines += [f"  {t}. " + " | ".join(turn.values()) for t, turn in enumerate(turns, 1)]
        lines.append(f"  {ending}")
    return "\n".join(lines)


def _check_lengths(episodes, endings, rewards, advantages) -> None:
    n = len(episodes)
    if not len(endings) == len(rewards) == len(advantages) == n:
        raise ValueError(
            f"{n} episodes, {len(endings)} endings, {len(rewards)} rewards and {len(advantages)} "
            "advantages: give one each."
        )


def _reward_text(reward: float | None) -> str:
    return "not scored" if reward is None else f"reward {reward:g}"


_CELL = "padding:2px 8px;vertical-align:top;"


def _colour(strength: float) -> str:
    """Green for positive, red for negative strength in -1..1; readable on light and dark pages."""
    red, green, blue = (46, 160, 67) if strength > 0 else (218, 54, 51)
    return f"rgba({red},{green},{blue},{min(abs(strength), 1.0) * 0.6:.2f})"


def _visible(text: str) -> str:
    return html.escape(text).replace("\n", "⏎<br>")
