"""A site by itself: what it promises, answers, repeats and refuses."""

import os
import shutil

import pytest
import torch
from tests.deployment.grid import FLOATS, events_in, stored

from fedpact.common.errors import DataError, LedgerError, PlanError, PolicyRefused
from fedpact.common.messages import Refusal, Reply, State, Task, from_bytes, to_bytes
from fedpact.deployment.federation import Federation
from fedpact.deployment.site import Site, answer
from fedpact.deployment.store import LastReply
from fedpact.privacy.accounting.accountant import SampledGaussian, epsilon
from fedpact.privacy.ledger.receipt import receipt


def task_of(site, number=1, included=-1, **changes):
    d = site.plan.method.init(torch.zeros(650)).vectors["w"].numel()
    fields = {
        "run": site.run,
        "round": number,
        "algorithm": site.plan.algorithm,
        "vectors": {"w": torch.zeros(d)},
        "numbers": {},
        "included": included,
    }
    return Task(**{**fields, **changes})


def charged(directory):
    return events_in(directory / "ledger.jsonl")


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_it_charges_then_replies(site_dir):
    with Site(site_dir) as site:
        reply = from_bytes(site.handle(task_of(site)))
        assert isinstance(reply, Reply)
        # The reply names the ledger as it is after the charge of τ = 2 events.
        assert (reply.ledger_head, reply.ledger_length) == (site.ledger.head, site.ledger.length)
    found = receipt(site_dir / "ledger.jsonl")
    assert charged(site_dir) == 2
    assert found["hypothetical"] is False
    assert found["head"] == reply.ledger_head


def test_repeated_question_gets_the_stored_reply_after_restart(site_dir):
    with Site(site_dir) as site:
        task = task_of(site)
        first = site.handle(task)
        assert site.handle(task) == first
    with Site(site_dir) as site:
        assert site.handle(task) == first
    # Secure draws never come again: equal bytes can only have been stored. And only one charge.
    assert charged(site_dir) == 2


def test_second_question_in_a_round_is_refused_uncharged(site_dir):
    with Site(site_dir) as site:
        site.handle(task_of(site, 2))
        for late in (
            task_of(site, 1),
            task_of(site, 2, vectors={"w": torch.ones(650)}),
            task_of(site, 2, included=1),
        ):
            refusal = from_bytes(site.handle(late))
            assert refusal == Refusal(site.run, late.round, "site-00", "stale")
        assert isinstance(from_bytes(site.handle(task_of(site, 2, attempt=1))), Reply)
    assert charged(site_dir) == 4


def test_other_run_or_algorithm_is_refused_uncharged(site_dir):
    with Site(site_dir) as site:
        other = task_of(site, run="somebody-elses")
        assert from_bytes(site.handle(other)) == Refusal(other.run, 1, "site-00", "run")
        assert from_bytes(site.handle(task_of(site, algorithm="fedfdp"))).code == "policy"
    assert charged(site_dir) == 0


def test_the_budget_ends_with_the_reservation(site_dir):
    with Site(site_dir) as site:
        answers = [from_bytes(site.handle(task_of(site, number))) for number in range(1, 8)]
    assert [type(a) for a in answers] == [Reply] * 5 + [Refusal] * 2
    assert {a.code for a in answers[5:]} == {"budget"}
    run = next(iter(receipt(site_dir / "ledger.jsonl")["runs"].values()))
    assert run["epsilon_spent"] <= run["epsilon_reserved"] == 2.0


def test_spare_rounds_pay_for_what_a_crash_took(make, tmp_path):
    """One round is charged twice, as when a site dies between charge and commit; all five are
    answered, within the same ε."""
    directory = make(tmp_path / "d", budget={"spare_rounds": 1}) / "sites" / "site-00"
    with Site(directory) as site:
        site.take_part()
        site._client.handle(task_of(site, 3), site._bench)
        answers = [from_bytes(site.handle(task_of(site, number))) for number in range(1, 8)]
    assert [type(a) for a in answers] == [Reply] * 5 + [Refusal] * 2
    run = next(iter(receipt(directory / "ledger.jsonl")["runs"].values()))
    (event,) = run["events"]
    assert event["spent"] == event["reserved"] == 2 * (5 + 1)
    assert run["epsilon_spent"] <= run["epsilon_reserved"] == 2.0


def test_site_computes_and_reports_the_precision_of_the_plan(make, tmp_path):
    sites = make(tmp_path / "d", run={"precision": "bf16"}) / "sites"
    with Site(sites / "site-00") as site:
        assert isinstance(from_bytes(site.handle(task_of(site, 1))), Reply)
        assert site._bench.kernel.model.precision == "bf16"
    (run,) = receipt(sites / "site-00" / "ledger.jsonl")["runs"].values()
    assert run["precision"] == ["bf16"]
    assert len(run["placement"]) == 1


def test_two_sites_and_two_rounds_never_draw_alike(deployment):
    vectors = []
    for name in ("site-00", "site-01"):
        with Site(deployment / "sites" / name) as site:
            for number in (1, 2):
                vectors.append(from_bytes(site.handle(task_of(site, number))).vectors["w"])
    # 650 coordinates of continuous noise: equal ones have probability 0.
    for i, one in enumerate(vectors):
        assert all(not torch.equal(one, other) for other in vectors[:i])


def test_the_log_counts_what_the_ledger_has_charged(site_dir):
    """One ε is stated, the ledger's; a bound on the way would be another one."""
    with Site(site_dir) as site:
        for number in range(1, 6):
            _, told = answer(site, to_bytes(task_of(site, number)))
            charged = sum(site.ledger.spent(site.run).values())
            assert f"; {charged} of " in told
            assert "ε" not in told


def test_internal_failure_sends_only_an_error_code(site_dir, monkeypatch):
    with Site(site_dir) as site:

        def fail(*_):
            raise ValueError("record 17 has value 0.25")

        monkeypatch.setattr(site._client, "handle", fail)
        block, told = answer(site, to_bytes(task_of(site)))
        assert from_bytes(block) == Refusal(site.run, 1, "site-00", "error")
        assert b"0.25" not in block
        assert "0.25" in told  # the owner's own log has it
        block, _ = answer(site, to_bytes(State()))
        assert from_bytes(block) == Refusal("", 0, "site-00", "error")
        assert from_bytes(answer(site, b"no message")[0]).code == "error"


def test_one_process_at_a_time(site_dir):
    with Site(site_dir), pytest.raises(LedgerError, match="open elsewhere"):
        Site(site_dir)


def test_without_a_policy_it_takes_part_in_nothing(site_dir):
    (site_dir / "policy.toml").unlink()
    with pytest.raises(PlanError, match="takes part in no run"):
        Site(site_dir)


def test_second_run_on_same_records_needs_policy_for_both(site_dir):
    with Site(site_dir) as site:
        first = site.run
        site.take_part()
    change(site_dir / "federation.toml", f'run = "{first}"', 'run = "another"')
    with pytest.raises(PolicyRefused, match=r"epsilon would be 4.*epsilon_ever = 2"):
        Site(site_dir)
    change(site_dir / "policy.toml", "epsilon_ever = 2.0", "epsilon_ever = 4.0")
    change(site_dir / "policy.toml", "delta_ever = 1e-05", "delta_ever = 2e-05")
    with Site(site_dir) as site:
        site.take_part()
        assert site.ledger.total() == pytest.approx((4.0, 2e-5), rel=1e-12)
        terms = site._terms
    # Each reservation by itself, so that a reader can count it anew.
    told = receipt(site_dir / "ledger.jsonl")["runs"]
    assert [*told] == [first, "another"]
    for run in told.values():
        events = {(e["q"], e["sigma"]): e["reserved"] for e in run["events"]}
        assert events == {(e.q, e.sigma): n for e, n in terms.history(terms.steps).items()}
        whole = {SampledGaussian(*event): n for event, n in events.items()}
        assert epsilon(whole, run["delta"]) <= run["epsilon_reserved"]


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("site.toml", 'name = "site-00"', 'name = "site-99"', "site-99"),
        ("site.toml", 'data_set = "site-00"', 'data_set = ""', "data_set"),
        ("site.toml", 'data_set = "site-00"', 'data_set = "a\\nb"', "data_set"),
        ("site.toml", '"records.npz"', '"nothing.npz"', "nothing.npz"),
        ("federation.toml", "shape = [1, 8, 8]", "shape = [1, 9, 9]", r"\(1, 9, 9\)"),
        ("federation.toml", 'seeds = "secure"', 'seeds = "none"', "seeds"),
        ("federation.toml", "retries = 2", "retries = -1", "retries"),
        ("federation.toml", "least_replies = 1", "least_replies = 4", "there are 3"),
        ("plan.json", '"mode": "per_sample"', '"mode": "none"', "only private runs"),
        ("plan.json", '"sizes": "public"', '"sizes": "noisy"', "declares its size"),
    ],
)
def test_files_that_do_not_match_are_reported_separately(site_dir, file, old, new, told):
    change(site_dir / file, old, new)
    with pytest.raises((PlanError, DataError), match=told):
        Site(site_dir)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("epsilon_per_run = 2.0", "epsilon_per_run = 1.9", "epsilon_per_run = 1.9"),
        ("epsilon_ever = 2.0", "epsilon_ever = 1.9", "epsilon_ever = 1.9"),
        ('releases = ["gradient"]', 'releases = ["loss"]', "gradient"),
        ('algorithms = ["fedavg"]', 'algorithms = ["fedfdp"]', "fedavg"),
        ("smallest_sigma = ", "smallest_sigma = 1", "smallest_sigma"),
    ],
)
def test_run_outside_policy_is_refused_before_reserving(site_dir, old, new, told):
    change(site_dir / "policy.toml", old, new)
    with pytest.raises(PolicyRefused, match=told):
        Site(site_dir)
    assert receipt(site_dir / "ledger.jsonl")["runs"] == {}


def test_test_seeds_are_refused_over_a_network(site_dir):
    path = site_dir / "federation.toml"
    change(path, 'seeds = "secure"', 'seeds = "test"')
    assert Federation.read(path).seeds == "test"
    address = Federation.read(path).address
    for host in ("192.168.1.7", "example.org", "0.0.0.0"):
        new = f"{host}:8443"
        change(path, f'address = "{address}"', f'address = "{new}"')
        address = new
        with pytest.raises(PlanError, match="protects no one"):
            Federation.read(path)


def test_test_seed_ledger_and_real_ledger_do_not_mix(site_dir, tmp_path):
    test = shutil.copytree(site_dir, tmp_path / "test")
    change(test / "federation.toml", 'seeds = "secure"', 'seeds = "test"')
    with Site(test) as one, Site(site_dir) as other:
        assert one.ledger.hypothetical
        assert not other.ledger.hypothetical
    for a, b in ((test, site_dir), (site_dir, test)):
        mixed = shutil.copytree(a, tmp_path / f"{a.name}-with-{b.name}")
        shutil.copy(b / "ledger.jsonl", mixed / "ledger.jsonl")
        with pytest.raises(LedgerError, match="was opened as"):
            Site(mixed)


def test_memory_is_written_with_its_reply_or_not_at_all(make, tmp_path, monkeypatch):
    """Nothing is remembered of a round whose reply could not be stored."""
    whole = make(tmp_path / "fedfdp", algorithm="fedfdp", settings={})

    def full(*_):
        raise OSError(28, "No space left")

    with Site(directory := whole / "sites" / "site-00") as site:
        assert isinstance(from_bytes(site.handle(task_of(site, numbers={"loss": 2.0}))), Reply)
        before = stored(directory, f"{site.run}/memory")
        monkeypatch.setattr(LastReply, "keep", full)
        with pytest.raises(OSError, match="No space"):
            site.handle(task_of(site, 2, 1, numbers={"loss": 2.0}))
        assert before == stored(directory, f"{site.run}/memory") is not None


@pytest.mark.parametrize("how", [{"algorithm": "fedfdp"}, {"algorithm": "mr_mtl"}])
def test_another_run_in_a_directory_begins_with_no_memory(make, tmp_path, how):
    """Its answers are those of a directory in which no run was before."""
    whole = make(tmp_path / "d", {"seeds": "test"}, settings={}, **FLOATS, **how)
    used, fresh = (whole / "sites" / "site-00", tmp_path / "fresh")
    numbers = {"loss": 2.0} if how["algorithm"] == "fedfdp" else {}
    replies = {}
    shutil.copytree(used, fresh)
    with Site(used) as site:
        first = site.run
        for number, included in ((1, -1), (2, 1)):
            block = site.handle(task_of(site, number, included, numbers=numbers))
            assert isinstance(from_bytes(block), Reply)
        assert site._client.read_memory(task_of(site, 2, 2)) != State()
    for directory in (used, fresh):
        change(directory / "federation.toml", f'run = "{first}"', 'run = "another"')
        change(directory / "policy.toml", "epsilon_ever = 2.0", "epsilon_ever = 4.0")
        change(directory / "policy.toml", "delta_ever = 1e-05", "delta_ever = 2e-05")
        with Site(directory) as site:
            assert from_bytes(site.handle(task_of(site, run=first))).code == "run"
            answers = [from_bytes(site.handle(task_of(site, numbers=numbers)))]
            answers.append(from_bytes(site.handle(task_of(site, 2, 1, numbers=numbers))))
            assert site.ending is None
        replies[directory] = [
            ({n: v.tolist() for n, v in a.vectors.items()}, a.numbers) for a in answers
        ]
    assert replies[used] == replies[fresh]


def test_ledgers_replies_and_memory_are_private_files(make, tmp_path):
    before = os.umask(0o022)
    try:
        directory = make(tmp_path / "d", algorithm="fedfdp", settings={}) / "sites" / "site-00"
        for number, included in ((1, -1), (2, 1)):
            with Site(directory) as site:
                site.handle(task_of(site, number, included, numbers={"loss": 2.0}))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
    private = {name for name, mode in modes.items() if mode == 0o600}
    assert private >= {
        *("ledger.jsonl", "site.db", "site.db-journal"),
        *("site.key", "records.npz"),
    }
    assert {"plan.json", "federation.toml", "ca.crt"}.isdisjoint(private)


def test_memory_follows_included_rounds_across_restart(make, tmp_path):
    """fedfdp keeps its loss bound. What round 1 left is used by round 3 only if the server says
    that it included round 1; round 2's, which it did not include, is dropped."""
    whole = make(tmp_path / "fedfdp", algorithm="fedfdp", settings={})
    directory = whole / "sites" / "site-00"

    def bound(version):
        run = Federation.read(directory / "federation.toml").run
        return from_bytes(stored(directory, f"{run}/memory")).numbers[f"{version}/loss_bound"]

    for number, included in ((1, -1), (2, 1), (3, 1)):
        with Site(directory) as site:
            task = task_of(site, number, included, numbers={"loss": 2.0})
            assert isinstance(from_bytes(site.handle(task)), Reply)
        if number == 1:
            first = bound("new")
    assert bound("old") == first
