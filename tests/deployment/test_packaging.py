"""What runs parties as services: checked as files, and by the processes that they start.

No container engine runs here: no image is built, and no chart installed.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import venv
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml
from tests.deployment.conftest import free_port
from tests.deployment.test_processes import spawner
from tests.waiting import wait_for
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import DataError, FedpactError, TransportLost
from fedpact.deployment import packaging, processes
from fedpact.deployment.federation import Federation
from fedpact.deployment.flower.program import find_outage
from fedpact.deployment.processes import die_with_parent
from fedpact.deployment.site_records import SiteSettings, read_receipt

ROOT = Path(__file__).parents[2]
FEDPACT = [sys.executable, "-c", "from fedpact.cli.main import main; main()"]


@pytest.fixture(scope="module")
def packaged(tmp_path_factory):
    """packaged(form) -> a deployment with what runs it in that form, of which nothing runs."""
    made = {}

    def new(form):
        if form not in made:
            made[form] = tmp_path_factory.mktemp(form) / "d"
            sets = ["--set=rounds=2", "--set=sites=5"]
            command = ["deploy", "init", str(made[form]), "--as", form, *sets]
            done = CliRunner().invoke(app, command)
            assert done.exit_code == 0, done.output
        return made[form]

    return new


def lint(dockerfile):
    """What is wrong with a Dockerfile, by line of reasoning; [] for nothing."""
    text = re.sub(r"\\\n\s*", "", "".join(
        line for line in dockerfile.splitlines(keepends=True) if not line.startswith("#")
    ))  # fmt: skip
    steps = [line.split(" ", 1) for line in text.splitlines() if line]
    last = [step for step, _ in steps[::-1]].index("FROM")
    final = dict(steps[-last:])
    wrong = ["latest" for step, of in steps if step == "FROM" and not re.search(r":\d+\.\d+", of)]
    wrong += ["root"] * (not re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", final.get("USER", "")))
    wrong += ["health"] * ('"deploy", "health", "/party"' not in final.get("HEALTHCHECK", ""))
    wrong += ["entry"] * (final.get("ENTRYPOINT") != '["fedpact"]')
    installs = re.findall(r"pip install[^&\n]*", text)
    # From the network by hash alone, and else not from the network.
    wrong += [one for one in installs if ("--require-hashes" in one) == ("--no-index" in one)]
    # Only what is named: beside it lie keys and records.
    copied = [of.split()[:-1] for step, of in steps if step == "COPY"]
    return wrong + [names for names in copied if "." in names] + ["ADD"] * ("ADD" in dict(steps))


def test_images_run_no_root_and_install_by_hash(packaged):
    beside = packaged("compose")
    text = (beside / "Dockerfile").read_text()
    assert lint(text) == []
    for old, new, what in (
        ("USER 10001:10001\n", "", "root"),
        ("3.11-slim", "latest", "latest"),
        ("--require-hashes", "", "pip install"),
        ('"health"', '"status"', "health"),
    ):
        assert any(what in found for found in lint(text.replace(old, new)))
    # Beside it lie keys and records, which no builder is sent.
    ignored = (beside / ".dockerignore").read_text().split()
    assert ignored == ["*", "!deploy.lock", "!fedpact-*.whl"]


def test_lock_has_hashes_of_the_versions_under_test(packaged):
    text = (packaged("compose") / "deploy.lock").read_text()
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    pin = r"^([a-z0-9_.-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$"
    pins = re.findall(pin, text, re.MULTILINE)
    assert len(pins) == len([line for line in text.splitlines() if line and line[0] != " "])
    locked = {name: pin for name, pin, _ in pins}
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    tested = {re.sub(r"[-_.]+", "-", name.lower()): pin for name, pin in tested.items()}
    assert {"torch", "flwr", "cryptography", "hatchling"} <= locked.keys()
    assert {n: p.split("+")[0] for n, p in locked.items() if n in tested} == {
        n: tested[n] for n in locked if n in tested
    }


def test_versions_that_were_not_tested_are_reported(monkeypatch):
    assert processes.describe_untested() == []
    monkeypatch.setattr(processes, "version", {"torch": "2.130.0", "flwr": "1.41.9"}.get)
    (told,) = processes.describe_untested()
    assert told.startswith(
        "torch 2.130.0 is installed, but this version of fedpact was tested with"
    )


def test_tested_versions_are_the_locks_and_in_range(packaged):
    lock = (packaged("compose") / "deploy.lock").read_text()
    declared = (ROOT / "pyproject.toml").read_text()
    for name, tested in processes.TESTED.items():
        assert re.search(rf"^{name}==(\d+\.\d+)", lock, re.M)[1] in tested
        major, minor = map(int, re.search(rf'"{name}>=[\d.]+,<(\d+)\.(\d+)"', declared).groups())
        assert tested[-1] == f"{major}.{minor - 1}"


def test_compose_gives_each_party_what_it_needs_and_no_more(packaged):
    where = packaged("compose")
    found = yaml.safe_load((where / "compose.yaml").read_text())
    federation = Federation.read(where / "server" / "federation.toml")
    assert found["services"].keys() == {"server", *federation.names}
    assert federation.host in found["services"]
    assert found["networks"] == {"federation": {"internal": True}}
    for name, service in found["services"].items():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        # Compose cannot tell exit code 2 from others: a party that needs a person is given up.
        assert service["restart"] == "on-failure:5"
        assert "privileged" not in service
        assert service["user"].endswith("10001:10001}")
        mounts = {each["target"]: each for each in service["volumes"]}
        # A bind mount of what is not there would be made by root.
        assert all((where / each["source"]).is_dir() for each in mounts.values())
        if name == "server":
            continue
        home = where / mounts["/party"]["source"]
        assert mounts["/party/records"].get("read_only") is True
        assert (home / "records" / "records.npz").exists()
        ledger = Path("/party") / SiteSettings.read(home).ledger
        assert ledger.parent == Path(mounts["/party/ledger"]["target"])
        assert where / mounts["/party/ledger"]["source"] == home / "ledger"


def test_parties_with_like_names_have_labels_of_their_own():
    names = ["server", "Ward 1", "ward-1", "ward_1", "ward-1-2", "Server", "病院", "x" * 90]
    labels = packaging._labels(names)
    assert (labels["Ward 1"], labels["ward-1"]) == ("ward-1", "ward-1-2")
    assert len({*labels.values()}) == len(names)
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", one) for one in labels.values())
    assert max(map(len, labels.values())) < 50


def rendered(where, role, values):
    """A chart's documents with the values put in, by nothing but their names."""
    chart = where / "helm" / role
    told = yaml.safe_load((chart / "values.yaml").read_text())
    told |= yaml.safe_load((where / "helm" / values).read_text())
    for path in sorted((chart / "templates").iterdir()):
        text = re.sub(r"{{ \.Values\.(\w+) }}", lambda at: str(told[at[1]]), path.read_text())
        assert "{{" not in text
        yield from yaml.safe_load_all(text)


def test_charts_render_to_hardened_workloads(packaged):
    where = packaged("helm")
    site = {one["kind"]: one for one in rendered(where, "site", "site-03.yaml")}
    server = {one["kind"]: one for one in rendered(where, "server", "server.yaml")}
    assert (site.keys(), server.keys()) == (
        {"StatefulSet"},
        {"Job", "Service", "PersistentVolumeClaim"},
    )
    federation = Federation.read(where / "server" / "federation.toml")
    ports = server["Service"]["spec"]["ports"]
    assert federation.address == f"{server['Service']['metadata']['name']}:{ports[0]['port']}"
    for of, role in ((site["StatefulSet"], "site"), (server["Job"], "server")):
        pod = of["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        for container in (*pod["initContainers"], *pod["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        (party,) = pod["containers"]
        assert party["args"] == ["deploy", role, "/party"]
        claims = [one["metadata"]["name"] for one in of["spec"].get("volumeClaimTemplates", [])]
        volumes = {one["name"] for one in pod["volumes"]} | {*claims}
        assert {one["name"] for one in party["volumeMounts"]} <= volumes
        assert "livenessProbe" not in party
    failing = server["Job"]["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    assert failing == [FedpactError.exit_code]
    assert TransportLost.exit_code not in failing
    (party,) = site["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    mounts = {one["name"]: one for one in party["volumeMounts"]}
    assert mounts["records"] == {
        "name": "records",
        "mountPath": "/party/records",
        "readOnly": True,
    }


@pytest.mark.parametrize("kind", ["1.31", "1.37"])
def test_charts_fit_the_schemas_of_kubernetes(packaged, kind):
    schemas = pytest.importorskip("kubernetes_validate", reason="its schemas are not installed")
    where = packaged("helm")
    for role, values in (("server", "server.yaml"), ("site", "site-00.yaml")):
        for document in rendered(where, role, values):
            schemas.validate(document, kind, strict=True)


def test_units_are_what_systemd_takes(packaged, tmp_path):
    where = packaged("systemd") / "systemd"
    units = sorted(where.iterdir())
    for unit in units:
        text = unit.read_text()
        told = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"\w+=", line))
        assert told["RestartPreventExitStatus"] == str(FedpactError.exit_code)
        assert told["Restart"] == "on-failure"
        assert told["ProtectSystem"] == "strict"
        assert told["ExecStart"].endswith(told["ReadWritePaths"])
        assert told["NoNewPrivileges"]
        # Where it is to lie nothing lies here.
        text = text.replace("/opt/fedpact/bin/fedpact", shutil.which("true"))
        (tmp_path / unit.name).write_text(text)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    command = ["systemd-analyze", "verify", *(tmp_path / unit.name for unit in units)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_tar_of_a_chart_has_no_record_and_no_ledger(packaged, tmp_path):
    where = packaged("helm")
    (where / "sites" / "site-00" / "ledger" / "ledger.jsonl").write_text("{}\n")
    lines = (where / "helm" / "README.md").read_text().splitlines()
    for line in (line for line in lines if line.startswith("tar ")):
        subprocess.run(line.split(), cwd=where, check=True)
        with tarfile.open(where / "party.tar") as tar:
            names = tar.getnames()
        assert {"./plan.json", "./federation.toml", "./ca.crt"} < {*names}
        assert not [name for name in names if re.search(r"records|ledger|\.npz|site\.db", name)]
    (where / "party.tar").unlink()
    (where / "sites" / "site-00" / "ledger" / "ledger.jsonl").unlink()


def test_health_is_of_the_process_and_its_connection(site_dir, deployment):
    assert find_outage(site_dir) == f"no process runs in {site_dir}"
    address = Federation.read(site_dir / "federation.toml").address
    for where in (site_dir, deployment / "server"):
        process = spawner()("", where)
        try:
            assert "does not answer" in find_outage(where)
            done = CliRunner().invoke(app, ["deploy", "health", str(where)])
            assert done.exit_code == 1
            assert "does not answer" in done.output
            node = where / "flower" / "node"
            node.parent.mkdir(exist_ok=True)
            node.touch()
            with socket.create_server(("127.0.0.1", int(address.rsplit(":", 1)[1]))):
                assert CliRunner().invoke(app, ["deploy", "health", str(where)]).exit_code == 0
            for seconds in (-61, 61):
                os.utime(node, (0, time.time() + seconds))
                if where == site_dir:
                    assert "is not connected to the server" in find_outage(where)
        finally:
            process.kill()
            process.wait()
    with pytest.raises(DataError, match="says no port"):
        find_outage(deployment)


@pytest.mark.slow  # a minute each: a wheel is built, and a federation runs
@pytest.mark.parametrize("flower", ["==1.41.*", "==1.42.*"])
def test_built_wheel_runs_a_federation(tmp_path, flower):
    """In an environment of its own, which finds the packages under test and not this checkout."""
    quiet = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [sys.executable, *quiet, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT]
    if subprocess.run(build, check=False).returncode:
        pytest.skip("the wheel cannot be built: no index answers, and hatchling is not here")
    (wheel,) = tmp_path.glob("fedpact-*.whl")
    venv.create(tmp_path / "v")
    python = tmp_path / "v" / "bin" / "python"
    (packages,) = (tmp_path / "v" / "lib").glob("python3*/site-packages")
    (packages / "others.pth").write_text(str(Path(torch.__file__).parents[1]))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def install(*what):
        command = [sys.executable, *quiet, "--python", python, "install", *what]
        return subprocess.run(command, env=env, cwd=tmp_path).returncode

    assert install("--no-index", "--force-reinstall", "--no-deps", wheel) == 0
    if version("flwr").startswith(flower.strip("=*")):
        # All that the extra asks for is there.
        assert install("--no-index", "fedpact[deploy]") == 0
    elif install("--no-deps", f"flwr{flower}"):
        pytest.skip(f"no index has flwr{flower}")
    where = [python, "-c", "import fedpact, flwr; print(fedpact.__file__, flwr.__version__)"]
    found = subprocess.run(where, capture_output=True, text=True, env=env, cwd=tmp_path).stdout
    assert found.startswith(str(packages))
    assert found.split()[1].startswith(flower.strip("=*"))
    fedpact = tmp_path / "v" / "bin" / "fedpact"
    where = tmp_path / "d"
    sets = ["--set=rounds=1", "--set=sites=2", "--as=compose", "--host=127.0.0.1"]
    for command in (["init", where, f"--port={free_port()}", *sets], ["up", where]):
        done = subprocess.run(
            [fedpact, "deploy", *command], capture_output=True, text=True, env=env, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
    assert (where / "deploy.lock").exists()
    assert "round 1" in done.stdout


@pytest.mark.slow
def test_five_run_by_the_commands_of_compose(packaged, tmp_path):
    """As processes: /party is the directory that is mounted there, and the server's name here."""
    where = tmp_path / "d"
    shutil.copytree(packaged("compose"), where)
    port = free_port()
    for path in where.rglob("federation.toml"):
        path.write_text(path.read_text().replace('"server:8443"', f'"127.0.0.1:{port}"'))
    services = yaml.safe_load((where / "compose.yaml").read_text())["services"]
    homes, started = {}, {}
    for path in where.glob("sites/*/records"):
        path.chmod(0o500)
    try:
        for name, service in services.items():
            homes[name] = where / service["volumes"][0]["source"]
            command = [
                str(homes[name]) if word == "/party" else word for word in service["command"]
            ]
            with (homes[name] / "log.txt").open("wb") as log:
                started[name] = subprocess.Popen(
                    [*FEDPACT, *command], stdout=log, stderr=log, preexec_fn=die_with_parent
                )
        wait_for(
            lambda: started["server"].poll() is not None or not find_outage(homes["site-00"]), where
        )
        wait_for(lambda: started["server"].poll() is not None, where)
        assert started["server"].returncode == 0, (homes["server"] / "log.txt").read_text()
        for name in homes.keys() - {"server"}:
            assert started[name].poll() is None
            # What each has spent lies in the ledger's own directory.
            assert read_receipt(homes[name] / "ledger" / "ledger.jsonl")["runs"]
            assert (homes[name] / "run" / "summary.json").exists()
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait()
    assert {p.returncode for n, p in started.items() if n != "server"} == {128 + 15}
