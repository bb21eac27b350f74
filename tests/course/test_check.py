"""The exercises' checks: what they say to right, wrong, missing and broken answers.

A check is only worth something if it fools nobody. So the notebooks' own solutions are broken in
every small way (`mutants`): none of these may be called right.
"""

import ast
import functools
import json
import re
import signal
from pathlib import Path

import pytest
import torch

from grpo_kit.course import check
from grpo_kit.objective import group_advantages

EXERCISES = {name: one for name, one in vars(check).items() if isinstance(one, check.Exercise)}
each = pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
by_name = pytest.mark.parametrize("name", EXERCISES)
FOLDED = re.compile(r"<summary>Solution</summary>\s*```python\n(.*?)```", re.DOTALL)
SOLUTIONS = {  # as the notebooks show them
    ast.parse(source).body[-1].name: source
    for path in sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
    for cell in json.loads(path.read_text())["cells"]
    for source in FOLDED.findall("".join(cell["source"]))
}


def refusing(*args, **kwargs):
    raise NotImplementedError


@each
@pytest.mark.parametrize("stub", [refusing, lambda *a, **k: None, lambda *a, **k: ...])
def test_a_stub_is_not_done(exercise, stub):
    verdict = exercise(stub)
    assert verdict.state == "not done" and not verdict and repr(verdict).startswith("…")


@each
@pytest.mark.parametrize("answer", ["text", 3.0, [1.0], object(), torch.zeros(7), [[None]]])
def test_any_other_answer_is_wrong_and_nothing_is_raised(exercise, answer):
    assert exercise(lambda *a, **k: answer).state == "wrong"
    assert "got an error, KeyError: 'x'. " in exercise(lambda *a, **k: {}["x"]).message


# --- every small mistake

FAMILIES = [  # operators that are taken for one another
    [ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq],
    [ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod],
    [ast.And, ast.Or], [ast.BitAnd, ast.BitOr], [ast.Is, ast.IsNot], [ast.In, ast.NotIn],
]  # fmt: skip
SWAPS = {"sum": ["max", "mean"], "mean": ["sum"], "max": ["min", "sum"], "min": ["max"],
         "all": ["any"]}  # fmt: skip


def expressions(*texts: str) -> list[ast.expr]:
    return [ast.parse(text, mode="eval").body for text in texts]


def like(node: ast.AST, **fields) -> ast.AST:
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def without_one(node: ast.AST, field: str) -> list[ast.AST]:
    values = getattr(node, field)
    return [like(node, **{field: values[:i] + values[i + 1 :]}) for i in range(len(values))]


def changes(node: ast.AST, field: str, inputs: list[str]) -> list[ast.AST]:
    """What may stand by mistake where `node` stands, as its parent's `field`."""
    text = ast.unparse(node)
    if field in ("test", "ifs"):
        return expressions("True", "False") + changes(node, "", inputs)
    if field == "iter":
        return expressions(f"list({text})[1:]", f"list({text})[:-1]") + changes(node, "", inputs)
    match node:
        case ast.operator() | ast.cmpop() | ast.boolop():
            return [other() for family in FAMILIES if type(node) in family for other in family]
        case ast.Constant(str(value)):
            cuts = range(1, 4) if "\\" in value else [len(value)]  # patterns, piece by piece
            kept = (value[:i] + value[i + n :] for n in cuts for i in range(len(value) - n + 1))
            return [*map(ast.Constant, kept)]
        case ast.Constant(float(value)):
            return [*map(ast.Constant, (value + 1, value - 1, 2 * value, value / 2))]
        case ast.Constant(int(value)):
            return [*map(ast.Constant, (value + 1, value - 1))]
        case ast.Name(id=name, ctx=ast.Load()):
            return expressions(*SWAPS.get(name, ()), *(inputs if name in inputs else ()))
        case ast.Attribute(value, name):
            return [ast.Attribute(value, other) for other in SWAPS.get(name, ())]
        case ast.Compare(ops=[_]):
            return expressions(f"not ({text})")
        case ast.BoolOp(_, values):
            return values + expressions(f"not ({text})")
        case ast.BinOp(left, operator, right):
            turns = isinstance(operator, (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr))
            return [left, right] if turns else [left, right, ast.BinOp(right, operator, left)]
        case ast.UnaryOp(_, operand):
            return [operand]
        case ast.IfExp(_, body, orelse):
            return [body, orelse]
        case ast.Call(function, arguments):
            itself = [function.value] if isinstance(function, ast.Attribute) else []
            dropped = without_one(node, "args") + without_one(node, "keywords")
            return arguments + itself + dropped
        case ast.Subscript(value):
            return [value]
        case ast.Slice(lower, upper):
            bounds = {"lower": lower, "upper": upper}
            moved = {key: f"({ast.unparse(one)})" for key, one in bounds.items() if one}
            return [
                like(node, **{key: other})
                for key, one in moved.items()
                for other in [None, *expressions(f"{one} + 1", f"{one} - 1")]
            ]
        case ast.List() | ast.Tuple():
            return without_one(node, "elts")
        case ast.stmt():
            returned = inputs if isinstance(node, ast.Return) else ()
            dropped = ast.Expr(ast.Constant(f"without {text}"))
            return [dropped, *(ast.Return(ast.Name(name)) for name in returned)]
    return []


@functools.cache
def mutants(source: str) -> dict[str, str]:
    """Each source that differs from this one by one mistake -> its changed lines."""
    tree = ast.parse(source)
    function = tree.body[-1]
    inputs = [argument.arg for argument in function.args.args]
    right, found = ast.unparse(tree).splitlines(), {}
    for parent in list(ast.walk(function)):
        for field, value in ast.iter_fields(parent):
            places = value if isinstance(value, list) else [value]
            for i, old in enumerate(places):
                for new in changes(old, field, inputs) if isinstance(old, ast.AST) else ():
                    changed = [*places[:i], new, *places[i + 1 :]]
                    setattr(parent, field, changed if isinstance(value, list) else new)
                    lines = ast.unparse(tree).splitlines()
                    differing = "; ".join(line.strip() for line in lines if line not in right)
                    if lines != right:
                        found["\n".join(lines)] = differing
            setattr(parent, field, value)
    return found


FLOAT, OPEN = "torch divides booleans as numbers", "the task leaves this very value open"
EQUIVALENT = {  # a mutant's changed lines -> why it is no mistake
    "error = 11 if number is None else abs(float(number) - float(gold))": "10 is far enough",
    "error = 10 if number is None else abs(number - float(gold))": "it is a number already",
    "error = 10 if number is None else abs(float(gold) - float(number))": "a distance has no sign",
    "text = extract_answer(completion[-1]['content'])": "a completion is one message",
    "return (A >= 0) & (ratio > 1 + epsilon) | (A < 0) & (ratio < 1 - epsilon)": "no A is 0",
    "return (A > 0) & (ratio > 1 + epsilon) | (A <= 0) & (ratio < 1 - epsilon)": "no A is 0",
    "return (A > 0) & (ratio >= 1 + epsilon) | (A < 0) & (ratio < 1 - epsilon)": OPEN,
    "return (A > 0) & (ratio > 1 + epsilon) | (A < 0) & (ratio <= 1 - epsilon)": OPEN,
    '"""without mask = mask.float()"""': FLOAT,
    "mask = mask": FLOAT,
    "if loss_type >= 'grpo':": "of the three names only grpo is",
    "if loss_type <= 'dapo':": "of the three names only dapo is",
    "right = accuracy.view(-1, num_generations) >= 1": "accuracy is 0 or 1",
    r"return re.sub('(?=\\s*/\\s*response)', '<_', text, flags=re.IGNORECASE)": "it is broken, too",
    r"return re.sub('<(?=\\s*/\\s*response)', '', text, flags=re.IGNORECASE)": "it is broken, too",
    "rewards.append(value if right >= 1 else -0.5)": "accuracy is 0 or 1",
    "shares = {a: sum(own) / len(own) if own else -2.0 for a, own in verdicts_on.items()}":
        "whatever is below 0 loses",
    "shares = {a: sum(own) / len(own) if own else -0.5 for a, own in verdicts_on.items()}":
        "whatever is below 0 loses",
    "probs = logits.softmax(1)": "of two axes the last is 1",
    "for i, accuracy in list(enumerate(accuracies))[1:]:": "the first is the best to begin with",
    "if i - best == patience:": "the distance grows by 1",
    "return [a for a, n in zip(values, turns) for _ in range(n)]": "each is a tensor of one number",
    "mask, end = ([], len(turns[-1][0]))": "a list times less than 0 is empty",
    "return sum((start // rows < (start + size - 1) // rows for start in starts))":
        "a group's last row is in no earlier process than its first",
    "return sum((min(group) >= max(group) for group in groups)) / len(groups)":
        "no minimum is above its maximum",
}  # fmt: skip


def late(*_) -> None:
    raise TimeoutError("it runs for ever")


def verdict_on(name: str, function, seconds: float = 2.0) -> check.Verdict:
    """The check's verdict; a function that takes longer (of the processor's time) is stopped."""
    signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        return EXERCISES[name](function)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def assert_wrong(name: str, verdict: check.Verdict) -> None:
    """Not right, and told: the input in full, what was expected, what came, and the case's hint."""
    if verdict.message == "the function returns nothing so far.":
        return
    shown = {
        f"({check._text(arguments)[1:-1]}): expected {check._text(expected)}, got ": f". {hint}"
        for hint, (*arguments, expected) in EXERCISES[name].cases.items()
    }
    assert verdict.state == "wrong" and "…" not in verdict.message.partition(": expected ")[0]
    assert any(case in verdict.message and verdict.message.endswith(shown[case]) for case in shown)


@by_name
def test_no_small_mistake_in_a_solution_is_called_right(name):
    survivors = set()
    for source, changed in mutants(SOLUTIONS[name]).items():
        namespace = {}
        exec(source, namespace)
        verdict = verdict_on(name, namespace[name])
        if verdict:
            survivors.add(changed)
        else:
            assert_wrong(name, verdict)
    assert survivors == EQUIVALENT.keys() & set(mutants(SOLUTIONS[name]).values())


def test_what_never_ends_is_stopped_and_no_exercise_is_without_a_solution():
    namespace = {}
    exec("def any_false(alpha, m):\n    while m:\n        pass", namespace)
    assert "it runs for ever" in verdict_on("any_false", namespace["any_false"], 0.2).message
    assert SOLUTIONS.keys() == EXERCISES.keys()
    made = {line for source in SOLUTIONS.values() for line in mutants(source).values()}
    assert made >= EQUIVALENT.keys()


def test_a_solution_that_changes_its_arguments_spoils_no_later_check():
    check.leave_one_out(lambda rewards, n: rewards.zero_())
    verdict = check.leave_one_out(lambda r, n: group_advantages(r, n, "none") * n / (n - 1))
    assert verdict and repr(verdict).startswith("✔ right")
