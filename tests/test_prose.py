"""The user's pages are plain English: short sentences, common words, no phrases that came back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(p for f in ("tutorials", "how-to", "explanation") for p in (DOCS / f).glob("*.md"))
MOST_WORDS = 30
# Flesch and Kincaid's grade: a pupil of this school year follows the sentences.
MOST_GRADE = 9.0
# Phrases that a reader stumbled over, and our own words for what the field has a word for.
PHRASES = (
    "whoever",
    "in silence",
    "anew",
    "lest",
    "it bears",
    "bears the",
    "is told of",
    "what is told",
    "stands beside",
    "stands in the",
    "are no task",
    "so many of",
    "which then",
    "by what",
    "of whom",
    "that there is none",
    "noise for the sum",
    "words and letters",
    "out of all range",
    "more and more seldom",
    "with no word",
    "is to be had",
    "unlike defaults",
    "the dearest",
    "what their names say",
    "has to be told",
)


def paragraphs(text):
    """Prose without code, tables, headings and marks; each item of a list is a paragraph."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    lines = [""]
    for line in text.splitlines():
        if re.match(r"\s*([-*]|\d+\.) ", line):
            lines.append("")
        if re.match(r"\s{4,}\S|#|\||!\[|<|!!!", line) or not line.strip():
            lines.append("")
        else:
            lines[-1] += " " + re.sub(r"^\s*([-*]|\d+\.) ", "", line)
    for line in lines:
        line = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", line)
        line = re.sub(r"`[^`]*`", "code", line).replace("*", "").strip()
        if line:
            yield line


def sentences(text):
    """The words of each sentence of a page."""
    parts = [s for p in paragraphs(text) for s in re.split(r"(?<=[.!?:])[\"')]*\s+", p)]
    found = [re.findall(r"[^\W\d_][\w'’-]*", part) for part in parts]
    return [words for words in found if words]


def syllables(word):
    word = re.sub(r"(?<=[^aeiouyl])e$|(?<=[^td])ed$", "", word.lower())
    return max(1, len(re.findall(r"[aeiouy]+", word)))


def grade(text):
    """Flesch and Kincaid's grade, of sentences with at least three words."""
    read = [words for words in sentences(text) if len(words) > 2]
    words = [word for sentence in read for word in sentence]
    per_word = sum(map(syllables, words)) / len(words)
    return 0.39 * len(words) / len(read) + 11.8 * per_word - 15.59


def phrases(text):
    prose = " ".join(" ".join(paragraphs(text)).lower().split())
    return [one for one in PHRASES if re.search(rf"\b{re.escape(one)}\b", prose)]


def too_long(text):
    return [" ".join(words) for words in sentences(text) if len(words) > MOST_WORDS]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_page_is_plain_english(page):
    text = page.read_text(encoding="utf-8")
    assert phrases(text) == []
    assert too_long(text) == []
    assert grade(text) <= MOST_GRADE


def test_linter_finds_what_it_is_for():
    long = "The site " + "and the server " * 10 + "agree."
    assert too_long(long)
    assert not too_long("The site trains. " * 20)
    assert not too_long("```python\n" + long + "\n```\n| " + long + " |")
    assert phrases("Whoever runs it, is told of it.") == ["whoever", "is told of"]
    simple, hard = (
        "The cat sat on the mat. It was a good cat.",
        (
            "Institutional administrators necessarily authenticate organisational representatives "
            "notwithstanding contradictory jurisdictional considerations."
        ),
    )
    assert grade(simple) < 3 < 20 < grade(hard)
