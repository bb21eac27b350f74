"""`grpo-kit`: the kit's commands. Everything heavy is imported inside a command, so that
`grpo-kit --help` answers at once.

A mistake of the user's ends in one sentence on stderr and exit code 2; a notebook that failed in
exit code 1. GRPO_KIT_DEBUG=1 shows the traceback instead of the sentence.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

NOTEBOOKS = Path("notebooks")
VARIANTS = {  # of `train`: the arm of the experiment `variants` that has its rewards
    "basic": "plain", "diversity": "diversity", "judge": "judge", "meta": "P(Yes), no labels"
}  # fmt: skip


class _Sentences(TyperGroup):
    """A group whose commands turn expected errors into one sentence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):  # these are RuntimeErrors too
            raise
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            if os.environ.get("GRPO_KIT_DEBUG") == "1":
                raise
            message = str(error) or type(error).__name__
            typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
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

Names = Annotated[
    list[str] | None,
    typer.Argument(help="Notebooks by name or number (01_basic_grpo, 01); all if none is given."),
]
PolicyFolder = Annotated[
    Path | None, typer.Option(help="Folder of a model, instead of the profile's policy.")
]
Folder = Annotated[Path, typer.Option("--notebooks", help="Folder with the notebooks.")]


@app.command()
def reproduce(
    names: Names = None,
    profile: Annotated[str, typer.Option(help="smoke, tiny, colab or paper.")] = "tiny",
    output: Annotated[Path, typer.Option(help="Folder for executed notebooks.")] = Path("runs"),
    notebooks: Folder = NOTEBOOKS,
    seed: Annotated[
        int | None, typer.Option(help="SEED of the notebooks, instead of their own.")
    ] = None,
    store: Annotated[
        bool, typer.Option("--store", help="Store the numbers among the reported results.")
    ] = False,
) -> None:
    """Execute every notebook and compare what they measured with the reported results.

    The executed copies and the reports go to a folder; exit code 1 if a notebook fails, a number
    lies outside the band of the reported seeds, or one cannot be compared.
    """
    from grpo_kit.course.runner import execute, find_notebooks

    found = find_notebooks(notebooks, names or ())
    results = execute(found, output, profile, {"SEED": seed} if seed is not None else None)
    ok = all(result.status == "ok" for result in results)

    from grpo_kit.lab import bands
    from grpo_kit.lab.report import write_report
    from grpo_kit.paths import results_dir

    executed = {r.notebook: r.seconds for r in results if r.status == "ok"}
    if store:
        for path in bands.store(output, executed, results_dir()):
            typer.echo(f"stored {path}")
    rows, problems = bands.compare(output, executed, profile)
    bands.show(rows, problems)
    ok = ok and not problems and all(row.inside for row in rows)
    problems += [f"notebook {r.notebook} {r.status}: {r.error}" for r in results if r.error]
    typer.echo(f"report: {write_report(output, notebooks=rows, problems=problems)}")
    raise typer.Exit(int(not ok))


@app.command("notebooks")
def notebooks_in_place(
    names: Names = None,
    output: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("runs/in_place"),
    notebooks: Folder = NOTEBOOKS,
) -> None:
    """Execute the notebooks in place.

    They run with their default parameters, and the outputs are fit to be committed.
    """
    from grpo_kit.course.runner import execute, find_notebooks

    results = execute(find_notebooks(notebooks, names or ()), output, in_place=True)
    raise typer.Exit(int(any(result.status != "ok" for result in results)))


@app.command()
def badges(notebooks: Folder = NOTEBOOKS) -> None:
    """Let badges and install cells lead to the repository that pyproject.toml names."""
    from grpo_kit.course.runner import find_notebooks, repository_of, set_repository

    found = find_notebooks(notebooks)
    repository = repository_of(Path(notebooks).resolve().parent)
    changed = set_repository(found, repository)
    typer.echo(f"{repository}: {len(changed)} of {len(found)} notebooks changed")


@app.command()
def train(
    profile: Annotated[str, typer.Option(help="smoke, tiny, colab or paper.")] = "tiny",
    policy: PolicyFolder = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with the task's rows, instead of the Hub.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling and data order.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of the profile's.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for history and checkpoints.")] = Path(
        "runs/train"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = (
        False
    ),
    variant: Annotated[str, typer.Option(help=f"The rewards: {', '.join(VARIANTS)}.")] = "basic",
    engine: Annotated[str, typer.Option(help="Whose trainer: kit or trl.")] = "kit",
    vllm: Annotated[
        str | None, typer.Option(help="TRL samples by vLLM: colocate or server.")
    ] = None,
    vllm_share: Annotated[
        float, typer.Option(help="Of a GPU, what vLLM takes beside the trainer (colocate).")
    ] = 0.3,
) -> None:
    """Train a policy by GRPO.

    The profile names policy and task, the variant the rewards beside accuracy and format. Several
    processes: `torchrun --nproc-per-node 2 -m grpo_kit.cli train --engine trl`.
    """
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}: choose one of {', '.join(VARIANTS)}")
    if engine not in ("kit", "trl"):
        raise ValueError(f"unknown engine {engine!r}: choose kit or trl")
    chosen, config = _choose(profile, policy, steps, output)

    if data is not None and chosen.task == "word_problems":
        raise ValueError(
            f"--data is {data}, and the word problems of profile {profile!r} come with the kit; "
            "leave it out, or choose --profile colab or paper"
        )
    chosen = dataclasses.replace(chosen, data=data and str(data))
    if vllm and engine != "trl":
        raise ValueError("--vllm is for TRL's trainer: add --engine trl, or leave it out")

    if engine == "kit" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "the kit's trainer is one process, and several have been launched: add --engine trl."
        )

    processes, sharded, options = 1, False, {}
    if engine == "trl":
        from grpo_kit import trl_bridge

        processes, sharded = trl_bridge.join(chosen.device), trl_bridge.is_sharded()
        options = trl_bridge.vllm_options(vllm, vllm_share) if vllm else {}
        made = trl_bridge.train
    else:
        from grpo_kit.training import train as made
    from grpo_kit.lab.experiments import EXPERIMENTS

    way = EXPERIMENTS["variants"].arms[VARIANTS[variant]]
    config = dataclasses.replace(config, **way.changes)
    if vllm and config.importance_sampling_cap is None:  # what vLLM samples, TRL scores otherwise
        config = dataclasses.replace(config, importance_sampling_cap=2.0)
    if chosen.device == "cuda":
        _check_room(
            dataclasses.replace(chosen, config=config),
            gpus=processes,
            engine={"colocate": "trl+vllm", "server": "trl+vllm-server"}.get(vllm, engine),
            sharded=sharded,
            vllm_share=vllm_share,
        )
    trained = chosen.load_policy()
    made(
        trained,
        chosen.load_task(),
        way.rewards(chosen, config, trained),
        config,
        output_dir=output,
        seed=seed,
        resume=resume,
        **options,
    )
    if os.environ.get("RANK", "0") == "0":
        from grpo_kit.models import save_policy

        if sharded:  # no process has all weights; TRL has gathered them for its last checkpoint
            saved = trl_bridge.last_checkpoint(output)
        else:
            saved = save_policy(trained, output / "policy")
        typer.echo(f"history: {output / 'history.jsonl'}, policy: {saved}")


def _check_room(profile: Any, **how: Any) -> None:
    """Refuse a run that its GPU has no room for, before anything is loaded."""
    import torch

    from grpo_kit.lab.planner import check_room

    if not torch.cuda.is_available():
        return  # `load_policy` says it
    gib = torch.cuda.mem_get_info()[0] / 2**30  # what a server on the same GPU has left
    check_room(profile, gib, **how)


@app.command()
def evaluate(
    policy: Annotated[
        str | None, typer.Option(help="Folder or Hub name, instead of the profile's policy.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="word_problems, gsm8k or math500; else the profile's.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with the task's rows, instead of the Hub.")
    ] = None,
    profile: Annotated[str, typer.Option(help="smoke, tiny, colab or paper.")] = "tiny",
    rows: Annotated[int | None, typer.Option(help="The first so many, instead of all.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Of an answer, instead of the profile's.")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="What samples: auto, plain, static, continuous or vllm.")
    ] = "auto",
    output: Annotated[Path, typer.Option(help="File for the numbers.")] = Path(
        "runs/evaluation.json"
    ),
) -> None:
    """Greedy accuracy on a whole test set, strict and lenient, with n and intervals."""
    import json

    from grpo_kit.paths import make_output_dir, write_atomic
    from grpo_kit.profiles import PROFILES

    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}: choose one of {', '.join(PROFILES)}")
    make_output_dir(output.parent)
    chosen = PROFILES[profile]
    if policy is not None:
        here = Path(policy).resolve()
        name = str(here) if here.is_dir() else policy
        chosen = dataclasses.replace(chosen, policy=name, revision=None, lora_rank=0)

    from grpo_kit.lab.evaluation import TESTS, exam

    name = task or chosen.task
    if name not in TESTS:
        raise ValueError(f"unknown task {name!r}: choose one of {', '.join(TESTS)}")
    load, grade = TESTS[name]
    asked = load(data)  # before the model: a missing folder is told at once
    found = exam(
        chosen.load_policy(),
        asked if rows is None else asked.select(range(min(rows, len(asked)))),
        grade,
        max_new_tokens=max_new_tokens or chosen.config.max_completion_length,
        backend=backend,
    )
    told = {"task": name, "policy": policy or chosen.policy, **found}
    write_atomic(output, json.dumps(told, indent=1) + "\n")
    for reading in ("strict", "lenient"):
        low, high = found[f"{reading}/low"], found[f"{reading}/high"]
        typer.echo(f"{reading:8} {found[reading]:.3f} [{low:.3f}, {high:.3f}]")
    typer.echo(f"n {found['n']}, cut off {found['truncated']:.1%}; {output}")


@app.command("plan")
def plan_run(
    profile: Annotated[str, typer.Option(help="smoke, tiny, colab or paper.")] = "paper",
    gpus: Annotated[int, typer.Option(help="How many.")] = 1,
    gpu: Annotated[str, typer.Option(help="T4, L4, A100-40, A100-80, H100 or H200.")] = "H100",
    engine: Annotated[
        str | None,
        typer.Option(
            help="kit, trl, trl+vllm or trl+vllm-server; by default the kit's on one GPU, else trl."
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Folder or Hub name, instead of the profile's policy.")
    ] = None,
    sharded: Annotated[
        bool, typer.Option("--sharded", help="Spread the weights over the GPUs (ZeRO-3, FSDP).")
    ] = False,
    vllm_share: Annotated[
        float, typer.Option(help="Of a GPU, what vLLM takes beside the trainer (trl+vllm).")
    ] = 0.3,
    price: Annotated[float | None, typer.Option(help="Of an hour of one GPU.")] = None,
    prompt_length: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 200,
    mean_share: Annotated[
        float, typer.Option(help="Mean length of a completion, as a share of the longest.")
    ] = 0.5,
    reached: Annotated[
        float | None, typer.Option(help="Share of the hardware's limits that is reached.")
    ] = None,
) -> None:
    """Count the memory, time and cost of a profile's run, before it is started.

    Exit code 1 where it does not fit.
    """
    from grpo_kit.lab.planner import REACHED, advice, plan, table
    from grpo_kit.profiles import PROFILES

    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}: choose one of {', '.join(PROFILES)}")
    chosen = PROFILES[profile]
    if policy is not None:
        chosen = dataclasses.replace(chosen, policy=policy, revision=None)
    made = plan(
        chosen,
        gpus=gpus,
        gpu=gpu,
        engine=engine or ("kit" if gpus == 1 else "trl"),
        sharded=sharded,
        vllm_share=vllm_share,
        prompt_length=prompt_length,
        mean_share=mean_share,
        reached=REACHED if reached is None else reached,
    )
    from rich.console import Console

    Console().print(table(made, price))
    typer.echo(advice(chosen, made))
    raise typer.Exit(int(made.room < 0))


def _choose(profile: str, policy: Path | None, steps: int | None, output: Path) -> tuple:
    """The profile and config that the options mean; the output folder is made, or refused."""
    from grpo_kit.paths import make_output_dir
    from grpo_kit.profiles import PROFILES

    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}: choose one of {', '.join(PROFILES)}")
    if steps is not None and steps < 1:
        raise ValueError(f"--steps is {steps}, it must be at least 1")
    if policy is not None and not policy.is_dir():
        raise ValueError(f"--policy is {policy}, which is no folder; give one with a saved model")
    make_output_dir(output)  # before the seconds that torch and the model take

    chosen = PROFILES[profile]
    if policy is not None:
        chosen = dataclasses.replace(chosen, policy=str(policy.resolve()))
    config = chosen.config
    if steps is not None:
        config = dataclasses.replace(config, max_steps=steps)
    return chosen, config


def _cores() -> int:
    """CPU cores that this process may use, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@app.command()
def run(
    name: Annotated[
        str,
        typer.Argument(
            help="basic, variants, diversity, judge, verification, meta, flow, engines, or "
            "published (real models)."
        ),
    ],
    seeds: Annotated[str, typer.Option(help="Seeds: 0-4, or 0,2,5-7.")] = "0-4",
    profile: Annotated[str, typer.Option(help="smoke, tiny, colab or paper.")] = "tiny",
    arm: Annotated[
        list[str] | None, typer.Option(help="Only this arm; may be given again.")
    ] = None,
    claims: Annotated[
        bool, typer.Option("--claims", help="Only the arms whose runs test published claims.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(help="Runs at a time; one a CPU core, one on a GPU.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of results, instead of the reported ones.")
    ] = None,
    work: Annotated[Path, typer.Option(help="Folder for checkpoints and logs.")] = Path(
        "runs/grid"
    ),
) -> None:
    """Make the runs of an experiment, arms by seeds, one result file each.

    Finished runs are not made again unless their config has changed, killed ones go on.
    """
    from grpo_kit.paths import make_output_dir, results_dir

    results = make_output_dir(output or results_dir())  # before the seconds that torch takes
    make_output_dir(work)

    from grpo_kit.lab.claims import arms_with_claims
    from grpo_kit.lab.experiments import EXPERIMENTS
    from grpo_kit.lab.grid import parse_seeds, run_grid
    from grpo_kit.lab.summary import summarise, summary_text
    from grpo_kit.profiles import PROFILES

    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}: choose among {', '.join(EXPERIMENTS)}")
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}: choose one of {', '.join(PROFILES)}")
    if processes is not None and processes < 1:
        raise ValueError(f"--processes is {processes}, it must be at least 1")
    if claims and arm:
        raise ValueError("--claims chooses the arms: leave out --arm, or --claims.")
    if claims:
        arm = arms_with_claims(name, profile)
    chosen = PROFILES[profile]
    if processes is None:
        processes = _cores() if chosen.device == "cpu" else 1
    if chosen.threads:
        import torch

        torch.set_num_threads(chosen.threads)
    options = ["--profile", profile, "--output", str(results), "--work", str(work)]
    records = run_grid(
        name,
        EXPERIMENTS[name],
        chosen,
        parse_seeds(seeds),
        results=results,
        work=work,
        arms=arm,
        processes=processes,
        command=[sys.executable, "-m", "grpo_kit.cli", "run", name, *options],
    )
    typer.echo(summary_text(summarise(records, EXPERIMENTS[name])))


@app.command()
def report(
    output: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("runs"),
    results: Annotated[
        Path | None, typer.Option(help="Folder of results, instead of the reported ones.")
    ] = None,
    claims: Annotated[
        Path | None, typer.Option(help="File of claims, instead of the shipped one.")
    ] = None,
) -> None:
    """Judge the claims by the stored results; a Markdown file and an HTML page."""
    from grpo_kit.lab.report import write_report
    from grpo_kit.paths import make_output_dir

    make_output_dir(output)
    typer.echo(f"report: {write_report(output, results=results, claims=claims)}")


@app.command()
def results(
    readme: Annotated[Path, typer.Option(help="The README to write tables into.")] = Path(
        "README.md"
    ),
) -> None:
    """Renew all that is computed from the reported results.

    Tables and figures of the README and the report beside the results.
    """
    from grpo_kit.lab.readme import write_results

    for path in write_results(readme):
        typer.echo(f"wrote {path}")


@app.command()
def skill_runs(
    profile: Annotated[str, typer.Option(help="smoke or tiny.")] = "tiny",
    policy: PolicyFolder = None,
    steps: Annotated[int, typer.Option(help="GRPO steps a skill.")] = 40,
    skill: Annotated[
        list[str] | None, typer.Option(help="Only this skill; may be given again.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for runs and summary.")] = Path(
        "runs/skills"
    ),
) -> None:
    """Try GRPO on each skill of a tiny base, before and after.

    What it takes to call a base good; solve, verify, tool plans, label-free P("Yes"), a judge.
    """
    chosen, config = _choose(profile, policy, steps, output)

    from grpo_kit.lab.skill_runs import SKILLS, run_skills, skills_text

    typer.echo(skills_text(run_skills(chosen, config, output, names=skill or SKILLS)))


@app.command()
def pretrain(
    output: Annotated[Path, typer.Option(help="Folder for the checkpoint.")] = Path("runs/base"),
    seed: Annotated[int, typer.Option(help="Seed of weights and texts.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of the recipe's.")] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes, instead of the recipe's.")
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of each process.")] = 1,
    problems: Annotated[int, typer.Option(help="Test problems a skill is measured on.")] = 256,
) -> None:
    """Rebuild the tiny base model and measure its skills."""
    if problems < 2:
        raise ValueError(f"--problems is {problems}, it must be at least 2")
    from grpo_kit.paths import make_output_dir

    make_output_dir(output)

    from grpo_kit.tiny.pretrain import pretrain as run

    warm_up = run(output, seed=seed, steps=steps, processes=processes, threads=threads)

    import json

    from grpo_kit.models import load_policy
    from grpo_kit.paths import write_atomic
    from grpo_kit.tiny.card import card_text, measure

    typer.echo("measuring the skills")
    table = measure(load_policy(output), n=problems)
    write_atomic(output / "card.json", json.dumps({"warm_up": warm_up, "skills": table}, indent=1))
    write_atomic(output / "README.md", card_text(table, warm_up))
    typer.echo(f"the model card is {output / 'README.md'}")


@app.command()
def bench(
    policy: Annotated[
        Path | None, typer.Option(help="Folder of the model to train, instead of the tiny base.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the numbers.")] = Path("runs/bench"),
    steps: Annotated[int, typer.Option(help="Measured steps of each trainer.")] = 10,
    quick: Annotated[bool, typer.Option("--quick", help="Small batches, for a first look.")] = (
        False
    ),
    scaling: Annotated[
        bool, typer.Option("--scaling", help="How a step's cost grows: models, groups, lengths.")
    ] = False,
) -> None:
    """Measure the kit's step beside TRL's, and the memory of the loss step."""
    from grpo_kit.paths import data_dir, make_output_dir

    policy = policy or data_dir() / "tiny-base"
    if not policy.is_dir():
        raise ValueError(f"--policy is {policy}, which is no folder; give one with a saved model")
    make_output_dir(output)

    if scaling:
        from grpo_kit.lab.scaling import report, run

        typer.echo(report(run(output, quick)))
        return

    from grpo_kit.lab.bench import report, run

    typer.echo(report(run(output, policy, steps=steps, quick=quick)))


if __name__ == "__main__":
    app()
