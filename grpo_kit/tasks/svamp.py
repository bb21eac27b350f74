"""SVAMP: 1,000 short word problems with real sentences (Patel et al. 2021, arXiv 2103.07191).

Neighbouring problems vary one text, so they are split by their bodies with the numbers masked: no
such body is on both sides. The published train rows come from other data sets and are not used.
"""

import ast
import gzip
import hashlib
import json
import operator
import re
from fractions import Fraction

from grpo_kit.paths import data_dir
from grpo_kit.tasks import Task, chat

N_TEST = 300  # of 1,000
SYSTEM_PROMPT = (
    "Work the problem out, then give the number: <think>steps</think><answer>number</answer>"
)
_OPERATORS = {
    ast.Add: ("+", operator.add), ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul), ast.Div: ("/", operator.truediv),
}  # fmt: skip


def svamp() -> Task:
    """700 train and 300 test rows.

    Columns: `prompt`, `answer` (the number as published, which is wrong for `chal-680`),
    `question`, `solution` (the equation worked out, `3 + 4 = 7, 7 * 2 = 14`), `kind` and `id`.
    """
    from datasets import Dataset

    packed = (data_dir() / "svamp" / "SVAMP.json.gz").read_bytes()
    problems = json.loads(gzip.decompress(packed))
    rows = {split: [_row(p) for p in own] for split, own in split_by_body(problems).items()}
    return Task("svamp", **{split: Dataset.from_list(own) for split, own in rows.items()})


def masked_body(problem: dict) -> str:
    """The body of a published problem in lower case, its numbers replaced by `#`."""
    return " ".join(re.sub(r"[0-9][0-9.,]*", "#", problem["Body"]).lower().strip(" .").split())


def split_by_body(problems: list[dict]) -> dict[str, list[dict]]:
    """Published problems by split: whole bodies in an order of their hashes fill the test rows."""
    groups: dict[str, list[dict]] = {}
    for problem in problems:
        groups.setdefault(masked_body(problem), []).append(problem)
    splits: dict[str, list[dict]] = {"train": [], "test": []}
    for body in sorted(groups, key=lambda body: hashlib.sha256(body.encode()).hexdigest()):
        fits = len(splits["test"]) + len(groups[body]) <= N_TEST
        splits["test" if fits else "train"] += groups[body]
    return splits


def _row(problem: dict) -> dict:
    body = problem["Body"].strip()
    stop = "" if body.endswith((".", ",", "?")) else "."
    question = f"{body}{stop} {problem['Question'].strip()}"
    prompt = chat(SYSTEM_PROMPT, question)
    return {
        "prompt": prompt, "answer": _text(Fraction(problem["Answer"])), "question": question,
        "solution": worked_out(problem["Equation"]), "id": problem["ID"],
        "kind": problem["Type"].replace("Divison", "Division"),
    }  # fmt: skip


def worked_out(equation: str) -> str:
    """The steps of an equation: "( ( 3.0 + 4.0 ) * 2.0 )" -> "3 + 4 = 7, 7 * 2 = 14"."""
    steps: list[str] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(str(node.value))
        sign, apply = _OPERATORS[type(node.op)]
        left, right = value(node.left), value(node.right)
        result = apply(left, right)
        steps.append(f"{_text(left)} {sign} {_text(right)} = {_text(result)}")
        return result

    alone = value(ast.parse(equation.strip(), mode="eval").body)
    return ", ".join(steps) or _text(alone)


def _text(number: Fraction) -> str:
    return str(number.numerator) if number.denominator == 1 else f"{float(number):g}"
