"""`make site` gives a page for each notebook, whose links lead somewhere."""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_page_and_to_a_heading_of_it(tmp_path):
    installed = ["-o", ".venv/.installed", f"BIN={Path(sys.executable).parent}"]
    subprocess.run(["make", "site", *installed, f"SITE={tmp_path}"], cwd=CHECKOUT, check=True)
    pages = {path.name: path.read_text() for path in tmp_path.glob("*.html")}
    names = [f"{path.stem}.html" for path in CHECKOUT.glob("notebooks/*.ipynb")]
    assert set(pages) == {"index.html", *names}
    assert pages["index.html"] == pages["00_start_here.html"]
    for name, text in pages.items():
        assert (
            "<style>.celltag_hide-input" in text and "celltag_hide-input" in text.split("<body")[1]
        )
        for target in re.findall(r'<a [^>]*?href="([^"]+)"', text):
            if not target.startswith("http"):
                file, _, anchor = unescape(target).partition("#")
                assert not file or (tmp_path / file).is_file(), f"{name}: {target}"
                page = unescape(pages.get(file or name, ""))
                assert not anchor or f'id="{anchor}"' in page, f"{name}: {target}"
    assert "replays/" in pages["01_basic_grpo.html"]
