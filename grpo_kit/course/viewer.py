"""Look at one group of rollouts or episodes: an HTML table, coloured by advantage.

Self-contained HTML without scripts, so that it shows in JupyterLab, Colab, a rendered page and a
file. Whatever a policy writes is escaped: it is text, never markup.
"""

import html
from collections.abc import Iterable, Sequence

from grpo_kit.flow import Episode, Step
from grpo_kit.rewards import question_text
from grpo_kit.visible import shortened, visible

CELL = "padding:2px 8px;vertical-align:top;text-align:left"


def group_html(prompt: str, tokens: Sequence, rewards: Sequence, advantages: Sequence) -> str:
    """A prompt and its G completions (lists of decoded tokens), best first.

    A reward of None was not scored. Blue is an advantage above 0, orange one below, deeper where
    larger. Raises ValueError if the lists do not have the same lengths.
    """
    look = "background:none"  # a page's own grey would hide the colour of the row
    texts = [f'<code style="{look}">{"".join(map(_visible, texts))}</code>' for texts in tokens]
    return _table(prompt, "completion", texts, rewards, advantages)


def episodes_html(
    question: str, episodes: Sequence, endings: Sequence, rewards: Sequence, advantages: Sequence
) -> str:
    """A question and its G episodes, best first; a click opens the turns of one, a row a turn.

    An episode is a list of turns, each a dict of column -> text; an ending says what came out and
    why. Opening works without a script. Raises ValueError if the lists differ in length.
    """
    texts = []
    for turns, ending in zip(episodes, endings, strict=True):
        rows = [_row(map(_visible, turns[0]), "th")] if turns else []
        rows += [_row(map(_visible, turn.values()), "td") for turn in turns]
        summary = f"{len(turns)} turn{'s' * (len(turns) != 1)}, {_visible(ending)}"
        opened = f"<table>{''.join(rows)}</table>"
        texts.append(f"<details><summary>{summary}</summary>{opened}</details>")
    return _table(question, "episode", texts, rewards, advantages)


def episode_view(episodes: Sequence[Episode], advantages: Sequence[float]) -> dict:
    """A group of Flow-GRPO's episodes as `episodes_html` takes it."""

    def shown(step: Step) -> dict[str, str]:
        fields = {"thought": step.action.justification, "goal": step.action.goal}
        return fields | {"call": step.call, "result": step.result, "verdict": step.verdict}

    return {
        "question": question_text(episodes[0].row["prompt"]),
        "episodes": [[shown(step) for step in episode.memory.steps] for episode in episodes],
        "endings": [f"output: {e.output} (ended by the {e.stopped})" for e in episodes],
        "rewards": [episode.reward for episode in episodes],
        "advantages": [float(advantage) for advantage in advantages],
    }


def _table(
    title: str, kind: str, texts: Sequence[str], rewards: Sequence, advantages: Sequence
) -> str:
    """A row for each of a group's texts, which are HTML."""
    largest = max(map(abs, advantages), default=0.0) or 1.0
    rows = [_row(["reward", "advantage", kind], "th")]
    group = zip(texts, rewards, advantages, strict=True)
    for text, reward, advantage in sorted(group, key=lambda row: -row[2]):
        earned = "not scored" if reward is None else f"{reward:.2f}"
        colour = "0,114,178" if advantage > 0 else "213,94,0"  # readable on light and dark pages
        look = f"background:rgba({colour},{abs(advantage) / largest * 0.6:.2f})"
        shown = f'<div style="{look}">{text}</div>'
        rows.append(_row([earned, f"{advantage:+.2f}", shown], "td"))
    body = f'<table style="border-collapse:collapse">{"".join(rows)}</table>'
    return f'<div style="overflow-x:auto"><p><b>{_visible(title)}</b></p>{body}</div>'


def _row(cells: Iterable[str], tag: str) -> str:
    look = CELL + ";white-space:nowrap" * (tag == "th")
    row = "".join(f'<{tag} style="{look}">{cell}</{tag}>' for cell in cells)
    return f"<tr>{row}</tr>"


def _visible(text: str) -> str:
    return html.escape(visible(shortened(text))).replace("\n", "<br>")
