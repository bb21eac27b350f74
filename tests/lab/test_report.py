"""What the report says: what the records say, whatever else lies in their folder, and offline."""

import base64
import re
from html import unescape
from html.parser import HTMLParser

import matplotlib
import pytest

from grpo_kit.lab.bands import Row
from grpo_kit.lab.claims import judge_claims, load_claims
from grpo_kit.lab.experiments import EXPERIMENTS
from grpo_kit.lab.records import load
from grpo_kit.lab.report import HEADINGS, MANY, context, draw, number, write_report

CLAIMS = """
- {id: up, statement: Unlike answers are right more often., experiment: diversity, arm: diversity,
   against: plain, metric: eval/pass@1, expects: rises, source: some paper, evidence: F,
   printed: {GSM8K: [30, 45.5], MATH: [10, 12]}}
- {id: down, statement: They are right less often., experiment: diversity, arm: diversity,
   against: plain, metric: eval/pass@1, expects: falls}
- {id: even, statement: They are as sure., experiment: diversity, arm: diversity,
   against: plain, metric: entropy, expects: rises}
- {id: exact, statement: A share | of it., experiment: diversity, arm: plain,
   metric: eval/pass@1, expects: {value: 0.4, within: 0.1}}
- {id: elsewhere, statement: So it is on a GPU., experiment: flow, arm: trajectory,
   profile: paper, metric: eval/pass@1, expects: rises}
"""
WRONG = """
- {id: lost, statement: s, experiment: nonsense, arm: plain, metric: entropy, expects: rises}
- {id: unmeasured, statement: s, experiment: diversity, arm: plain, metric: joy, expects: rises}
"""
FLOW = {"experiment": "flow", "evaluator": EXPERIMENTS["flow"].evaluator}


@pytest.fixture(scope="session")
def write_runs(five):
    records = five([0.4, 0.41, 0.42, 0.43, 0.44], [0.6, 0.613, 0.626, 0.639, 0.652])
    return lambda folder: [record.write(folder) for record in records]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, write_runs):
    folder = tmp_path_factory.mktemp("inputs")
    write_runs(folder / "results")
    (folder / "claims.yaml").write_text(CLAIMS)
    return folder


@pytest.fixture(scope="module")
def written(inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return write_report(folder, inputs / "results", inputs / "claims.yaml")


@pytest.fixture(scope="module")
def page(written):
    return both(written)[0]


@pytest.fixture(scope="module")
def markdown(written):
    return both(written)[1]


class Page(HTMLParser):
    """Tags, attributes and whether each tag is closed in turn."""

    VOID = {"meta", "link", "img", "source", "br", "hr", "wbr", "input"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> at {self.getpos()}"


def text_of(html: str) -> str:
    return unescape(re.sub("<[^>]+>", "", html))


def both(page) -> tuple[str, str]:
    """The page and the Markdown beside it."""
    return page.read_text(), page.with_suffix(".md").read_text()


def test_verdicts_and_numbers_are_those_of_the_records(inputs, page, markdown):
    claims, _ = load_claims(inputs / "claims.yaml")
    judged, _ = judge_claims(claims, load(inputs / "results")[0])
    assert {one.claim.id: one.verdict for one in judged} == {
        "up": "reproduced", "down": "contradicted", "even": "no effect", "exact": "reproduced",
        "elsewhere": "not run here",
    }  # fmt: skip
    assert set(HEADINGS) == set(EXPERIMENTS)
    for one in judged:
        row = next(row for row in page.split("<tr>") if one.claim.statement in row)
        assert f">{one.verdict}</b>" in row
        statement = one.claim.statement.replace("|", "\\|")
        line = next(line for line in markdown.splitlines() if statement in line)
        assert f"**{one.verdict}**" in line
        if judgement := one.judgement:
            numbers = (getattr(judgement, name) for name in ("mean", "low", "high"))
            mean, low, high = (number(value, "+") for value in numbers)
            for text in (row, line):
                assert f"{mean} [{low}, {high}]" in text and "5 seeds" in text
                assert f"sd {number(judgement.sd)}, power " in text and one.claim.number in text
        else:
            assert one.claim.command in text_of(row) and f"`{one.claim.command}`" in line
    for text in (text_of(page), markdown):
        assert "+0.206 [+0.2, +0.212]" in text
        assert "GSM8K: 30 → 45.5" in text and "0.4 ± 0.1" in text and "some paper" in text
    assert re.findall(r"<b>(\d+)</b> ([a-z ]+)</li>", page) == [
        ("2", "reproduced"), ("1", "contradicted"), ("1", "no effect"), ("0", "inconclusive"),
        ("1", "not run here"),
    ]  # fmt: skip


def test_a_panel_has_values_cost_settings_and_its_command(page, markdown):
    for text in (text_of(page), markdown):
        assert EXPERIMENTS["diversity"].question in text
        assert "0.42 [0.4, 0.44]" in text and "0.626 [0.6, 0.652]" in text
        assert "grpo-kit run diversity --profile tiny --seeds 0-4" in text
        assert "a processor" in text and "0123456" in text and "0123456789ab" not in text
        assert "torch 2.13.0" in text
    assert "| tokens | 200 [200, 200] |" in markdown and "| seconds | 5 [5, 5] |" in markdown
    assert "<strong>accuracy_reward, diversity</strong>" in page
    assert "learning_rate" not in page, "the same for all arms"
    assert "+0.206 [+0.2, +0.212]</td>" in page.split("minus plain, paired by seed")[1]


def test_arms_with_more_seeds_have_a_command_of_their_own(tmp_path, make_record, write_runs):
    write_runs(tmp_path)
    make_record("plain", 5, 0.45).write(tmp_path)
    (panel,) = context(tmp_path)["panels"]
    assert panel["commands"] == [
        'grpo-kit run diversity --profile tiny --seeds 0-5 --arm "plain"',
        'grpo-kit run diversity --profile tiny --seeds 0-4 --arm "diversity"',
    ]


def test_a_figure_is_drawn_for_page_and_markdown_and_told_in_words(page, written, markdown):
    pictures = [attributes for tag, attributes in Page(page).tags if tag == "img"]
    for picture in pictures:
        kind, _, content = picture["src"].partition(",")
        assert kind == "data:image/svg+xml;base64" and b"<svg" in base64.b64decode(content)
    forest, picture = pictures
    assert forest["alt"].startswith("Mean differences. up reproduced: +0.206; down contradicted:")
    assert 'src="figures/claims.png" alt="Mean differences.' in markdown
    assert "filter: invert(1)" in page.split("prefers-color-scheme: dark")[1]
    words = "accuracy at the end: plain 0.42, diversity 0.626;"
    assert words in picture["alt"]
    assert re.search(rf'src="figures/tiny-diversity.png" alt="[^"]*{re.escape(words)}', markdown)
    assert (written.parent / "figures/tiny-diversity.png").read_bytes()[:4] == b"\x89PNG"


def test_drawing_does_not_depend_on_settings_and_leaves_them():
    curves = {"reward": {"plain": {"steps": [1, 2], "values": [[0.1, 0.2], [0.2, 0.3]]}}}
    drawn = draw("name", curves)
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 20, "text.color": "red"}):
        before = matplotlib.rcParams.copy()
        assert draw("name", curves) == drawn
        assert matplotlib.rcParams == before
    svg = base64.b64decode(drawn["svg"].partition(",")[2]).decode()
    assert "fill: #ffffff" not in svg.split("</defs>")[0], "transparent, for a dark page"


def test_variants_are_drawn_over_steps_tokens_and_seconds(inputs, tmp_path, make_record):
    for seed in range(2):
        make_record("plain", seed, experiment="variants").write(tmp_path)
    (panel,) = context(tmp_path, inputs / "claims.yaml")["panels"]
    drawn = [(f["caption"].split(":")[0], f["file"]) for f in panel["figures"]]
    assert drawn == [
        ("Over step", "figures/tiny-variants.png"),
        ("Over generated tokens", "figures/tiny-variants-num_generated_tokens.png"),
        ("Over seconds of training steps", "figures/tiny-variants-seconds.png"),
    ]
    assert len({figure["svg"] for figure in panel["figures"]}) == 3


def test_of_many_arms_the_ends_are_drawn(tmp_path, make_record):
    arms = list(EXPERIMENTS["corrections"].arms)
    for arm in arms:
        make_record(arm, 0, experiment="corrections").write(tmp_path)
    (panel,) = context(tmp_path)["panels"]
    (figure,) = panel["figures"]
    assert figure["caption"].startswith("At the end:") and len(arms) > MANY
    assert all(arm in figure["alt"] for arm in arms)


def test_what_a_policy_wrote_is_text(page):
    assert "<script" not in page and "<b>+</b>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\n\n2&lt;/pre&gt;</pre>" in page
    assert "1 &lt;b&gt;+&lt;/b&gt;\n\n1?</pre>" in page


def test_the_page_is_whole_html_that_needs_no_network(page):
    parsed = Page(page)
    assert parsed.open == []
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert "Notebooks of this run" not in page and 'id="claim-up"' in page
    for tag, attributes in parsed.tags:
        for name in ("src", "srcset", "href", "action", "poster"):
            address = attributes.get(name) or "#claims"
            assert address.startswith("data:") or address.removeprefix("#") in ids, (tag, address)
    assert "url(" not in page and "@import" not in page
    assert {tag for tag, _ in parsed.tags} & {"link", "script", "iframe", "object"} == set()
    assert 'name="viewport"' in page


def test_the_same_inputs_give_the_same_bytes(inputs, written, tmp_path):
    write_report(tmp_path, inputs / "results", inputs / "claims.yaml")
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert names == ["figures/claims.png", "figures/tiny-diversity.png", "report.html", "report.md"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (written.parent / name).read_bytes()


def test_what_cannot_be_used_is_told_and_the_rest_comes_out(tmp_path, make_record, write_runs):
    results = tmp_path / "results"
    write_runs(results)
    cut = make_record("only correct").write(results)
    cut.write_text(cut.read_text()[:700])
    edited = make_record("normalised first").write(results)
    edited.write_text(edited.read_text().replace("2026-01-31", "2026-02-01"))
    make_record("older", experiment="diversity").write(results)
    make_record("plain", experiment="forgotten").write(results)
    make_record("plain", 5, config=make_record().config | {"max_steps": 3}).write(results)
    history = [{"step": 0, "reward": 1.0}]
    make_record("trajectory", history=history, **FLOW).write(results)
    (tmp_path / "claims.yaml").write_text(CLAIMS + WRONG)
    page = write_report(tmp_path / "out", results, tmp_path / "claims.yaml")
    for text in map(text_of, both(page)):
        for problem in (
            str(cut), str(edited), "'older'", "'forgotten'", "max_steps 3",
            "Runs of 'flow' on profile 'tiny' lack 'num_generated_tokens'", "claim 'lost'",
            "no experiment 'nonsense'", "claim 'unmeasured': 'plain', seed 0, has no 'joy'",
        ):  # fmt: skip
            assert problem in text.split("Problems\n")[1], problem
        assert "Unlike answers are right more often." in text and "0.626 [0.6, 0.652]" in text
    assert Page(page.read_text()).open == []
    (tmp_path / "claims.yaml").write_text("a: 1")
    content = context(results, tmp_path / "claims.yaml")
    assert any("holds no list of claims" in text for text in content["problems"])
    assert content["panels"] and not content["groups"]


def test_folders_that_are_empty_or_cannot_be_written_are_named(inputs, tmp_path):
    page = write_report(tmp_path / "out", tmp_path / "none", inputs / "claims.yaml")
    for text in both(page):
        assert f"No run is stored under {tmp_path / 'none'}" in text
    assert page.read_text().count(">not run here</b>") == 5
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="cannot write to the output folder"):
        write_report(tmp_path / "file", inputs / "results", inputs / "claims.yaml")


def test_several_machines_are_told_apart(tmp_path, inputs, make_record, write_runs, page):
    write_runs(tmp_path)
    gpu = {"processor": "a CPU", "accelerator": "a GPU", "threads": 4, "system": "Linux"}
    changes = {"machine": gpu, "profile": "paper", **FLOW}
    for seed in range(2):
        make_record("trajectory", seed, **changes).write(tmp_path)
    text, markdown = both(write_report(tmp_path / "out", tmp_path, inputs / "claims.yaml"))
    (row,) = [row for row in text.split("<tr>") if "So it is on a GPU" in row]
    assert "on a GPU</sub>" in row and "2 seeds, 5 are needed" in row
    assert "a GPU, a processor" in text and "1 / 4" in text
    assert "on a GPU</sub>" in markdown
    assert "on a processor" not in page, "where there is one"


def test_numbers_of_notebooks_outside_their_bands_stand_first(tmp_path, inputs):
    rows = [Row("01", f"in {i} · pass@1", 0.9, 0.85, 0.95, 0.9) for i in range(3)]
    rows.append(Row("01", "out · pass@1", 0.9, 0.85, 0.95, 0.5))
    page, markdown = both(write_report(tmp_path, tmp_path / "none", inputs / "claims.yaml", rows))
    for text in (page, markdown):
        places = [text.index(row.quantity) for row in rows]
        assert min(places) == places[3] and "[0.85, 0.95]" in text
    assert '<b class="chip outside">outside</b>' in page and Page(page).open == []


@pytest.mark.parametrize(
    "value, sign, text",
    [(0.05226, "", "0.0523"), (152107, "", "152,000"), (-0.0, "+", "+0"), (float("nan"), "", "–"),
     (None, "", "–"), (float("inf"), "+", "+∞"), (float("-inf"), "", "-∞"), (999.6, "", "1,000"),
     (5.55e-18, "+", "+0"), (3e-7, "", "3e-07")],
)  # fmt: skip
def test_numbers_have_three_digits(value, sign, text):
    assert number(value, sign) == text
