"""Look at one group of rollouts: an HTML table, coloured by advantage.

Self-contained HTML without scripts, so that it shows in JupyterLab, Colab, a rendered page and a
file. Whatever a policy writes is escaped: it is text, never markup.
"""

import html
from collections.abc import Iterable, Sequence

from grpo_kit.visible import shortened, visible

CELL = "padding:2px 8px;vertical-align:top;text-align:left"


def group_html(prompt: str, tokens: Sequence, rewards: Sequence, advantages: Sequence) -> str:
    """A prompt and its G completions (lists of decoded tokens), best first.

    A reward of None was not scored. Blue is an advantage above 0, orange one below, deeper where
    larger. Raises ValueError if the lists do not have the same lengths.
    """
    largest = max(map(abs, advantages), default=0.0) or 1.0
    rows = [_row(["reward", "advantage", "completion"], "th")]
    group = zip(tokens, rewards, advantages, strict=True)
    for texts, reward, advantage in sorted(group, key=lambda row: -row[2]):
        earned = "not scored" if reward is None else f"{reward:.2f}"
        colour = "0,114,178" if advantage > 0 else "213,94,0"  # readable on light and dark pages
        look = f"background:rgba({colour},{abs(advantage) / largest * 0.6:.2f})"
        # a page's own grey would hide the colour of the row
        text = f'<code style="background:none">{"".join(map(_visible, texts))}</code>'
        rows.append(_row([earned, f"{advantage:+.2f}", f'<div style="{look}">{text}</div>'], "td"))
    body = f'<table style="border-collapse:collapse">{"".join(rows)}</table>'
    return f'<div style="overflow-x:auto"><p><b>{_visible(prompt)}</b></p>{body}</div>'


def _row(cells: Iterable[str], tag: str) -> str:
    look = CELL + ";white-space:nowrap" * (tag == "th")
    row = "".join(f'<{tag} style="{look}">{cell}</{tag}>' for cell in cells)
    return f"<tr>{row}</tr>"


def _visible(text: str) -> str:
    return html.escape(visible(shortened(text))).replace("\n", "<br>")
