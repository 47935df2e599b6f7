"""Sessions: keys for several sums ahead, neighbours in place of everybody, one list of each sum."""

import dataclasses
import random

import numpy as np
import pytest
from tests.simulation.secure_aggregation.conftest import SLOW, Party
from tests.simulation.secure_aggregation.test_protocol import check_mean, listed, take_keys

from fedpact.common.messages import Step
from fedpact.simulation.secure_aggregation import keys, messages
from fedpact.simulation.secure_aggregation.client import UnmaskedSums
from fedpact.simulation.secure_aggregation.session import BelowThreshold


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_sum_over_all_sites_opens_in_two_steps(party, count):
    mine = party(count, count // 2 + 1)
    this = mine.up_to(mine.session(), "open")
    check_mean(mine, this, mine.sites)
    # Whoever does not answer the second is in it all the same.
    mine = party(5, 3)
    this = mine.up_to(mine.session(), "open", {"site-01": "open", "site-04": "open"})
    assert sorted(this.opened) == ["site-00", "site-02", "site-03"]
    check_mean(mine, this, mine.sites)


def test_each_sum_of_a_session_has_its_own_masks(party):
    """The second shows nothing of the first: no mask is used twice, whoever is missing."""
    mine, seen = party(4, 3), []
    session = mine.session(slots=4)
    for number, away in enumerate(({}, {"site-01": "masked"}, {"site-02": "unmask"}, {}), 1):
        this = mine.up_to(session, "unmask", away, number)
        check_mean(mine, this, [s for s in mine.sites if away.get(s) != "masked"])
        seen += [mine.weighing.words(r) for r in mine.mask.values()]
    # 42 words each; two that share one word, or a difference, in its place: once in 2^58.
    for i, one in enumerate(seen):
        for j, other in enumerate(seen[:i]):
            assert not (one == other).any()
            for third in seen[:j]:
                assert not (one - other == other - third).any()


def test_masks_of_unlike_attempts_do_not_cancel(party):
    """A server that asks one site for a new attempt, and the others for the old one, sees noise."""
    for attempts, cancel in (([1, 1, 1], True), ([1, 0, 0], False)):
        mine = party(3, 2)
        session = mine.up_to(mine.session(), "roster")
        this = session.slot(1, mine.weighing)
        tasks = {
            site: dataclasses.replace(mine.task, attempt=attempt)
            for site, attempt in zip(mine.sites, attempts, strict=True)
        }
        total = plain = np.zeros(mine.length + 1, dtype=np.uint64)
        for site, question in this.ask_masked(tasks).items():
            words = mine.weighing.words(messages.reply_in(mine.answer(site, question)))
            seed = mine.maskers[site]._session.secrets.seed(0)
            total = total + words - keys.expand_seed(seed, words)
            plain = plain + mine.weighing.encode(mine.task, mine.replies[site])
        assert (total == plain).all() if cancel else not (total == plain).any()


def test_a_slot_is_used_once_and_none_before_it_after(party):
    mine = party(3, 2)
    session = mine.session(slots=3)
    first = mine.up_to(session, "masked")
    second = mine.up_to(session, "masked", number=2)
    asks = first.ask_open()
    assert mine.answer("site-00", asks["site-00"]).code == "session"
    tasks = dict.fromkeys(mine.sites, dataclasses.replace(mine.task, round=3))
    again = dataclasses.replace(second, round=3)
    assert mine.answer("site-00", again.ask_masked(tasks)["site-00"]).code == "session"
    beyond = dataclasses.replace(second, number=3, round=3)
    assert mine.answer("site-00", beyond.ask_masked(tasks)["site-00"]).code == "session"
    last = dataclasses.replace(second, number=2, round=3)
    assert isinstance(mine.answer("site-00", last.ask_masked(tasks)["site-00"]), Step)


def test_site_signs_one_list_per_attempt(party):
    """In this session, or in a later one over the same vectors."""
    mine = party(4, 3)
    session = mine.session(slots=2)
    this = mine.up_to(session, "masked")
    few = mine.sites[:3]
    ask = messages.step(this.place, "site-00", "open", {})
    given = mine.answer("site-00", ask)
    assert set(given.vectors) == {"seed/" + site for site in mine.sites}
    assert mine.answer("site-00", listed(this, "site-00", few)).code == "opened"
    assert isinstance(mine.answer("site-01", listed(this, "site-01", few)), Step)
    ask = messages.step(this.place, "site-01", "open", {})
    assert mine.answer("site-01", ask).code == "opened"
    again = mine.up_to(session, "masked")
    assert mine.answer("site-00", listed(again, "site-00", few)).code == "opened"


def test_unsigned_opening_shows_fewer_than_t_shares(party):
    """A server that has some open the sum over all, and others one over a list: the first are
    fewer than t less those who collude, or there are no t signatures of the list."""
    mine = party(7, 5)
    this = mine.up_to(mine.session(), "masked")
    some, rest, corrupt = mine.sites[:2], mine.sites[2:5], mine.sites[5:]
    names = [s for s in mine.sites if s != "site-06"]
    signed = {}
    for site in rest + corrupt[:1]:
        answer = mine.answer(site, listed(this, site, names))
        signed[site] = messages.block(answer, "signature")
    assert len(signed) == 4
    opened = [mine.answer(site, messages.step(this.place, site, "open", {})) for site in some]
    assert len(opened) + len(corrupt) < mine.circle.threshold
    ask = messages.step(this.place, "site-02", "unmask", messages.under("signature/", signed))
    assert mine.answer("site-02", ask).code == "few"


def test_no_site_masks_with_others_than_t_have_signed(party):
    """Told another list of who is in the session, a site would mask with whom the server chose."""
    mine = party(5, 4)
    session = mine.up_to(mine.session(), "shares")
    asks = session.ask_roster()
    fewer = messages.blocks(asks["site-00"], "share/")
    del fewer["site-04"]
    told = messages.step(session.place, "site-00", "roster", messages.under("share/", fewer))
    assert isinstance(mine.answer("site-00", told), Step)
    for site in mine.sites[1:]:
        session.take_roster(site, mine.answer(site, asks[site]))
    this = session.slot(1, mine.weighing)
    asks = this.ask_masked(dict.fromkeys(mine.sites, mine.task))
    assert mine.answer("site-00", asks["site-00"]).code == "keys"
    assert isinstance(mine.answer("site-01", asks["site-01"]), Step)


def test_restarted_site_signs_nothing_for_its_former_session(party):
    """It has other keys; what it signs under the session's name counts with those alone."""
    mine = party(4, 3)
    session = mine.session()
    this = mine.up_to(session, "consistency", {"site-03": "consistency"})
    mine.maskers["site-03"] = mine.masker("site-03", UnmaskedSums(None))
    again = mine.session()
    again.place = session.place
    for site in mine.sites[:3]:
        mine.maskers[site] = mine.masker(site, UnmaskedSums(None))
    other = mine.up_to(again, "consistency")
    signed = other.signatures["site-03"]
    answer = messages.step(this.place, "site-03", "consistency", {"signature": signed})
    with pytest.raises(keys.SecretsDoNotFit, match="site-03 has not signed"):
        this.take_consistency("site-03", answer)


@pytest.mark.parametrize("slots", [0, keys.SUMS_AHEAD + 1, 10**9])
def test_keys_for_no_sum_or_too_many_are_not_made(party, slots):
    mine = party(3, 2)
    question = messages.step(mine.session().place, "site-00", "keys", {"slots": slots.to_bytes(4)})
    with pytest.raises(Exception, match=f"keys for {slots} sums: expected 1 to 20"):
        mine.answer("site-00", question)


def test_keys_and_shares_of_another_number_of_sums_are_refused(party):
    mine = party(3, 2)
    session = mine.up_to(mine.session(slots=2), "keys")
    longer = keys.Secrets(3).advert().sign(mine.keys["site-01"], "site-01", session.place)
    with pytest.raises(keys.SecretsDoNotFit, match="not signed"):
        take_keys(session, longer)
    session.adverts["site-01"] = longer
    assert mine.answer("site-00", session.ask_shares()["site-00"]).code == "keys"

    mine = party(3, 2)
    session = mine.up_to(mine.session(slots=2), "shares")
    own = mine.maskers["site-01"]._session.secrets
    short = own.encrypt("site-01", "site-00", session.adverts["site-00"].seal, b"x", session.place)
    session.sealed["site-01"]["site-00"] = short
    assert mine.answer("site-00", session.ask_roster()["site-00"]).code == "keys"


@pytest.fixture(scope="module")
def many():
    """Twenty of which two may be the server's: ten neighbours each."""
    mine = Party(20, 14, 2, length=9)
    assert mine.circle.graph.neighbours == 10
    return mine, mine.session(slots=keys.SUMS_AHEAD)


def test_neighbour_sum_equals_full_sum_for_any_survivors(many):
    """Whoever is missing at whichever step; 14 to 20 of twenty."""
    mine, session = many
    draw = random.Random(3)
    mine.up_to(session, "roster")
    for number, gone in enumerate([0, 3, 6, 2, 6], 1):
        steps = draw.choices(SLOW[3:], k=gone) if number > 3 else ["masked"] * gone
        away = dict(zip(draw.sample(mine.sites, gone), steps, strict=True))
        last = "unmask" if gone else "open"
        this = mine.up_to(session, last, away, number)
        survivors = [s for s in mine.sites if away.get(s) != "masked"]
        assert sorted(this.replies) == survivors
        plain = sum(mine.weighing.encode(mine.task, mine.replies[site]) for site in survivors)
        assert (this.total() == plain).all()


def test_shares_of_masks_go_to_neighbours_alone(many):
    mine, session = many
    if not session.signatures:
        mine.up_to(session, "roster")
    for site in mine.sites:
        around = mine.circle.around(site)
        assert len(around) == 11
        for peer, sealed in session.sealed[site].items():
            each = (2 if peer in around else 1) * keys.SHARE * session.slots
            assert len(sealed) == each + 28


def test_a_list_that_leaves_a_site_too_few_neighbours_is_refused(party):
    """Fourteen sites, but one of them with its neighbours gone: every site looks at all of them."""
    mine = party(20, 14, 2, length=3)
    # By chance alone one would not ask for so many of so few.
    mine.circle.graph = dataclasses.replace(mine.circle.graph, shares=6)
    this = mine.up_to(mine.session(), "masked")
    gone = sorted(mine.circle.around("site-00") - {"site-00"})[:6]
    names = [site for site in mine.sites if site not in gone]
    assert len(names) == mine.circle.threshold
    far = next(site for site in names if site not in mine.circle.around("site-00"))
    for site in ("site-00", far):
        assert mine.answer(site, listed(this, site, names)).code == "few"
    this.replies = {site: this.replies[site] for site in names}
    with pytest.raises(BelowThreshold, match="fewer than 6 of its neighbourhood"):
        this.ask_consistency()
