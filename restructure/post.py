"""What merge.py does before and after: changes of single files, by text that has to be there."""

import re
import subprocess
import sys
from pathlib import Path

BIN = Path("CHECKOUT/.venv/bin")
BY_HAND = ("test_architecture.py",)


def change(path: Path, *pairs):
    text = path.read_text("utf-8")
    for old, new in pairs:
        if old not in text:
            sys.exit(f"post.py: {path} no longer has {old!r}")
        text = text.replace(old, new)
    path.write_text(text, "utf-8")


def cut(path: Path, pattern: str) -> str:
    """Take what a pattern finds once out of a file, and return it."""
    text = path.read_text("utf-8")
    found = re.findall(pattern, text, re.DOTALL | re.MULTILINE)
    if len(found) != 1:
        sys.exit(f"post.py: {path} has {pattern!r} {len(found)} times")
    path.write_text(text.replace(found[0], ""), "utf-8")
    return found[0]


def replace(path: Path, pattern: str, new: str):
    text = path.read_text("utf-8")
    text, times = re.subn(pattern, lambda _: new, text, flags=re.DOTALL)
    if times != 1:
        sys.exit(f"post.py: {path} has {pattern!r} {times} times")
    path.write_text(text, "utf-8")


def before(root: Path):
    """So that report needs nothing of the simulation: one function moves, one file is read."""
    src = root / "src/fedpact"
    repeat = src / "report/repeat.py"
    if not repeat.exists() or "engines.extended" not in repeat.read_text("utf-8"):
        return
    extended = src / "engines/extended.py"
    function = cut(extended, r"^def asked\(.*?(?=^def )")
    change(extended, ("from fedpact.plan import Plan\n", "from fedpact.plan import Plan, asked\n"))
    plan = src / "plan.py"
    plan.write_text(plan.read_text("utf-8") + "\n\n" + function.strip() + "\n", "utf-8")
    change(
        repeat,
        ("from fedpact.engines.extended import Earlier, asked\n", ""),
        ("import FIRST_PLAN, Folder\n", "import EARLIER, FIRST_PLAN, Folder\n"),
        ("from fedpact.own.named import handed_in\n", "from fedpact.own.named import handed_in\nfrom fedpact.plan import asked\n"),
        ("*Earlier.read(Folder(run.path)).more,", '*Folder(run.path).read_json(EARLIER).get("more", ()),'),
    )


def after(root: Path, per_sample: bool):
    src = root / "src/fedpact"
    change(
        src / "algorithms/__init__.py",
        (
            "found = (module.name for module in pkgutil.iter_modules(__path__))",
            "found = (module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg)",
        ),
        (
            'if f"{__name__}.{name}" not in sys.modules and name not in names():',
            'loaded = sys.modules.get(f"{__name__}.{name}")\n'
            '    if (loaded is None or hasattr(loaded, "__path__")) and name not in names():',
        ),
    )
    pyproject(root)
    architecture(root)
    document(root)
    prose(root)
    tests(root)
    if per_sample:
        rename_per_sample(root)
    ruff(root)
    long_lines(root)
    ruff(root)


def ruff(root):
    where = ["src", "tests", "benchmarks", "experiments", "docs"]
    subprocess.run([BIN / "ruff", "check", "-q", "--fix", "--exit-zero", *where], cwd=root, check=True, capture_output=True)
    subprocess.run([BIN / "ruff", "format", "-q", *where], cwd=root, check=True)


def long_lines(root):
    """Break comments and docstrings that new names made longer than a line may be."""
    found = subprocess.run(
        [BIN / "ruff", "check", "--select", "E501", "--output-format", "concise", "."],
        cwd=root, capture_output=True, text=True,
    ).stdout
    places = sorted(
        {(f[1], int(f[2])) for f in re.finditer(r"^(\S+?):(\d+):\d+: E501", found, re.MULTILINE)},
        reverse=True,
    )
    for file, number in places:
        path = root / file
        lines = path.read_text("utf-8").split("\n")
        line = lines[number - 1]
        indent = line[: len(line) - len(line.lstrip())]
        if line.lstrip().startswith('f"') or line.lstrip().startswith('"'):
            if line.rstrip().endswith('"') and '"""' not in line:
                # One of several strings that stand together.
                at = line.rfind(" ", 0, 98)
                head, tail = line[: at + 1] + '"', indent + ("f" if line.lstrip()[0] == "f" else "") + '"' + line[at + 1 :]
                lines[number - 1 : number] = [head, tail]
                path.write_text("\n".join(lines), "utf-8")
                continue
        at = line.rfind(" ", 0, 100)
        if line.lstrip().startswith("#"):
            indent += "# "
        head, tail = line[:at], indent + line[at + 1 :]
        following = lines[number] if number < len(lines) else ""
        if '"""' in head and tail.rstrip().endswith('"""'):
            tail = tail.rstrip().removesuffix('"""') + f"\n{indent}" + '"""'
        elif following.startswith(indent) and following.strip() and not following.startswith((indent + " ", indent + '"""')) and len(tail) + 1 + len(following.strip()) <= 100:
            tail = f"{tail} {following[len(indent):]}"
            del lines[number]
        lines[number - 1 : number] = [head, *tail.split("\n")]
        path.write_text("\n".join(lines), "utf-8")


def pyproject(root):
    change(
        root / "pyproject.toml",
        (
            '"src/fedpact/theory", "src/fedpact/persample", "src/fedpact/privacy", "src/fedpact/draws", '
            '"src/fedpact/ledger", "src/fedpact/messages.py"',
            '"src/fedpact/persample", "src/fedpact/privacy", "src/fedpact/core/randomness", '
            '"src/fedpact/core/messages.py"',
        ),
    )


LAYERS = '''# From the bottom to the top. A unit is a module or a package directly under fedpact. It imports
# itself and units of lower rows, never a unit of its own row or above. A new unit needs a row.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("core",),  # what every other package builds on: errors, files, messages, randomness
    ("persample",),  # linear algebra that knows no budget
    ("privacy", "models", "data"),  # the oracle, accounting, ledger; networks; records, features
    ("evaluation", "algorithms"),  # tasks, metrics, held-out records; an algorithm, its wrappers
    ("plan", "client"),  # the validated configuration; a site's side of the wire
    ("rounds",),  # the server's side of the wire
    ("simulation", "report"),  # one trains on one machine; one reads a run's folder, never trains
    ("deployment", "api"),  # a federation on real machines; what Python users call
    ("studies",),  # many runs side by side, recommendations, audits, the papers' theory
    ("cli",),
    ("__init__", "__main__"),  # the public names; the command line by the package
)
MOST_UNITS = 16  # beside __init__ and __main__, which are no layer either
MOST_LAYERS = 10
'''

MAY_IMPORT = '''# An algorithm meets records through the oracle's surface alone: no kernel, no data, no metrics.
# What several algorithms share is held to the same rule; what goes around them is not.
ALGORITHMS, WRAPPERS = "fedpact.algorithms", "fedpact.algorithms.wrappers"
ALGORITHMS_MAY_IMPORT = (
    "algorithms",
    "privacy.oracle",
    "privacy.accounting",
    "core.messages",
    "core.check",
    "core.errors",
)
ACCOUNTING = "fedpact.privacy.accounting"


def within(module: str, package: str) -> bool:
    """Whether a module is that package or in it."""
    return module == package or module.startswith(f"{package}.")

'''

TANGLED = '''def tangled_packages(sources: Sources) -> Iterator[str]:
    """A package's modules and packages stand in layers, too: two of them that need each other.

    A package's own __init__ is left to `import_cycles`.
    """
    packages = {m.rpartition(".")[0] for m in sources if "." in m}
    for package in sorted(packages):
        inner = {m: m[len(package) + 1 :].split(".")[0] for m in sources if m.startswith(package + ".")}
        units = {
            f"{package}.{unit}": " ".join(
                f"import {package}.{inner[name]};"
                for module in inner
                if inner[module] == unit
                for _, name in imports(sources, module)
                if inner.get(name, unit) != unit
            )
            for unit in set(inner.values())
        }
        yield from import_cycles(units)


'''

UNITS_TEST = '''def test_the_top_level_can_be_seen_at_a_glance(sources):
    units = {unit_of(module) for module in sources} - {"__init__", "__main__"}
    assert len(units) <= MOST_UNITS, sorted(units)
    assert len(LAYERS) - 1 <= MOST_LAYERS


'''


def architecture(root):
    path = root / "tests/test_architecture.py"
    replace(path, r"# From the bottom to the top\. A unit is.*?\n\)\n(?=_LEVEL)", LAYERS)
    replace(path, r"# An algorithm meets records through the oracle's surface alone.*?\n\)\n", MAY_IMPORT)
    change(
        path,
        ('''# Names that stand for one thing in several places: a form that each file of a kind has, or one
# function for each engine.
ONE_FORM = ("algorithms",)
ONE_THING''', "# One function for each engine.\nONE_THING"),
        ("MOST_CODE_LINES = 300  # of a file: lines that are neither blank nor a comment\nMOST_FILES = 16",
         "MOST_CODE_LINES = 400  # of a file: lines that are neither blank, comment nor docstring\nMOST_FILES = 20"),
        ('''        if unit_of(module) not in ALGORITHM_UNITS:
            continue
        for line, name in own_imports(sources, module):
            if not any(name == a or name.startswith(a + ".") for a in ALGORITHMS_MAY_IMPORT):
''', '''        if not within(module, ALGORITHMS) or within(module, WRAPPERS):
            continue
        for line, name in own_imports(sources, module):
            around = within(f"fedpact.{name}", WRAPPERS)
            if around or not any(within(name, a) for a in ALGORITHMS_MAY_IMPORT):
'''),
        ("def torch_in_theory(", "def torch_in_accounting("),
        ('        if unit_of(module) != "theory":\n', "        if not within(module, ACCOUNTING):\n"),
        ("def asserts(sources", TANGLED + "def asserts(sources"),
        ('        if unit_of(module) in ONE_FORM or name in ONE_THING:\n',
         '''        # Every algorithm's file has the same form.
        if module.rpartition(".")[0] == ALGORITHMS or name in ONE_THING:
'''),
        ('''        lines = (line.strip() for line in source.splitlines())
        count = sum(1 for line in lines if line and not line.startswith("#"))
''', '''        said = set[int]()
        for node in ast.walk(parsed(source)):
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            if isinstance(node, kinds) and ast.get_docstring(node):
                said.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        lines = ((number, line.strip()) for number, line in enumerate(source.splitlines(), 1))
        count = sum(1 for n, line in lines if line and line[0] != "#" and n not in said)
'''),
        # Made-up packages.
        ('{"fedpact.check": "from fedpact.messages import Task"}', '{"fedpact.core.check": "from fedpact.rounds import Rounds"}'),
        ('{"fedpact.check": "import fedpact.plan"}', '{"fedpact.core.check": "import fedpact.plan"}'),
        ('{"fedpact.errors": "from fedpact import check", "fedpact.check": ""}', '{"fedpact.rounds": "from fedpact import api", "fedpact.api": ""}'),
        ('{"fedpact.client": "from fedpact.round import Rounds"},  # the same row', '{"fedpact.client": "from fedpact.plan import Plan"},  # the same row'),
        ('{"fedpact.round": "import fedpact"}', '{"fedpact.rounds": "import fedpact"}'),
        ('''        {"fedpact.theory.pld": "from .rdp import renyi"},
        {"fedpact.theory.pld": "from .. import plan"},''', '''        {"fedpact.privacy.policy": "from .terms import Terms"},
        {"fedpact.privacy.policy": "from .. import plan"},'''),
        ('{"fedpact.algorithms.x": "from fedpact.metrics import psi"}', '{"fedpact.algorithms.x": "from fedpact.evaluation.metrics import psi"}'),
        ('{"fedpact.local": "from fedpact.data.dataset import Dataset"}', '{"fedpact.algorithms.common.steps": "from fedpact.data.dataset import Dataset"}'),
        ('{"fedpact.control": "from fedpact import privacy", "fedpact.privacy": ""}', '''{"fedpact.algorithms.common": "from fedpact import privacy", "fedpact.privacy": ""},
        {"fedpact.algorithms.x": "from fedpact.algorithms.wrappers.base import Method"}'''),
        ('''    torch_in_theory: [
        {"fedpact.theory.pld": "import torch"},
        {"fedpact.theory": "from torch.nn import Module"},
        {
            "fedpact.theory.tau": "from fedpact import check",
            "fedpact.check": "import fedpact.params",
            "fedpact.params": "import torch.nn",
        },''', '''    torch_in_accounting: [
        {"fedpact.privacy.accounting.pld": "import torch"},
        {"fedpact.privacy.accounting": "from torch.nn import Module"},
        {
            "fedpact.privacy.accounting.rdp": "from fedpact.core import check",
            "fedpact.core.check": "import fedpact.core.params",
            "fedpact.core.params": "import torch.nn",
        },'''),
        ("    asserts: [{", '''    tangled_packages: [
        {
            "fedpact.data.a": "import fedpact.data.features.b",
            "fedpact.data.features.b": "x = 1",
            "fedpact.data.features.c": "import fedpact.data.a",
        },
    ],
    asserts: [{'''),
        ('"fedpact.privacy.reach": "def within(x):', '"fedpact.privacy.policy": "def within(x):'),
        ('"fedpact.round": "from fedpact.privacy.reach import within"', '"fedpact.rounds": "from fedpact.privacy.policy import within"'),
        ('"fedpact.audit.one"', '"fedpact.studies.one"'),
        ('"fedpact.check"', '"fedpact.core.check"'),
        ('from fedpact.check import', 'from fedpact.core.check import'),
        ('"fedpact.round"', '"fedpact.rounds"'),
        ('from fedpact.engines.simulation import simulate', 'from fedpact.simulation.simulate import simulate'),
        ('"fedpact.engines.simulation"', '"fedpact.simulation.simulate"'),
        ('from fedpact.theory import pld', 'from fedpact.privacy.accounting import pld'),
        ('"fedpact.theory": ', '"fedpact.privacy.accounting": '),
        ('"fedpact.theory.pld": \'"""M."""\\nfrom fedpact import check', '"fedpact.privacy.accounting.pld": \'"""M."""\\nfrom fedpact.core import check'),
        ('"fedpact.errors": \'"""M."""', '"fedpact.core.errors": \'"""M."""'),
        ('{"fedpact", "fedpact.errors", "fedpact.privacy.oracle", "fedpact.theory"}', '{"fedpact", "fedpact.core.errors", "fedpact.privacy.oracle"}'),
        ("def test_the_documents_table_is_this_one", UNITS_TEST + "def test_the_documents_table_is_this_one"),
    )


LAYERS_BLOCK = """__init__, __main__        # the public names; the command line by the package's name
cli                       # one command a file of cli/commands, loaded when called
studies                   # many runs side by side, recommendations, audits, the papers' theory
deployment, api           # a federation on real machines, over Flower; run, load, extend
simulation, report        # a run on one machine, with secure aggregation; the page of a run
rounds                    # the server's loop over rounds
plan, client              # one configuration, validated as a whole; a site's side of the wire
evaluation, algorithms    # what is learnt, measured and held out; one file each, and what goes around them
privacy, models, data     # oracle, accounting, ledger; networks; records, partitions, features
persample                 # the per-sample kernel
core                      # errors, checks, files, messages, the flat vector, randomness
"""

TABLE = """| package | a reader starts at | what is in it |
| --- | --- | --- |
| `core` | `messages.py` | what every other package builds on: the exception tree (`errors.py`), checks that NaN fails (`check.py`), numbers for people (`format.py`), files written whole (`files.py`), a run's folder (`run_folder.py`), the flat vector (`params.py`), losses, configurations as text (`configuration.py`), what each key means, read from the classes' source without loading any of it (`reference.py`), user code and the digests a plan knows it by (`user_code.py`), what a notebook shows (`notebook.py`); `randomness/`: which records a batch holds, and the noise, from a seed or secure and on a grid |
| `persample` | `kernel.py`, then `passes.py` | clipped sums of per-sample gradients, which know no budget: four ways through a model (`dense.py`, `chain.py`, `graph.py`, `alone.py`), a trace and the table of operations that keep records apart (`apart/`), rules by operation (`rules.py`), what they leave (`gradients.py`); [adding-a-rule.md](adding-a-rule.md) |
| `privacy` | `oracle.py` | the oracle and its batches, the table of noise mechanisms (`mechanisms.py`), a site's terms and what is released once (`terms.py`), its policy; `accounting/`: Rényi bounds (`rdp.py`), privacy loss distributions (`pld.py`; where no grid is fine enough, by their transform, `characteristic_function.py`; for all records of a person, `group_privacy.py`), the smallest noise for a budget (`calibration.py`), what trying settings costs (`tuning_cost.py`); `ledger/`: what a site has promised and spent, on a hash chain, and receipts: an auditor reads this folder, and no other |
| `models` | `build.py` | the papers' networks (`zoo.py`); any `nn.Module` that keeps records apart; given weights to begin with (`initial.py`, [runs.md](runs.md)) |
| `data` | `dataset.py`, `tables.py` | files with checksums, partitions into sites (`partition.py`: one entry a kind); own records held against a declared form (`schema.py`), one by one, and scaled by it; what is handed in from Python (`from_python.py`); the digits, with their licence; `features/`: what stands in place of each record, by itself: kinds (`kinds.py`), a module of one's own (`user_module.py`), the cache; [features.md](features.md) |
| `evaluation` | `held_out.py`, then `intervals.py` | what is learnt of a label and by which loss (`tasks.py`), metrics, what is released of records held out of training (`held_out.py`) with intervals (`intervals.py`); [evaluation.md](evaluation.md); a model tuned on a site's own records, and what joining was worth (`personal.py`) |
| `algorithms` | `fedavg.py`, `wrappers/base.py` | each file opens with paper, symbols, releases, neutral settings, differences; `common/`: local steps, fairness, τ chosen anew each round; `wrappers/`: an algorithm with its settings, and what goes around any of them: weights of records, a controller of τ, server optimisers, robust rules, compression; what goes together (`combine.py`) |
| `simulation` | `simulate.py`, `run.py` | set-up, what may go on, evaluation; how any run begins and ends in its folder (`run.py`) and what it says of its privacy (`statement.py`); sites on threads or Ray, many small ones at a time (`stacked.py`), an ended run extended; `secure_aggregation/`: a transport around another one |
| `deployment` | `site.py`, `server.py` | the two sides of a deployment, its files, keys and processes, signed receipts (`receipts.py`), what `fedpact deploy` does on one machine (`local.py`), a run shown while it goes on (`live.py`, [runs.md](runs.md#watching)); `flower/`: what carries the messages |
| `report` | `page.py` | reads a run's folder and shows it, and what a comparison's runs cost together (`compared_runs.py`); ε in the words of whoever answers for the records (`meaning.py`), figures in colours for light and dark (`drawing.py`), the papers' rates beside a run (`convergence.py`, `tradeoffs.py`); a run's statement in the forms of others (`export.py`, `model_card.py`); no mathematics |
| `studies` | `compare.py`, `recommend.py` | plans side by side, in processes of their own; a whole configuration for a budget, with reasons; `audit/`: lower bounds on ε by attacking the oracle that a plan would run, tests of its noise and its batches; `papers/`: older theory, FedProxVR's and FedFDP's parameters |
| `cli` | `main.py`, `commands/run.py` | `commands/`: what may be typed, a file each, loaded when called; beside it what they do |
"""


def document(root):
    path = root / "docs/architecture.md"
    replace(path, r"(?<=```layers\n).*?(?=```)", LAYERS_BLOCK)
    replace(path, r"\| package \| a reader starts at \| what is in it \|\n.*?\n(?=\n## )", TABLE)
    change(
        path,
        ("**4. Theory has no torch.** Accounting and calibration are pure functions of numbers in float64 (`theory/`).",
         "**4. Accounting has no torch.** Accounting and calibration are pure functions of numbers in float64 (`privacy/accounting/`)."),
        ("nothing in `theory` reaches torch", "nothing in `privacy/accounting` reaches torch"),
        ("no import cycle, no relative import", "no import cycle, neither between files nor between the parts of a package; no relative import"),
        ("fewer than 300 lines of code in a file", "fewer than 400 lines of code in a file, docstrings not counted,"),
        ("at most 16 files in a folder", "at most 20 files in a folder"),
    )


def soft(path, *pairs):
    """Like change, where what is sought may have been rewritten meanwhile."""
    text = path.read_text("utf-8")
    for old, new in pairs:
        if old not in text:
            print(f"post.py: {path.name} no longer has {old!r}: left as it is")
        text = text.replace(old, new)
    path.write_text(text, "utf-8")


def prose(root):
    """Names of files that documents give without their folder."""
    docs = root / "docs"
    soft(
        docs / "architecture.md",
        ("`parties/questions.py`", "`deployment/site_evaluation.py`"),
        ("(`ring.py`)", "(`simulation/secure_aggregation/encoding.py`)"),
        ("as they are (`shared.py`)", "as they are"),
        ("`engines/flower/`", "`deployment/flower/`"),
        ("below `client` and `round`", "below `client` and `rounds`"),
    )
    soft(docs / "deployment.md", ("`actor.py`", "`simulation/ray.py`"))
    soft(docs / "symbols.md", ("`report/overlay.py`", "`report/comparison_charts.py`"))


def tests(root):
    pass


def rename_per_sample(root):
    """persample -> per_sample, everywhere."""
    for parent in (root / "src/fedpact", root / "tests"):
        (parent / "persample").rename(parent / "per_sample")
    suffixes = (".py", ".md", ".toml", ".yml", ".ipynb", ".j2", ".html", "")
    for folder in ("src", "tests", "docs", "benchmarks", "experiments", "."):
        for path in sorted((root / folder).rglob("*") if folder != "." else (root).glob("*")):
            if not path.is_file() or path.suffix not in suffixes or ".git" in path.parts:
                continue
            try:
                text = path.read_text("utf-8")
            except UnicodeDecodeError:
                continue
            if path.name == "conftest.py" and re.search(r"^def per_sample\(", text, re.MULTILINE):
                # It has a function of that name.
                text = re.sub(r"(?m)^(from fedpact import .*)\bpersample\b", r"\1@ as per_sample_package", text)
                text = re.sub(r"(?<![\w.\"'/])persample(?![\w.\"'/])", "per_sample_package", text)
                text = text.replace("@ as", "per_sample as")
            new = re.sub(r"\bpersample\b", "per_sample", text)
            if new != path.read_text("utf-8"):
                path.write_text(new, "utf-8")
