"""A round of secure aggregation in one process, and over Flower."""

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric import ec

from benchmarks.deployment import run_all_parties
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import Others, Spread
from fedpact.algorithms import Summed
from fedpact.common.messages import Refusal, Reply, Step, Task
from fedpact.deployment.files import write_deployment
from fedpact.plan import Plan
from fedpact.simulation.secure_aggregation import messages
from fedpact.simulation.secure_aggregation.client import Masker, UnmaskedSums
from fedpact.simulation.secure_aggregation.encoding import FixedPointMean
from fedpact.simulation.secure_aggregation.graph import MaskingGraph, Neighbourhoods
from fedpact.simulation.secure_aggregation.keys import SUMS_AHEAD, KeyContext
from fedpact.simulation.secure_aggregation.session import Session

TITLE = "Secure aggregation"
ABOUT = (
    "`secure`: processor time of all sites and the server together on one core, without training:"
    " d numbers per site, two thirds of the sites must remain, a tenth may collude with the "
    "server. A round without dropouts, including its twentieth of a session's keys and shares; "
    "*all others*: every pair of sites shares a mask, as with few sites. `deployed`: a round of "
    "three processes and a server on this machine over Flower, with TLS, compared with the same "
    "round without secure aggregation. Measured with sites that looked for work every three "
    "seconds."
)
NAMES = ("secure", "deployed")
_PORT = 18950


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    torch.set_num_threads(1)
    return _deployed(scale) if name == "deployed" else _alone(scale)


def _alone(scale: Scale) -> tuple[list[Row], bool]:
    rows, others = list[Row](), Others()
    for sites, d in scale.of(((20, 7850), (40, 7850), (100, 7850), (100, 100_000)), ((16, 10),)):
        for everybody in (True, False):
            begin, each = _seconds(sites, d, everybody, scale.of(3, 1))
            goal = {"goal": 5.0} if not everybody and (sites, d) == (100, 7850) else {}
            found = Spread.of([begin / SUMS_AHEAD + one for one in each])
            who = "all others" if everybody else f"{_circle(sites, False).graph.neighbours} others"
            rows.append(
                Row(
                    f"{sites} sites, d = {d:,}, masks with {who}",
                    found.median,
                    found.low,
                    found.high,
                    "s",
                    **goal,
                    note=f"a session begins in {begin:.2f} s, then {found.median:.2f} s a round",
                )
            )
    return rows, not others.undisturbed


def _circle(sites: int, everybody: bool) -> MaskingGraph:
    threshold = 2 * sites // 3 + 1
    circle = MaskingGraph([f"site-{i:03d}" for i in range(sites)], threshold, max(1, sites // 10))
    if everybody:
        circle = MaskingGraph([f"site-{i:03d}" for i in range(sites)], threshold, threshold - 1)
        circle.graph = Neighbourhoods(sites, (), threshold)
    return circle


def _seconds(sites: int, d: int, everybody: bool, rounds: int) -> tuple[float, list[float]]:
    """Return how long a session takes to begin, and each of its sums."""
    circle = _circle(sites, everybody)
    own = {f"site-{i:03d}": ec.generate_private_key(ec.SECP256R1()) for i in range(sites)}
    public = {site: key.public_key() for site, key in own.items()}
    coding, w = FixedPointMean(float(sites), Summed(), sites), torch.randn(d)
    maskers = {
        site: Masker(site, key, public, circle, coding, UnmaskedSums(None))
        for site, key in own.items()
    }

    def asked(site: str, question: Step) -> Step:
        def train(task: Task) -> Reply:
            return Reply("run", task.round, site, 1.0, {"w": w}, {})

        given = maskers[site].answer(question, train)
        if isinstance(given, Refusal):
            raise RuntimeError(f"{site} refuses {question.step!r}: {given.code}")
        return given

    began = time.process_time()
    session = Session(KeyContext.new("run", 1), public, circle, SUMS_AHEAD)
    for ask, take in (
        (session.ask_keys, session.take_keys),
        (session.ask_shares, session.take_shares),
        (session.ask_roster, session.take_roster),
    ):
        for site, question in ask().items():
            take(site, asked(site, question))
    begin, each = time.process_time() - began, list[float]()
    for number in range(1, rounds + 1):
        began = time.process_time()
        this = session.slot(number, coding)
        task = Task("run", number, "fedavg", {"w": torch.zeros(d)}, {})
        for site, question in this.ask_masked(dict.fromkeys(own, task)).items():
            this.take_masked(site, messages.reply_in(asked(site, question)))
        for site, question in this.ask_open().items():
            this.take_opened(site, asked(site, question))
        this.total()
        each.append(time.process_time() - began)
    return begin, each


def _deployed(scale: Scale) -> tuple[list[Row], bool]:
    others, rounds = Others(), scale.of(SUMS_AHEAD, 1)
    plan = Plan.parse({"sites": 3, "rounds": rounds, "run": {"evaluate_every": 10**6}})
    if scale.tiny:
        plain, masked = [1.0], [2.0]
    else:
        plain = _rounds(plan)
        secure = plan.secure_aggregation.model_copy(update={"threshold": 2})
        masked = _rounds(plan.model_copy(update={"secure_aggregation": secure}))
    one, other = (Spread.of(each) for each in (plain, masked))
    # As a mean: the session's first questions come in the first round, for all of them.
    ratio = statistics.mean(masked) / statistics.mean(plain)
    rows = [
        Row("a plain round", one.median, one.low, one.high, "s"),
        Row("a masked round", other.median, other.low, other.high, "s"),
        Row(f"masked beside plain, mean of {rounds} rounds", ratio, goal=2.2),
    ]
    return rows, not others.undisturbed


def _rounds(plan: Plan) -> list[float]:
    """Return the seconds of each round of a deployment on this machine."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "deployment"
        write_deployment(directory, plan, port=_PORT)
        lines = (run_all_parties(directory) / "rounds.jsonl").read_text().splitlines()
    return [record["seconds"] for record in map(json.loads, lines) if record["round"]]
