"""What a call of `fedpact` loads, how its commands are found, and completion in three shells."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from fedpact.cli import commands
from fedpact.cli.console import plain_console, wide_console
from fedpact.common.errors import FedpactError
from fedpact.plan import Plan

# Each takes longer to import than an answer may take.
HEAVY = {
    *("torch", "numpy", "scipy", "dp_accounting", "matplotlib", "pydantic", "sklearn", "jinja2"),
    *("cryptography", "flwr", "ray", "safetensors"),
}
# Carries out calls that it reads, each in a fork, as starting Python takes most of their time.
CALLS = """
import atexit, json, os, sys, tempfile
from fedpact.cli.main import main

for line in sys.stdin:
    arguments, environment = json.loads(line)
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    if os.fork() == 0:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        os.environ.update(environment)
        sys.argv = ["fedpact", *arguments]
        atexit.register(lambda: print("\\n" + json.dumps(sorted(sys.modules))))
        main()
        break
    code = os.waitstatus_to_exitcode(os.wait()[1])
    printed = [os.pread(file.fileno(), 2**20, 0).decode() for file in (out, err)]
    print(json.dumps([code, *printed]), flush=True)
"""


@pytest.fixture(scope="module")
def call():
    """call(*arguments, **environment) -> exit code, what was printed, and the modules loaded."""
    command = [sys.executable, "-c", CALLS]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:

        def answer(*arguments, **environment):
            process.stdin.write(json.dumps([arguments, environment]) + "\n")
            process.stdin.flush()
            code, out, err = json.loads(process.stdout.readline())
            *printed, modules = out.splitlines()
            return code, "\n".join(printed), err, set(json.loads(modules))

        # What is read of the classes is read once, by whoever asks first; with torch.
        assert answer("settings", "privacy")[0] == 0
        yield answer
        process.stdin.close()


@pytest.mark.parametrize("console", [plain_console, wide_console])
def test_names_and_paths_are_printed_as_they_are(console, capsys):
    """Rich would read markup and emoji codes in them."""
    console().print("/runs/[b] a:b:8443")
    assert capsys.readouterr().out == "/runs/[b] a:b:8443\n"


def top(modules):
    return {name.split(".")[0] for name in modules}


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--help",), 0, "account"),
        (("run", "--help"), 0, "fedpact run --set algorithm=scaffold --set rounds=20"),
        (("tune", "fedproxvr", "--help"), 0, "--gamma"),
        (("settings", "privcy", "--json"), 2, "the nearest is 'privacy'"),
        (("algorithms", "fedprox"), 0, "local_steps"),
        (("init", "/dev/null/folder.toml"), 2, "/dev/null is not a folder"),
        (("rnu",), 2, "Did you mean 'run'?"),
        (("run", "--otu", "x"), 2, "--out"),
        (("run", "--rounds", "5"), 2, "KEY=VALUE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_answer_that_computes_nothing_loads_nothing(call, arguments, code, told):
    found, out, err, modules = call(*arguments)
    assert found == code, err
    assert told in out + err
    assert not top(modules) & HEAVY
    if arguments[0] != "--help":
        # Of the commands, the one that was called.
        named = {name.split(".")[3] for name in modules if name.startswith("fedpact.cli.commands.")}
        assert named <= {commands.home(arguments[0])}


def test_account_loads_numbers_only(call):
    setting = ("--q", "0.1", "--sigma", "1", "--steps", "5")
    code, out, err, modules = call("account", *setting, "--accountant", "rdp", "--json")
    assert code == 0, err
    assert json.loads(out)["solved_for"] == "epsilon"
    assert top(modules) & HEAVY == {"numpy", "scipy"}
    _, _, _, modules = call("account", *setting, "--accountant", "pld", "--json")
    assert top(modules) & HEAVY == {"numpy", "scipy"}


def test_command_has_help_and_incomplete_file_is_an_error(monkeypatch, tmp_path):
    assert {"account", "run", "deploy"} <= set(commands.names())
    for name in commands.names():
        assert commands.load(name).get_short_help_str(), name
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    for name, content in {"empty": "", "mute": "def mute():\n    pass\n"}.items():
        (tmp_path / f"{name}.py").write_text(content)
        with pytest.raises(FedpactError, match=f"'{name}' with a docstring"):
            commands.load(name)


def each(command, name):
    inner = getattr(command, "commands", {})
    found = [pair for last, one in inner.items() for pair in each(one, f"{name} {last}")]
    return found if inner else [(name, command)]


COMMANDS = dict(pair for name in commands.names() for pair in each(commands.load(name), name))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_arguments_and_ends_with_examples(name):
    command = COMMANDS[name]
    assert all(getattr(given, "help", None) for given in command.params), name
    assert commands.examples(name)
    for line in commands.examples(name):
        assert line in command.epilog
        words = [word for word in shlex.split(line) if "FEDPACT_DATA=" not in word]
        # What `deploy init fed` writes; runs/first is of images, which are in no .csv file.
        assert {w for w in words if w.startswith("fed/")} <= {
            "fed/server",
            "fed/authority",
            "fed/sites/site-00",
        }
        assert not ("runs/first" in words and any(w.endswith(".csv") for w in words))
        assert words[: 1 + len(name.split())] == ["fedpact", *name.split()]
        context = command.make_context(name, words[1 + len(name.split()) :])
        given = context.params.get("overrides") or []
        if name not in ("compare", "export"):
            Plan.read(None, given)


@pytest.mark.parametrize(
    "shell", ["bash", *(pytest.param(shell, marks=pytest.mark.slow) for shell in ("zsh", "fish"))]
)
def test_shell_completion_loads_nothing(call, shell):
    """And its script is printed as the README says."""

    def completed(line):
        given = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}  # bash
        given |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        _, out, _, modules = call(**given, _FEDPACT_COMPLETE=f"complete_{shell}")
        assert not top(modules) & HEAVY
        return out

    found = completed("fedpact re")
    assert "report" in found
    assert "resume" in found
    assert "account" not in found
    assert "--engine" in completed("fedpact run --en")
    _, script, _, _ = call(_FEDPACT_COMPLETE=f"source_{shell}")
    assert f"_FEDPACT_COMPLETE=complete_{shell}" in script


def test_the_package_is_the_command_line_too():
    done = subprocess.run(
        [sys.executable, "-m", "fedpact", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()[:1]) == (0, ["fedpact"])


CLOSED = """
import os
from fedpact.cli import main

def look():
    null = os.stat(os.devnull).st_rdev
    assert [os.fstat(n).st_rdev for n in range(3)] == [null] * 3
    # Children would otherwise write what they say into the first file that they open.
    assert all(map(os.get_inheritable, range(3)))

main.app = look
main.main()
"""


def test_closed_streams_are_opened_before_any_file():
    shell = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, CLOSED]
    assert subprocess.run(shell).returncode == 0
