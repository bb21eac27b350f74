"""`grpo-kit`: the commands. Each imports heavy modules itself, so that `--help` answers at once.

A user's mistake ends in one sentence on stderr and exit code 2, a notebook that failed in exit
code 1. GRPO_KIT_DEBUG=1 shows the traceback instead of the sentence.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from typer import Argument, Option
from typer.core import TyperGroup

from grpo_kit.config import FULL
from grpo_kit.paths import data_dir, make_output_dir, results_dir, write_atomic
from grpo_kit.profiles import PROFILES, Profile
from grpo_kit.visible import shortened, visible

EXPECTED = (typer.BadParameter, ValueError, TypeError, RuntimeError, OSError, ImportError)


class _Sentences(TyperGroup):
    """A group whose commands turn expected errors into one sentence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):  # these are RuntimeErrors too
            raise
        except KeyboardInterrupt:
            goes_on = "`train` goes on with --resume, any other command does what is missing"
            typer.echo(f"interrupted. What is stored is kept: {goes_on}.", err=True)
            raise typer.Exit(130) from None
        except EXPECTED as error:
            if os.environ.get("GRPO_KIT_DEBUG") == "1":
                raise
            usage = isinstance(error, typer.BadParameter)
            message = error.format_message() if usage else str(error) or type(error).__name__
            if any(sign in message for sign in FULL):  # torch goes on for a screenful
                remedy = "run fewer at once, or a smaller profile; `grpo-kit plan` counts the need."
                message = f"{message.partition(' Process ')[0].rstrip('.')}: {remedy}"
            typer.secho(
                visible(shortened(f"error: {message}"), newline="\n"), fg=typer.colors.RED, err=True
            )
            raise typer.Exit(2) from None


# Plain help and plain tracebacks: rich would cost a third of the start-up time.
app = typer.Typer(
    cls=_Sentences,
    help="GRPO, from scratch to scale: run the notebooks, train, measure, rebuild the base.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# The options that several commands have.
Names = Annotated[list[str] | None, Argument(help="Notebooks, by name or number; else all.")]
Notebooks = Annotated[Path, Option(help="Folder with the notebooks.")]
ProfileName = Annotated[Literal[tuple(PROFILES)], Option(help="Machine, policy, task, settings.")]
PolicyName = Annotated[str | None, Option(help="Folder or Hub name, instead of the profile's.")]
Data = Annotated[str | None, Option(help="Your rows: a jsonl, csv or parquet file, a folder that "
                                         "`datasets` reads, or a Hub name.")]  # fmt: skip
Test = Annotated[str | None, Option(help="A file of rows to test on, instead of a share.")]
Share = Annotated[float, Option("--test-share", help="Of your rows, held out to test on.")]
Settings = Annotated[list[str] | None, Option("--set", help="NAME=VALUE of the config; repeat it.")]
Output = Annotated[Path, Option(help="Folder for the output.")]
Results = Annotated[Path | None, Option(help="Folder of results, instead of the reported ones.")]
Steps = Annotated[int | None, Option(min=1, help="Steps, instead of the profile's or recipe's.")]
Seed = Annotated[int, Option(min=0, max=2**32 - 1, help="Of sampling, weights, order of data.")]
Correct = Annotated[str, Option(help="The reward that is 1 for what is right: as --reward.")]
Processes = Annotated[int | None, Option(min=1, help="Processes at a time.")]
Minutes = Annotated[float, Option(min=0, help="To spend.")]
Gpu = Literal["T4", "L4", "A100-40", "A100-80", "H100", "H200"]
Jobs = Annotated[int | None, Option(min=1, help="Notebooks at a time. [default: 2, of one core 1]")]


def _chosen(
    name: str, policy: str | None = None, data: str | None = None, test: str | None = None,
    test_share: float = 0.2,
) -> Profile:  # fmt: skip
    """The profile of that name, with its own or another policy, and with its own or other rows."""
    chosen = PROFILES[name]
    if policy is not None:
        folder = Path(policy)
        local = "/" not in policy or folder.parent.is_dir()
        if local and not folder.is_dir() and policy != chosen.policy:
            problem = f"--policy is {policy!r}, but there is no folder {policy!r}"
            raise ValueError(f"{problem}; a name on the Hub is OWNER/NAME.")
        chosen = chosen.with_policy(str(folder.resolve()) if folder.is_dir() else policy)
    if data is not None:
        return chosen.with_data(data, test, test_share)
    if test is not None:
        raise ValueError("--test are rows beside those of --data: give both, or leave it out.")
    return chosen


def _settings(texts: list[str] | None) -> dict[str, Any]:
    """Texts NAME=VALUE as fields of the config; the values are read as YAML.

    Raises ValueError for a text of another form.
    """
    fields = {}
    for text in texts or ():
        name, sign, value = text.partition("=")
        try:
            fields[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            sign = ""
        if not sign:
            raise ValueError(f"--set is {text!r}: give NAME=VALUE, such as learning_rate=1e-5.")
    return fields


@app.command()
def reproduce(
    names: Names = None,
    profile: ProfileName = "tiny",
    output: Output = Path("runs"),
    notebooks: Notebooks = Path("notebooks"),
    seed: Annotated[int | None, Option(help="SEED of the notebooks, instead of theirs.")] = None,
    store: Annotated[bool, Option("--store", help="Store the numbers as reported ones.")] = False,
    jobs: Jobs = None,
) -> None:
    """Execute every notebook and compare what they measured with the reported results.

    The executed copies and the reports go to a folder; exit code 1 if a notebook fails, a number
    lies outside the band around the reported one, or one cannot be compared.
    """
    from grpo_kit.course.runner import execute, find_notebooks
    from grpo_kit.lab import bands
    from grpo_kit.lab.report import write_report

    paths = find_notebooks(notebooks, names or ())
    options = {"parameters": None if seed is None else {"SEED": seed}}
    results = execute(paths, output, profile, jobs=jobs, **options)
    executed = {r.notebook: r.seconds for r in results if not r.error}
    if store:
        for path in bands.store(output, executed, results_dir()):
            typer.echo(f"stored {path}")
    rows, problems = bands.compare(output, executed, profile)
    bands.show(rows, problems)
    problems += [f"notebook {r.notebook} failed: {r.error}" for r in results if r.error]
    problems += [f"outside: {row.notebook}, {row}" for row in rows if not row.inside]
    typer.echo(f"report: {write_report(output, problems=problems)}")
    raise typer.Exit(int(bool(problems)))


@app.command("notebooks")
def notebooks_in_place(
    names: Names = None,
    output: Output = Path("runs/in_place"),
    notebooks: Notebooks = Path("notebooks"),
    jobs: Jobs = None,
) -> None:
    """Execute the notebooks in place, with outputs fit to be committed."""
    from grpo_kit.course.runner import execute, find_notebooks

    paths = find_notebooks(notebooks, names or ())
    results = execute(paths, output, in_place=True, jobs=jobs)
    raise typer.Exit(int(any(result.error for result in results)))


@app.command()
def train(
    profile: ProfileName = "tiny",
    policy: PolicyName = None,
    data: Data = None,
    test: Test = None,
    test_share: Share = 0.2,
    reward: Annotated[
        list[str] | None, Option(help="FILE.py:NAME, or a name such as accuracy; repeat it.")
    ] = None,
    correct: Correct = "accuracy",
    settings: Settings = None,
    seed: Seed = 0,
    steps: Steps = None,
    output: Output = Path("runs/train"),
    resume: Annotated[bool, Option("--resume", help="Go on from the last checkpoint.")] = False,
    engine: Annotated[Literal["kit", "trl"], Option(help="Whose trainer.")] = "kit",
    device: Annotated[Literal["cpu", "cuda", "mps"] | None, Option(help="To train on.")] = None,
    replay: Annotated[bool, Option("--replay", help="Record what `replay` shows.")] = False,
) -> None:
    """Train a policy by GRPO.

    The profile names policy, task and settings. Your own rewards, rows and model take their places.
    Several processes: `torchrun --nproc-per-node 2 -m grpo_kit.cli train --engine trl`. The other
    methods: `grpo-kit run`.
    """
    changes = _settings(settings) | ({"max_steps": steps} if steps else {})
    chosen = _chosen(profile, policy, data, test, test_share).with_config(**changes)
    make_output_dir(output)  # before the seconds that torch and the model take
    if not resume and (saved := sorted(output.glob("checkpoint*"))):
        remedy = "go on with it (--resume), delete it, or give another --output"
        raise ValueError(f"{output} holds a run, see its {saved[0].name}: {remedy}.")
    if replay and engine == "trl":
        raise ValueError("--replay is for the kit's trainer: leave out --engine trl.")
    if engine == "kit" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("the kit's trainer runs in one process: add --engine trl for several.")
    from grpo_kit.lab.ideas import load_function
    from grpo_kit.models import save_policy

    chosen = replace(chosen, device=device or chosen.device)
    chosen.use_threads()
    options = {"output_dir": output, "seed": seed, "resume": resume}
    options["correct"] = load_function(correct)
    rewards = [load_function(name) for name in reward or ("accuracy", "format")]
    rows = chosen.load_task()  # before the model: a folder may be missing
    if engine == "kit":
        from grpo_kit import training as trainer
        from grpo_kit.course.replay import Recorder

        options |= {"record": Recorder(output)} if replay else {}
    else:
        from grpo_kit import trl_bridge as trainer

        trainer.join(chosen.device)
    model = chosen.load_policy()
    trainer.train(model, rows, rewards, chosen.config, **options)
    if os.environ.get("RANK", "0") == "0":  # the first of several processes
        saved = save_policy(model, output / "policy")
        typer.echo(f"history: {output / 'history.jsonl'}, policy: {saved}")
    if engine == "trl":
        trainer.leave()


@app.command()
def compare(
    idea: Annotated[Path, Argument(help="A Python file that defines `arms`.")],
    profile: ProfileName = "tiny",
    policy: PolicyName = None,
    data: Data = None,
    test: Test = None,
    test_share: Share = 0.2,
    settings: Settings = None,
    seeds: Annotated[str, Option(help="Seeds, as 0,2,5-7.")] = "0-4",
    metric: Annotated[str, Option(help="Of the finished run; more is better.")] = "eval/pass@1",
    delta: Annotated[float, Option(help="The smallest difference that matters.")] = 0.03,
    correct: Correct = "accuracy",
    processes: Processes = None,
    output: Output = Path("runs/compare"),
) -> None:
    """Does my change help? Train each arm of a file with several seeds and judge the difference.

    `arms` is a dict: name -> rewards, hooks and changes to the config, the baseline first. The
    same command goes on after a kill.
    """
    changes = _settings(settings)
    chosen = _chosen(profile, policy, data, test, test_share).with_config(**changes)
    folder = make_output_dir(output)
    from grpo_kit.lab import compare
    from grpo_kit.lab.grid import parse_seeds
    from grpo_kit.lab.ideas import load_arms, load_function

    chosen.use_threads()
    found = compare(
        load_arms(idea), profile=chosen, seeds=parse_seeds(seeds), metric=metric, delta=delta,
        output_dir=folder, processes=processes, correct=load_function(correct),
    )  # fmt: skip
    write_atomic(folder / "comparison.md", found.table())
    found.plot().savefig(folder / "comparison.png", dpi=120)
    typer.echo(f"{found.table()}\ncurves: {folder / 'comparison.png'}")


@app.command()
def evaluate(
    policy: PolicyName = None,
    task: Annotated[str | None, Option(help="word_problems, svamp or gsm8k.")] = None,
    data: Data = None,
    test: Test = None,
    test_share: Share = 0.2,
    correct: Correct = "accuracy",
    profile: ProfileName = "tiny",
    rows: Annotated[int | None, Option(min=1, help="The first so many, instead of all.")] = None,
    max_new_tokens: Annotated[int | None, Option(min=1, help="Of an answer.")] = None,
    output: Annotated[Path, Option(help="File for the numbers.")] = Path("runs/evaluation.json"),
) -> None:
    """Greedy accuracy on a whole test set, strict and lenient, with n and intervals.

    Or by a measure of your own. Of --data it takes the rows that `train` holds out; --task says
    which system prompt comes before them.
    """
    if output.is_dir():
        raise typer.BadParameter(f"{output} is a folder; name a file for the numbers (--output).")
    make_output_dir(output.parent)
    from grpo_kit.lab.evaluation import evaluate_profile, in_words
    from grpo_kit.lab.ideas import load_function

    chosen = _chosen(profile, policy, data, test, test_share)
    if policy is not None:
        chosen = replace(chosen, lora_rank=0)
    chosen.use_threads()
    options = {"rows": rows, "max_new_tokens": max_new_tokens, "correct": load_function(correct)}
    measured = evaluate_profile(chosen, task, **options)
    write_atomic(output, json.dumps(measured, indent=1) + "\n")
    typer.echo(f"{in_words(measured)}; {output}")


@app.command("plan")
def plan_run(
    profile: ProfileName = "paper",
    gpu: Annotated[Gpu, Option(help="The GPU that it runs on.")] = "H100",
    policy: PolicyName = None,
) -> None:
    """Count the memory that a profile's run by the kit's trainer takes, before it is started.

    Exit code 1 where it does not fit. `accelerate estimate-memory MODEL` is for other models.
    """
    from grpo_kit.lab.planner import plan

    needed = plan(_chosen(profile, policy), gpu)
    for part, gib in needed.memory.items():
        typer.echo(f"{part:21} {gib:6.2f} GiB")
    if PROFILES[profile].device == "cpu":
        typer.echo(f"{needed.total:.1f} GiB of main memory: this profile runs on a CPU.")
        raise typer.Exit()
    typer.echo(needed)
    raise typer.Exit(int(needed.total > needed.has))


@app.command()
def run(
    name: Annotated[str, Argument(help="Such as basic or dial/updates; a wrong name lists all.")],
    seeds: Annotated[str | None, Option(help="Seeds, as 0,2,5-7. [default: 100-104 on tiny, else "
                                             "0-4; with --claims those that decide]")] = None,
    profile: ProfileName = "tiny",
    arm: Annotated[list[str] | None, Option(help="Only this arm; may be given again.")] = None,
    claims: Annotated[bool, Option("--claims", help="Only arms that test claims.")] = False,
    processes: Processes = None,
    output: Results = None,
    work: Annotated[Path, Option(help="Folder for checkpoints and logs.")] = Path("runs/grid"),
) -> None:  # fmt: skip
    """Make the runs of an experiment, arms by seeds, one result file each.

    Finished runs are not made again unless their config has changed, killed ones go on.
    """
    folders = output or results_dir(), work  # made before the seconds that torch takes
    results, work = (make_output_dir(folder).resolve() for folder in folders)
    from grpo_kit.lab import grid
    from grpo_kit.lab.claims import planned
    from grpo_kit.lab.experiments import EXPERIMENTS
    from grpo_kit.lab.summary import summarise, summary_text

    name = name.replace("dial/", "dial-")
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}: choose among {', '.join(EXPERIMENTS)}")
    if claims and arm:
        raise ValueError("--claims chooses the arms: leave out --arm, or --claims.")
    chosen = _chosen(profile)
    chosen.use_threads()
    given = grid.parse_seeds(seeds) if seeds else None
    plan = [(arm, grid.usual_seeds(profile))]
    if claims:
        plan = [([one], own) for one, own in planned(name, profile).items()]
    where = {"processes": processes or grid.usual_processes(chosen)}
    where |= {"results": results, "work": work}
    records = []
    for arms, usual in plan:
        made = grid.run_grid(name, EXPERIMENTS[name], chosen, given or usual, arms=arms, **where)
        records += made
    typer.echo(summary_text(summarise(records, EXPERIMENTS[name])))


@app.command()
def doctor(
    path: Annotated[Path, Argument(help="A run's folder (ours or TRL's), its log, or a CSV.")],
) -> None:
    """Say from a run's log what is healthy about it and what is not; it needs no model.

    Exit code 1 where it is sick.
    """
    from grpo_kit.course import doctor

    rows = doctor.read_log(path)
    findings = doctor.diagnose(rows)
    typer.echo(visible(doctor.in_words(findings, rows), newline="\n"))
    raise typer.Exit(int(not doctor.is_healthy(findings)))


@app.command()
def replay(
    path: Annotated[Path, Argument(help="Folder of a run that was recorded.")],
    page: Annotated[Path | None, Option(help="File, instead of the folder's replay.html.")] = None,
) -> None:
    """Make one HTML file to drag through a run: its groups, token by token; it needs no model.

    The run must have been recorded, by `grpo-kit train --replay` or `train(..., record=...)`.
    """
    from grpo_kit.course.replay import page as page_of

    content = page_of(path)
    make_output_dir(page.parent if page else path)
    write_atomic(page or path / "replay.html", content)
    typer.echo(f"replay: {page or path / 'replay.html'}")


@app.command()
def results() -> None:
    """Compute the tables, figures and verdicts of `data/results` from the stored runs."""
    from grpo_kit.lab.report import write_results

    typer.echo(f"wrote {write_results()}")


@app.command()
def pretrain(
    base: Annotated[Literal["tiny", "smollm2"], Option(help="Which model.")] = "tiny",
    task: Annotated[
        Literal["svamp", "skills", "gsm8k"] | None,
        Option(help="Warm SmolLM2 up with these texts. [its default: svamp]"),
    ] = None,
    output: Output = Path("runs/base"),
    seed: Seed = 0,
    steps: Steps = None,
) -> None:
    """Rebuild the tiny base, or a warm-up of SmolLM2."""
    options = {"seed": seed} if steps is None else {"seed": seed, "steps": steps}
    if task or base == "smollm2":
        from grpo_kit.warm_up import warm_up

        PROFILES["smol"].use_threads()
        card = warm_up(task or "svamp", output, **options)
        typer.echo(json.dumps(card["evaluations"][-1]))
        return
    from grpo_kit.tiny.pretrain import pretrain

    write_atomic(output / "card.json", json.dumps(pretrain(output, **options), indent=1) + "\n")
    typer.echo(f"what it solves: grpo-kit evaluate --policy {output} --task word_problems")


@app.command()
def bench(
    output: Output = Path("runs/bench"),
    steps: Annotated[int, Option(min=1, help="Measured steps of each trainer.")] = 10,
) -> None:
    """Measure the time and the memory of the kit's step beside TRL's."""
    from grpo_kit.lab import bench

    typer.echo(bench.report(bench.run(output, data_dir() / "tiny-base", steps=steps)))


@app.command()
def gpu(minutes: Minutes = 9.0, output: Results = None) -> None:
    """Show what a GPU can do: the jobs that are missing, as many as the minutes allow."""
    from grpo_kit.lab import gpu

    folder = output or (results_dir() / "gpu" if gpu.ON_GPU else Path("runs/gpu"))
    for line in gpu.run(minutes, folder):
        typer.echo(line)
    typer.echo(f"page: {gpu.write_page(folder)}")


if __name__ == "__main__":
    app()
