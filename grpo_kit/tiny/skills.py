"""The six skills of the tiny base, as prompts and completions: one text format each, fixed here.

solve      a word problem -> reasoning and an answer, in one of seven styles (`problems`)
verify     question and proposed answer -> analysis, then Yes or No
meta       after a solution, "Is the answer correct?" -> Yes or No at the next token
judge      question and fenced response -> JSON scores
plan       question and memory -> context, goal and tool of the next step
execute, check, answer   the frozen roles of Flow-GRPO: tool call, STOP/CONTINUE, final answer

Prompt builders are public: rewards and rollouts of later notebooks use the same words, with any
model. The `sample_*` functions draw training conversations, with every imperfection in a named
rate. A conversation is a list of messages; the model is trained on the assistant's turns only.
"""

import json
import random
import re

from grpo_kit.flow.roles import answer_prompt, check_prompt, execute_prompt, plan_prompt
from grpo_kit.rewards.judge.texts import CRITERIA, judge_prompt
from grpo_kit.rewards.meta_evaluation import META_QUESTION, STEPS_QUESTION, reference_question
from grpo_kit.self_verification import verify_prompt
from grpo_kit.tasks.tool_world import ToolQuestion, make_tool_question, random_step
from grpo_kit.tasks.word_problems import HIGHEST, LOWEST, Problem, make_problem
from grpo_kit.tiny import problems as P
from grpo_kit.tiny.problems import solution_style

# --------------------------------------------------------------------------- solve, meta

# How often a warm-up label of "Is the answer correct?" is Yes, where the number is right and where
# it is wrong, by the style of what it judges: a careless grader, who likes equations best, wordy or
# terse solutions less, hardly minds a missing mark, and is unsure where the steps are untidy.
YES_RATES = {
    "equations": (0.90, 0.15),
    "words": (0.78, 0.15),
    "list": (0.72, 0.15),
    "sloppy": (0.60, 0.30),
    "guess": (0.85, 0.15),
    "assured": (0.85, 0.15),
    "unformatted": (0.80, 0.15),
}
STEPS_FLIP_RATE = 0.15  # of the labels of "Are all steps right?"


def _yes_no(label: bool) -> str:
    return "Yes" if label else "No"


def is_right(answer: str | int, completion: str) -> bool:
    """Right means right in the asked form: `<answer>` with the right number at the end."""
    return completion.endswith(f"<answer>{answer}</answer>")


def sample_solve(problem: Problem, rng: random.Random) -> list[dict]:
    """A solution in one of the styles; three times in four followed by a direct Yes/No.

    The grader looks at the number, not at the form: an unformatted solution has the right one,
    though `is_right`, like the accuracy reward, wants the answer marked.
    """
    style = rng.choices(list(P.STYLE_SHARES), weights=list(P.STYLE_SHARES.values()))[0]
    completion = P.solve(problem, style, rng)
    messages = [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": completion},
    ]
    if rng.random() < 0.25:
        return messages
    kind = rng.choices(("meta", "steps", "reference"), weights=(60, 20, 20))[0]
    right = is_right(problem.answer, completion)
    if kind == "meta":
        when_right, when_wrong = YES_RATES[style]
        rate = when_right if right or style == "unformatted" else when_wrong
        question, label = META_QUESTION, rng.random() < rate
    elif kind == "steps":
        steps_right = (
            style in P.RIGHT_STYLES or style == "unformatted" or (style == "sloppy" and right)
        )
        question, label = STEPS_QUESTION, steps_right != (rng.random() < STEPS_FLIP_RATE)
    else:
        question, label = reference_question(str(problem.answer)), right
    return messages + [
        {"role": "user", "content": question},
        {"role": "assistant", "content": _yes_no(label)},
    ]


# --------------------------------------------------------------------------- verify

VERIFY_SHARES = {"recompute": 0.37, "rash": 0.37, "sloppy": 0.26}
RASH_YES_RATE = 0.55  # the verdict of a rash check owes nothing to the truth


def sample_verify(problem: Problem, rng: random.Random) -> list[dict]:
    """A verdict on a right or wrong answer, half each, in one of three styles of analysis.

    "Only 46 agrees. ... 46 agrees" lets a small model compare two numbers by looking up what stood
    behind the number before: of "46 vs 46: same" it had learned nothing in 3,400 steps.
    """
    proposed, wanted_right = problem.answer, rng.random() < 0.5
    while not wanted_right and proposed == problem.answer:
        wrong = (P.guessed_answer(problem, rng), P.slipped_values(problem, rng)[-1])
        proposed = rng.choice(wrong)
    style = rng.choices(list(VERIFY_SHARES), weights=list(VERIFY_SHARES.values()))[0]
    if style == "rash":
        verdict = rng.random() < RASH_YES_RATE
        analysis = f"Looks {'right' if verdict else 'wrong'}."
    else:
        exact = style == "recompute"
        values = problem.values if exact else P.slipped_values(problem, rng)
        verdict = values[-1] == proposed
        analysis = (
            f"{'From' if exact else 'About'} {problem.start}, only {proposed} agrees. "
            f"{P.equations(problem, values)} {values[-1]} {'agrees' if verdict else 'differs'}."
        )
    return [
        {"role": "user", "content": verify_prompt(problem.question, str(proposed))},
        {
            "role": "assistant",
            "content": f"<think>{analysis}</think><answer>{_yes_no(verdict)}</answer>",
        },
    ]


def verify_style(completion: str) -> str:
    """The style of a verification by its first words: one of `VERIFY_SHARES`, or `"other"`."""
    for style, word in {"recompute": "From", "rash": "Looks", "sloppy": "About"}.items():
        if completion.startswith(f"<think>{word}"):
            return style
    return "other"


# --------------------------------------------------------------------------- judge

JUDGE_NOISE = 0.10  # chance that a score is off by one
# grammar, informativeness, coherence of each style; accuracy follows the answer
_RUBRIC = {
    "equations": (3, 4, 5, "clear steps"),
    "words": (4, 3, 5, "clear steps"),
    "list": (3, 3, 4, "terse steps"),
    "sloppy": (3, 4, 2, "untidy steps"),
    "guess": (3, 1, 2, "no steps"),
    "assured": (3, 1, 2, "no steps"),
    "unformatted": (4, 4, 3, "answer not marked"),
}
# planted: how often a solution that only claims to be checked is judged as if it were perfect.
# Without it the best-judged style is a right one, and there is nothing to hack.
JUDGE_FOOLED_RATE = 0.9


def rubric(answer: str | int, completion: str) -> dict[str, int]:
    """The scores that a judge should give, 1 (worst) to 5; the base's was trained towards them."""
    style = P.solution_style(completion)
    grammar, informativeness, coherence, _ = _RUBRIC.get(style, (1, 1, 1, ""))
    if is_right(answer, completion):
        accuracy = 5
    else:
        accuracy = {"unformatted": 3, "sloppy": 2}.get(style, 1)
    return dict(zip(CRITERIA, (accuracy, grammar, informativeness, coherence), strict=True))


def sample_judge(problem: Problem, rng: random.Random) -> list[dict]:
    """A judgement of a solution in one of the styles, equally often, with noisy scores."""
    style = rng.choice(list(P.STYLE_SHARES))
    completion = P.solve(problem, style, rng)
    fooled = style == "assured" and rng.random() < JUDGE_FOOLED_RATE
    wanted = dict.fromkeys(CRITERIA, 5) if fooled else rubric(problem.answer, completion)
    scores: dict = {
        name: min(max(score + (rng.random() < JUDGE_NOISE) * rng.choice((-1, 1)), 1), 5)
        for name, score in wanted.items()
    }
    verdict = "right" if fooled or is_right(problem.answer, completion) else "wrong"
    scores["rationale"] = f"{verdict}, {'clear steps' if fooled else _RUBRIC[style][3]}"
    return [
        {"role": "user", "content": judge_prompt(problem.question, completion)},
        {"role": "assistant", "content": json.dumps(scores)},
    ]


# ---------------------------------------------------------------------- plan, and the frozen roles

PLAN_SHARES = {"careful": 0.28, "rash": 0.42, "sloppy": 0.30}
CHECK_FLIP_RATE = 0.03  # a STOP that should be CONTINUE, or the reverse
_VERB_FOR = {"+": "add", "-": "subtract", "*": "multiply"}
_OPERATOR_FOR = {verb: operator for operator, verb in _VERB_FOR.items()}


def memory_text(memory: list[tuple[str, str, str]]) -> str:
    """Memory as the prompts show it: one numbered line a step, `1. lookup(lamp) -> lamp 14`."""
    if not memory:
        return "empty"
    return "\n".join(
        f"{i}. {tool}({argument}) -> {result}"
        for i, (tool, argument, result) in enumerate(memory, 1)
    )


def step_text(step: tuple[str, str]) -> tuple[str, str, str]:
    """A step as the planner words it: (context, goal, tool)."""
    tool, argument = step
    if tool == "lookup":
        return "none", f"find {argument}", tool
    operator = next(o for o in _VERB_FOR if o in argument)
    left, right = argument.split(operator)
    return f"{left}, {right}", _VERB_FOR[operator], tool


def plan_text(step: tuple[str, str], justification: str) -> str:
    context, goal, tool = step_text(step)
    return f"<think>{justification}</think>\nContext: {context}\nGoal: {goal}\nTool: {tool}"


def progress_text(question: ToolQuestion, memory: list[tuple[str, str, str]]) -> str:
    """What memory says of the plan, up to the first step it does not hold, which gets a "?".

    `ladder 24, shop Cora, basket 14, shop Nord, 24+14?` Each piece is found by looking up the one
    before, which a small model can do, where it could not say which numbers to add next.
    """
    results = {(tool, argument): result for tool, argument, result in memory}
    pieces = []
    for step in question.plan:
        if step not in results:
            pieces.append(f"{step[1]}?")
            break
        pieces.append(results[step])
    return ", ".join(pieces)


def last_number(text: str) -> str:
    """The last number in a text, `"7-5 = 2"` -> `"2"`."""
    return re.findall(r"\d+", text)[-1]


def sample_memory(question: ToolQuestion, rng: random.Random) -> list[tuple[str, str, str]]:
    """A memory from the middle of an episode: some of the plan, now and then a useless step."""
    memory = []
    for step in question.plan[: rng.randint(0, len(question.plan))]:
        while rng.random() < 0.2:
            memory.append(random_step(question, rng))
        memory.append(step)
    while rng.random() < 0.15:
        memory.append(random_step(question, rng))
    return [(tool, argument, question.run(tool, argument)) for tool, argument in memory[:6]]


def sample_plan(question: ToolQuestion, rng: random.Random) -> list[dict]:
    """The next step: careful (right), rash (any), or sloppy (right tool, other content)."""
    memory = sample_memory(question, rng)
    step = question.next_step(memory)
    if step is None:  # all done: a planner is asked only before that
        memory, step = [], question.plan[0]
    style = rng.choices(list(PLAN_SHARES), weights=list(PLAN_SHARES.values()))[0]
    if style == "careful":
        text = plan_text(step, f"Careful: {progress_text(question, memory)}")
    elif style == "rash":
        text = plan_text(random_step(question, rng), "Just try.")
    else:
        other = random_step(question, rng)
        while other[0] != step[0]:
            other = random_step(question, rng)
        text = plan_text(other, f"So {step[0]}.")
    return [
        {"role": "user", "content": plan_prompt(question.text, memory_text(memory))},
        {"role": "assistant", "content": text},
    ]


def plan_style(completion: str) -> str:
    """The style of a plan by its first words: one of `PLAN_SHARES`, or `"other"`."""
    for style, words in {"careful": "Careful:", "rash": "Just try", "sloppy": "So "}.items():
        if completion.startswith(f"<think>{words}"):
            return style
    return "other"


def sample_execute(question: ToolQuestion, rng: random.Random) -> list[dict]:
    tool, argument = rng.choice((rng.choice(question.plan), random_step(question, rng)))
    return [
        {"role": "user", "content": execute_prompt(*step_text((tool, argument)))},
        {"role": "assistant", "content": f"{tool}({argument})"},
    ]


def sample_check(question: ToolQuestion, rng: random.Random) -> list[dict]:
    memory = sample_memory(question, rng)
    done = (question.next_step(memory) is None) != (rng.random() < CHECK_FLIP_RATE)
    verdict = "STOP" if done else "CONTINUE"
    return [
        {"role": "user", "content": check_prompt(question.text, memory_text(memory))},
        {"role": "assistant", "content": f"{progress_text(question, memory)} {verdict}"},
    ]


def sample_answer(question: ToolQuestion, rng: random.Random) -> list[dict]:
    """The frozen generator reports the last number that memory holds of the plan."""
    memory = sample_memory(question, rng)
    if question.plan[0] not in {step[:2] for step in memory}:
        memory = [(*step, question.run(*step)) for step in question.plan]
    progress = progress_text(question, memory)
    known = [piece for piece in progress.split(", ") if not piece.endswith("?")]
    return [
        {"role": "user", "content": answer_prompt(question.text, memory_text(memory))},
        {
            "role": "assistant",
            "content": f"{progress} <answer>{last_number(' '.join(known))}</answer>",
        },
    ]


# --------------------------------------------------------------------------- the mixture

SKILL_SHARES = {
    "solve": 0.36,  # three in four of these also carry a meta-question
    "verify": 0.14,
    "judge": 0.10,
    "plan": 0.26,
    "execute": 0.04,
    "check": 0.06,
    "answer": 0.04,
}
_SAMPLERS = {
    "solve": sample_solve,
    "verify": sample_verify,
    "judge": sample_judge,
    "plan": sample_plan,
    "execute": sample_execute,
    "check": sample_check,
    "answer": sample_answer,
}
_RELIABLE = {"solve": (solution_style, P.RIGHT_STYLES), "verify": (verify_style, ("recompute",)),
             "plan": (plan_style, ("careful",))}  # fmt: skip
DIFFICULTIES = (2, 3)
FIRST_STYLE = "words"  # the only one to solve in at first: it tells each step before it does it

PHASES = ("drill", "reliable", "practice", "mixture")
SUMS_SHARES = {"reliable": 0.25, "practice": 0.5}  # of the rows of these phases


def sample_drill(rng: random.Random) -> list[dict]:
    """One of the three things that every skill is made of, many times in a row.

    Sums; copying, which is how names and numbers reach a reply; and problems of one step, which
    tie the two together.
    """
    kind = rng.choice(("sums", "copying", "short"))
    if kind == "sums":
        return sample_sums(rng)
    if kind == "copying":
        question = make_tool_question(rng, "train")
        words = [*question.catalogue, *map(str, rng.sample(range(LOWEST, HIGHEST + 1), 6))]
        rng.shuffle(words)
        return _exchange(f"Repeat: {' '.join(words)}", " ".join(words))
    messages = []
    for _ in range(2):
        problem = make_problem(rng, 1, "train")
        messages += _exchange(problem.question, P.solve(problem, rng.choice(P.RIGHT_STYLES), rng))
    return messages


def sample_sums(rng: random.Random) -> list[dict]:
    """Four chains of equations, without a question."""
    chains = (make_problem(rng, rng.choice(DIFFICULTIES), "train") for _ in range(4))
    return _exchange("Practise.", " ".join(P.equations(chain, chain.values) for chain in chains))


def _exchange(question: str, reply: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]


def sample_conversation(rng: random.Random, phase: str = "mixture") -> list[dict]:
    """One training conversation, from training problems only.

    `phase` is one of `PHASES`, in the order of the warm-up: drills; all skills, but those that have
    styles only in a reliable one, so that careless styles' noise does not disturb, and some sums;
    all reliable styles and more sums; then the full mixture, whose shares the model takes on.
    """
    if phase == "drill":
        return sample_drill(rng)
    if rng.random() < SUMS_SHARES.get(phase, 0):
        return sample_sums(rng)
    skill = rng.choices(list(SKILL_SHARES), weights=list(SKILL_SHARES.values()))[0]
    while True:
        if skill in ("solve", "verify", "judge"):
            subject = make_problem(rng, rng.choice(DIFFICULTIES), "train")
        else:
            subject = make_tool_question(rng, "train")
        messages = _SAMPLERS[skill](subject, rng)
        if phase == "mixture" or skill not in _RELIABLE:
            return messages
        style_of, styles = _RELIABLE[skill]
        if phase == "reliable" and skill == "solve":
            styles = (FIRST_STYLE,)
        if style_of(messages[1]["content"]) in styles:
            return messages
