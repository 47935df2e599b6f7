"""The code in the documentation runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedpact.algorithms import names

ROOT = Path(__file__).parents[1]

# The example becomes an algorithm by its file's existence, and the suite then runs on it.
RUN = """
import sys
import pytest
import fedpact.algorithms
fedpact.algorithms.__path__.append(sys.argv[1])
tests = [f"tests/conformance/test_{part}.py" for part in ("suite", "sensitivity", "bounds")]
sys.exit(pytest.main(["-q", "-m", "", "-k", "serverstep", "-p", "no:cacheprovider", *tests]))
"""


def test_the_worked_example_passes_the_conformance_suite(tmp_path):
    page = (ROOT / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "serverstep" not in names()
    (tmp_path / "serverstep.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Two variants (local_steps), each in four tests: else -k found nothing of it.
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 8


@pytest.mark.parametrize(("page", "least"), [("notes/threats.md", 40), ("notes/what-holds.md", 10)])
def test_the_tests_that_a_page_names_exist(page, least):
    page = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    files = set(re.findall(r"`(?:tests/[\w/]+/)?(test_\w+\.py)`", page))
    sources = list((ROOT / "tests").rglob("*.py"))
    known = {name for path in sources for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert len(named) > least
    assert named <= known, sorted(named - known)
    assert files <= {path.name for path in sources}


def test_every_page_is_in_the_navigation_of_the_site():
    named = re.findall(r"([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 20
    assert pages <= set(named), sorted(pages - set(named))
