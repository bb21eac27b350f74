"""Look at one group of rollouts or episodes: an HTML view, coloured by advantage.

Self-contained HTML without scripts, so that it shows in JupyterLab, Colab, a rendered page and a
file. Whatever a policy writes is escaped: it is text, never markup.
"""

import html
from collections.abc import Iterable, Sequence

from grpo_kit.flow import Episode, Step
from grpo_kit.rewards import question_text
from grpo_kit.visible import shortened, visible

CELL = "padding:2px 8px;vertical-align:top;"


def group_html(prompt: str, tokens: Sequence, rewards: Sequence, advantages: Sequence) -> str:
    """A prompt and its G completions (lists of decoded tokens), best first.

    A reward of None was not scored. Blue is an advantage above 0, orange one below, deeper where
    larger. Raises ValueError if the lists do not have the same lengths.
    """
    group = zip(tokens, rewards, advantages, _colours(advantages), strict=True)
    rows = []
    for texts, reward, advantage, colour in sorted(group, key=lambda row: -row[2]):
        earned = "not scored" if reward is None else f"{reward:.2f}"
        text = "".join(map(_visible, texts))
        rows.append(
            f'<tr><td style="{CELL}text-align:right">{earned}</td>'
            f'<td style="{CELL}text-align:right">{advantage:+.2f}</td>'
            f'<td style="{CELL}text-align:left;font-family:monospace">'
            f'<span style="background:{colour}">{text}</span></td></tr>'
        )
    body = _row(["reward", "advantage", "completion"], "th") + "".join(rows)
    return _titled(prompt, f'<table style="border-collapse:collapse">{body}</table>')


def episodes_html(
    question: str, episodes: Sequence, endings: Sequence, rewards: Sequence, advantages: Sequence
) -> str:
    """A question and its G episodes, each to be opened: a row a turn, coloured by the advantage.

    An episode is a list of turns, each a dict of column -> text; an ending says what came out and
    why. Opening works without a script. Raises ValueError if the lists differ in length.
    """
    group = zip(episodes, endings, rewards, advantages, _colours(advantages), strict=True)
    blocks = []
    for i, (turns, ending, reward, advantage, colour) in enumerate(group, 1):
        head = _row(turns[0] if turns else [], "th")
        rows = "".join(_row(turn.values(), "td") for turn in turns)
        blocks.append(
            f'<details style="margin:2px 0"{" open" if i == 1 else ""}>'
            f'<summary style="background:{colour};padding:2px 8px">episode {i}: '
            f"{len(turns)} turn{'s' * (len(turns) != 1)}, {_reward_text(reward)}, "
            f"advantage {advantage:+.2f}</summary>"
            f'<table style="border-collapse:collapse;border-left:6px solid {colour}">'
            f"{head}{rows}</table>"
            f'<div style="{CELL}border-left:6px solid {colour}">{_visible(ending)}</div></details>'
        )
    return _titled(question, "".join(blocks))


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


def _colours(advantages: Sequence) -> list[str]:
    """A colour for each of the advantages, readable on light and dark pages."""
    largest = max(map(abs, advantages), default=0.0) or 1.0
    return [
        f"rgba({'0,114,178' if a > 0 else '213,94,0'},{abs(a) / largest * 0.6:.2f})"
        for a in advantages
    ]


def _row(texts: Iterable[str], tag: str) -> str:
    cells = (f'<{tag} style="{CELL}text-align:left">{_visible(text)}</{tag}>' for text in texts)
    return f"<tr>{''.join(cells)}</tr>"


def _titled(title: str, body: str) -> str:
    return f'<div style="overflow-x:auto"><p><b>{_visible(title)}</b></p>{body}</div>'


def _reward_text(reward: float | None) -> str:
    return "not scored" if reward is None else f"reward {reward:g}"


def _visible(text: str) -> str:
    return html.escape(visible(shortened(text))).replace("\n", "<br>")
