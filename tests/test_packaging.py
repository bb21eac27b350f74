"""The wheel: it carries the data, and trains from a folder that is not the checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parents[1]


def run(*command: object, cwd: Path, limit: float = 600) -> str:
    """Output of a command that has to succeed, and is not told where the checkout is."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    options = {"capture_output": True, "text": True, "timeout": limit}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, **options)
    assert done.returncode == 0, f"{command} failed\n{done.stdout}{done.stderr}"
    return done.stdout


def make_environment(folder: Path) -> tuple[Path, Path]:
    """Scripts and packages folders of a fresh environment."""
    venv.create(folder, with_pip=False)
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return scripts, Path(run(scripts / "python", "-c", code, cwd=folder).strip())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder)
    run(*build, CHECKOUT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_carries_the_data_and_the_package_and_no_tests(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    known = ("ls-files", "--cached", "--others", "--exclude-standard", "data")
    kept = run("git", *known, cwd=CHECKOUT).split()  # `make gpu` leaves a large warm-up beside them
    assert kept, "the checkout has no data"
    for path in kept:
        assert Path("grpo_kit/_data", Path(path).relative_to("data")).as_posix() in names
    assert "grpo_kit/cli.py" in names and "grpo_kit/_data/claims.yaml" in names
    assert "grpo_kit/course/templates/replay.html.j2" in names
    assert not [name for name in names if name.startswith(("tests/", "data/", "notebooks/"))]


@pytest.mark.slow
def test_the_installed_wheel_trains_the_shipped_base_from_another_folder(wheel, tmp_path):
    scripts, site = make_environment(tmp_path / "environment")
    # Torch and its like are borrowed, since installing them takes minutes. A folder named in a .pth
    # does not get its own .pth files read, so an editable checkout there stays out of reach.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", scripts / "python")
    run(*pip, "install", "--no-deps", "--no-index", "--force-reinstall", wheel, cwd=tmp_path)
    command = (scripts / "grpo-kit", "train", "--profile", "smoke", "--steps", 2)
    run(*command, "--output", "out", cwd=tmp_path, limit=1200)
    rows = [json.loads(line) for line in (tmp_path / "out/history.jsonl").open()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    code = "import grpo_kit.paths as p; print(p.__file__, p.data_dir())"
    for place in run(scripts / "python", "-c", code, cwd=tmp_path).split():
        assert Path(place).is_relative_to(site), f"{place} is not from the wheel"


# Colab's own, which an installation of the kit must not replace.
COLAB = {"torch": "2.9.0", "numpy": "2.0.2", "pandas": "2.2.2", "scipy": "1.16.3",
         "matplotlib": "3.10.0", "datasets": "4.0.0"}  # fmt: skip


def test_constraints_pin_every_dependency_and_ranges_hold_colabs_versions():
    text = (CHECKOUT / "constraints.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)  # a line that is no plain pin fails here
    assert pins["torch"] == "2.13.0"
    assert "://" not in text and "+" not in "".join(pins.values())

    pins = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11", "hashlib.file_digest is no older"
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    for line in project["dependencies"] + extras:
        requirement = Requirement(line)
        pinned = pins.get(canonicalize_name(requirement.name))
        assert pinned, f"{requirement.name} is not in constraints.txt"
        for version in (pinned, COLAB.get(requirement.name, pinned)):
            assert requirement.specifier.contains(version), f"{line} does not allow {version}"
