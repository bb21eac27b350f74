"""One picture of each method's loop, in the same hand: what it adds stands in its colour."""

from __future__ import annotations

from html import escape

from jinja2 import Environment, PackageLoader

WIDTH, BOX_WIDTH, BOX_HEIGHT = 900, 192, 92
COLUMNS, ROWS = (20, 242, 464, 686), (66, 208)
HEIGHTS = (178, 320)  # of a picture of one row, of two
COLOURS = {"basic": "#0072B2", "diversity": "#E69F00", "judge": "#CC79A7",
           "verification": "#009E73", "meta": "#D55E00", "flow": "#56B4E9"}  # fmt: skip
SAMPLE = "Sample|a group of G answers|to each prompt"
SCORE = "Score|rules: is the result right?|is the form kept?"
COMPARE = "Compare|advantage of an answer:|(R − mean) ÷ std of its group"
UPDATE = "Update|tokens of better answers|up, of worse down; clipped"
AGAIN = "the next step samples from the new policy"

# Name -> what it shows, boxes of the two rows, arrows between boxes ("row column" each), text of
# the arrow back. A box is its title and lines; "*" marks what the method adds, "" is no box.
LOOPS = {
    "basic": ("GRPO", [[SAMPLE, SCORE, "*" + COMPARE, "*" + UPDATE]], "", AGAIN),
    "diversity": (
        "GRPO with a diversity reward",
        [[SAMPLE, SCORE + "|*+ w · diversity", COMPARE, UPDATE],
         ["*Embed|each answer becomes|a vector",
          "*Diversity|1 − cosine to the mean|of its group; w falls"]],
        "00>10 10>11 11>01", AGAIN,
    ),
    "judge": (
        "GRPO with a judge as reward",
        [[SAMPLE, SCORE + "|*+ the judge's quality", COMPARE, UPDATE],
         ["*Judge|a frozen model reads|question and answer",
          "*Quality|four criteria, 1 to 5;|no reply: not scored"]],
        "00>10 10>11 11>01", AGAIN,
    ),
    "verification": (
        "Self-verification",
        [[SAMPLE + "|*or verdicts on each item", SCORE + "|*or: verdict = label?", COMPARE, UPDATE],
         ["*Ask to verify|question and final answer:|right? Yes or No",
          "*Post-process|answers with their label:|filter, diversify, balance"]],
        "01>11 11>10 10>00", AGAIN,
    ),
    "meta": (
        'P("Yes") as reward',
        [[SAMPLE, "*Score|no label and no rule:|R = log p",
          "*Compare|advantage: R − mean|of its group",
          "*Update|CISPO: the ratio is cut off,|every token keeps its push"],
         ["*Evaluator|is asked after each answer:|“Is the answer correct?”",
          "*p|the share of Yes in its|next token: Yes or No"]],
        "00>10 10>11 11>01", AGAIN,
    ),
    "flow": (
        "Flow-GRPO: episodes of several turns",
        [["*Planner|reads question, tools, memory;|plans the next step",
          "Executor and tools|the plan becomes a call,|a tool answers it",
          "Memory|the step and its result|are written down",
          "Verifier|is enough known?|STOP or CONTINUE"],
         ["*Update|the planner alone;|the rest is frozen",
          "*Broadcast|all turns of an episode|get its advantage",
          "*Compare|R of an episode among|G episodes of a question",
          "Generator|writes the output;|right or wrong is R"]],
        "03>13 13>12 12>11 11>10 10>00", "CONTINUE: the next turn reads the memory",
    ),
}  # fmt: skip


def loop(method: str) -> str:
    """The SVG of a method's loop: basic, diversity, judge, verification, meta or flow.

    It has a ground of its own, and follows the reader's system from light to dark.
    """
    if method not in LOOPS:
        raise ValueError(f"there is no loop of {method!r}: choose among {', '.join(LOOPS)}.")
    title, rows, arrows, back = LOOPS[method]
    parts = [
        _box(f"{row}{column}", box)
        for row, boxes in enumerate(rows)
        for column, box in enumerate(boxes)
    ]
    parts += [_arrow(*arrow.split(">")) for arrow in ["00>01", "01>02", "02>03", *arrows.split()]]
    left, right, top = COLUMNS[0] + BOX_WIDTH // 2, COLUMNS[3] + BOX_WIDTH // 2, ROWS[0]
    parts.append(f'<path class="arrow" d="M{right},{top} V30 H{left} V{top - 3}"/>')
    parts.append(f'<text class="back" x="{WIDTH // 2}" y="22">{escape(back)}</text>')
    return Environment(loader=PackageLoader("grpo_kit.course")).get_template("loop.svg.j2").render(
        here=f"loop-{method}", title=escape(title), colour=COLOURS[method], width=WIDTH,
        height=HEIGHTS[len(rows) - 1], parts="\n".join(parts),
    )  # fmt: skip


def _box(place: str, text: str) -> str:
    x, y = COLUMNS[int(place[1])], ROWS[int(place[0])]
    title, *lines = text.removeprefix("*").split("|")
    own = " own" if text.startswith("*") else ""
    middle = x + BOX_WIDTH // 2
    first = y + (32 if len(lines) < 3 else 23)
    size = f'width="{BOX_WIDTH}" height="{BOX_HEIGHT}"'
    parts = [
        f'<rect class="box{own}" x="{x}" y="{y}" {size} rx="8"/>',
        f'<text class="title" x="{middle}" y="{first}">{escape(title)}</text>',
    ]
    for i, line in enumerate(lines, start=1):
        kind = "mark" if line.startswith("*") else "line"
        text = escape(line.removeprefix("*"))
        parts.append(f'<text class="{kind}" x="{middle}" y="{first + 2 + 18 * i}">{text}</text>')
    return "\n".join(parts)


def _arrow(start: str, end: str) -> str:
    """From the nearest side of one box to that of the other, along a row or a column."""
    (r, c), (to_row, to_column) = map(int, start), map(int, end)
    x, y = COLUMNS[c] + BOX_WIDTH // 2, ROWS[r] + BOX_HEIGHT // 2
    across, down = to_column - c, to_row - r
    half = (across * BOX_WIDTH // 2, down * BOX_HEIGHT // 2)
    to = (COLUMNS[to_column] + BOX_WIDTH // 2 - half[0], ROWS[to_row] + BOX_HEIGHT // 2 - half[1])
    return f'<path class="arrow" d="M{x + half[0]},{y + half[1]} L{to[0]},{to[1]}"/>'
