"""The protocol as pure objects: what comes out, what cannot come out, and what sites refuse.

The references are plain sums of the sites' vectors in float64; the tolerances are the bounds that
docs/notes/secure-aggregation.md states.
"""

import contextlib
import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from scipy.stats import chi2
from tests.simulation.secure_aggregation.conftest import SLOW

from fedpact.algorithms import Summed
from fedpact.common.errors import DataError, InputError
from fedpact.common.messages import Refusal, Step
from fedpact.deployment.store import Store, StoreSlot
from fedpact.simulation.secure_aggregation import encoding, keys, messages
from fedpact.simulation.secure_aggregation.client import UnmaskedSums, add_pair
from fedpact.simulation.secure_aggregation.session import BelowThreshold, Session

SIZES = range(3, 9)


def bound(party, survivors):
    """The stated error of a mean of |x| <= 16, in float64."""
    share = sum(party.sizes[site] for site in survivors) / party.weighing.total
    s = encoding.fraction_bits(party.count)
    return len(survivors) * 2.0 ** -(s + 1) / share + 2.0**-51 * 16


def check_mean(party, session, survivors):
    one = party.replies[party.sites[0]]
    layout = party.weighing.layout(encoding.Form.of(one.vectors, one.numbers))
    mean, _ = party.weighing.mean(party.task, session.replies, session.total(), layout)
    w, loss = party.mean(survivors)
    assert float((mean.vectors["w"] - w).abs().max()) <= bound(party, survivors)
    assert abs(mean.numbers["loss"] - loss) <= bound(party, survivors)


def patterns(count, threshold):
    """Every set of sites that leaves at least `threshold`, with a step at which each goes.

    Up to four sites each set with six choices of steps, of more with one, in turn.
    """
    steps, sets = SLOW, 0
    for gone in range(count - threshold + 1):
        for sites in itertools.combinations(range(count), gone):
            sets += 1
            for turn in range(6) if count <= 4 and gone else [sets]:
                yield {f"site-{i:02d}": steps[(turn + k) % 6] for k, i in enumerate(sites)}


@pytest.mark.parametrize(
    "count", [3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in SIZES if n > 4)]
)
def test_masked_and_plain_sums_agree_for_any_dropouts(party, count):
    """Every set of sites that may drop out; see `patterns` for when.

    Of five and more sites there are many sets, which find what those of up to four do.
    """
    threshold = count // 2 + 1
    for away in patterns(count, threshold):
        mine = party(count, threshold, length=9)
        this = mine.up_to(mine.session(), "unmask", away)
        survivors = [s for s in mine.sites if away.get(s, "unmask") in ("consistency", "unmask")]
        assert sorted(this.replies) == survivors
        check_mean(mine, this, survivors)


def test_a_shorter_masked_vector_is_not_added(party):
    """numpy would add its single word to all others."""
    mine = party(3, 2, length=9)
    this = mine.up_to(mine.session(), "masked")
    site, reply = next(iter(mine.mask.items()))
    short = reply.vectors[encoding.MASKED][: this.coding.bits // 8]
    with pytest.raises(InputError, match="1 words: expected"):
        this.take_masked(site, dataclasses.replace(reply, vectors={encoding.MASKED: short}))


@pytest.mark.parametrize("step", SLOW)
def test_below_the_threshold_nothing_is_opened(party, step, monkeypatch):
    """Two of four are left and the threshold is three."""
    mine = party(4, 3)
    session, sums, slot = mine.session(), [], Session.slot

    def kept(session, *about):
        sums.append(slot(session, *about))
        return sums[-1]

    monkeypatch.setattr(Session, "slot", kept)
    away = {"site-01": step, "site-02": step}
    with pytest.raises(BelowThreshold, match=r"2 sites .* threshold .* is 3"):
        mine.up_to(session, "unmask", away).total()
    # Before `unmask` no site was asked; at `unmask` two shares of each secret are no secret.
    opened = sums[0].opened if sums else {}
    assert set(opened) == ({"site-00", "site-03"} if step == "unmask" else set())
    if step == "unmask":
        parts = {mine.circle.place(site): opened[site]["seed/site-00"] for site in opened}
        with contextlib.suppress(InputError):
            assert not keys.is_committed(session.adverts["site-00"], 0, keys.recover_secret(parts))


def test_sites_refuse_lists_below_the_threshold(party):
    """The server might ask for less than it is to: each list is counted by the site as well."""
    mine = party(4, 3)
    session = mine.up_to(mine.session(), "keys")
    few = dict(list(session.adverts.items())[:2])
    question = messages.step(
        session.place, "site-00", "shares", {site: advert.pack() for site, advert in few.items()}
    )
    assert mine.answer("site-00", question) == Refusal("run", 1, "site-00", "few")

    mine = party(4, 3)
    session = mine.up_to(mine.session(), "shares")
    session.sealed = {site: session.sealed[site] for site in ("site-00", "site-01")}
    own = messages.under("share/", {"site-01": session.sealed["site-01"]["site-00"]})
    question = messages.step(session.place, "site-00", "roster", own)
    assert mine.answer("site-00", question) == Refusal("run", 1, "site-00", "few")

    mine = party(4, 3)
    session = mine.up_to(mine.session(), "roster")
    this = session.slot(1, mine.weighing)
    this.shown = dict(list(this.shown.items())[:2])
    question = this.ask_masked(dict.fromkeys(mine.sites, mine.task))["site-00"]
    assert mine.answer("site-00", question) == Refusal("run", 1, "site-00", "few")

    mine = party(4, 3)
    this = mine.up_to(mine.session(), "masked")
    question = listed(this, "site-00", ["site-00", "site-01"])
    assert mine.answer("site-00", question) == Refusal("run", 1, "site-00", "few")

    mine = party(4, 3)
    this = mine.up_to(mine.session(), "consistency")
    asks = this.ask_unmask()
    kept = dict(list(messages.blocks(asks["site-00"]).items())[:2])
    question = messages.step(this.place, "site-00", "unmask", kept)
    assert mine.answer("site-00", question) == Refusal("run", 1, "site-00", "few")


def listed(session, site, survivors):
    """Tell a site who is in the sum."""
    block = {"survivors": "\n".join(survivors).encode()}
    return messages.step(session.place, site, "consistency", block)


def unmask(mine, session, site, survivors):
    """Have these sites sign that they are in the sum, and ask one of them to open it."""
    signed = {
        peer: messages.block(mine.answer(peer, listed(session, peer, survivors)), "signature")
        for peer in survivors
    }
    return messages.step(session.place, site, "unmask", messages.under("signature/", signed))


def same(one, other):
    return {k: bytes(v.numpy()) for k, v in one.vectors.items()} == {
        k: bytes(v.numpy()) for k, v in other.vectors.items()
    }


def test_no_site_opens_both_secrets_of_another(party):
    """The same question again gets the same answer; another one, in this session or a later one
    over the same vectors, gets none."""
    mine = party(4, 3)
    session = mine.up_to(mine.session(), "masked")
    first, other = ["site-00", "site-01", "site-02"], ["site-00", "site-02", "site-03"]
    question = unmask(mine, session, "site-00", first)
    given = mine.answer("site-00", question)
    assert set(given.vectors) == {"seed/" + s for s in first} | {"mask/site-03"}
    assert same(mine.answer("site-00", question), given)
    again = [mine.answer("site-00", listed(session, "site-00", first)) for _ in range(2)]
    assert same(*again)
    assert mine.answer("site-00", listed(session, "site-00", other)).code == "asked"

    later = mine.up_to(mine.session(), "masked")
    assert mine.answer("site-00", listed(later, "site-00", other)).code == "opened"
    # A site that has agreed to nothing yet is free to.
    assert isinstance(mine.answer("site-03", listed(later, "site-03", other)), Step)


def test_a_server_that_tells_sites_different_lists_opens_none(party):
    """Of five sites with t = 3 two lists of three have one site in common, which signs one."""
    mine = party(5, 3)
    session = mine.up_to(mine.session(), "masked")
    one, other = ["site-00", "site-01", "site-02"], ["site-02", "site-03", "site-04"]
    signed = {}
    for names in (one, other):
        for site in names:
            answer = mine.answer(site, listed(session, site, names))
            if isinstance(answer, Step):
                signed[site] = messages.block(answer, "signature")
            else:
                assert (site, answer.code) == ("site-02", "asked")
    blocks = messages.under("signature/", signed)
    for site in mine.sites:
        question = messages.step(session.place, site, "unmask", blocks)
        assert mine.answer(site, question).code == "keys"
    # With the signatures of its own list alone a site of the second has too few.
    own = messages.under("signature/", {site: signed[site] for site in other[1:]})
    fresh = party(5, 3)
    later = fresh.up_to(fresh.session(), "masked")
    fresh.answer("site-03", listed(later, "site-03", other))
    question = messages.step(later.place, "site-03", "unmask", own)
    assert fresh.answer("site-03", question).code == "few"


WRONG = {
    "another list": {"names": ("site-00", "site-01", "site-02")},
    "another session": {"session": "x"},
    "another slot": {"slot": 1},
    "other keys": {"roster": keys.roster_of({})},
    "another site": {"site": "site-02"},
    "attempt": {"attempt": 1},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_signature_of_anything_else_opens_nothing(party, wrong):
    mine = party(4, 3)
    session = mine.up_to(mine.session(), "consistency")
    agreed = session.session

    def signature(site="site-01", names=mine.sites, roster=agreed.roster, attempt=0, **place):
        here = {"session": agreed.place.session, "slot": 0, **place}
        at = dataclasses.replace(agreed.place, session=here["session"]).of_slot(here["slot"], 1)
        return keys.sign_list(mine.keys[site], site, keys.of_attempt(attempt, roster), names, at)

    def take(given):
        answer = messages.step(session.place, "site-01", "consistency", {"signature": given})
        session.take_consistency("site-01", answer)

    take(signature())
    false = signature(**WRONG[wrong])
    with pytest.raises(keys.SecretsDoNotFit, match="site-01 has not signed"):
        take(false)
    session.signatures["site-01"] = false
    assert mine.answer("site-00", session.ask_unmask()["site-00"]).code == "keys"


def test_a_stranger_counts_not_among_those_who_signed(party):
    mine = party(4, 3)
    session = mine.up_to(mine.session(), "consistency", {"site-03": "masked"})
    names = sorted(session.replies)
    what = keys.of_attempt(0, session.session.roster)
    signed = session.signatures | {
        "site-03": keys.sign_list(mine.keys["site-03"], "site-03", what, names, session.place)
    }
    question = messages.step(
        session.place, "site-00", "unmask", messages.under("signature/", signed)
    )
    assert mine.answer("site-00", question).code == "keys"


@pytest.mark.parametrize(
    "survivors",
    [("site-01", "site-02", "site-03"), ("site-00", "site-01", "nobody")],
)
def test_a_site_opens_no_list_without_itself_or_with_strangers(party, survivors):
    """Its own vector would be what the sums of two lists differ by."""
    mine = party(4, 3)
    session = mine.up_to(mine.session(), "masked")
    assert mine.answer("site-00", listed(session, "site-00", survivors)).code == "session"


def test_opened_sums_outlive_a_restart(party, tmp_path):
    """Rule 3 of the page: one list for a round and attempt, on the disk before the answer; a new
    attempt, whose noise is fresh, may be opened again, an earlier one may not."""
    mine = party(4, 3)

    def restarted():
        return UnmaskedSums(StoreSlot(Store(tmp_path), "opened"))

    first, other = ("a", "b", "c"), ("a", "b", "d")
    assert restarted().allows(mine.task, first)
    assert restarted().allows(mine.task, first)
    assert not restarted().allows(mine.task, other)
    anew = dataclasses.replace(mine.task, attempt=1)
    assert restarted().allows(anew, other)
    assert not restarted().allows(anew, first)
    assert not restarted().allows(mine.task, first)
    assert restarted().allows(dataclasses.replace(mine.task, round=2), first)


def test_a_site_masks_one_vector_in_a_session(party):
    """Two vectors under the same masks would show their difference."""
    mine = party(3, 2)
    session = mine.up_to(mine.session(), "roster")
    this = session.slot(1, mine.weighing)
    question = this.ask_masked(dict.fromkeys(mine.sites, mine.task))["site-00"]
    first = messages.reply_in(mine.answer("site-00", question)).vectors["masked"]
    changed = dataclasses.replace(mine.replies["site-00"], vectors={"w": torch.ones(40).double()})
    mine.replies["site-00"] = changed
    again = messages.reply_in(mine.answer("site-00", question)).vectors["masked"]
    assert torch.equal(first, again)
    task = dataclasses.replace(mine.task, attempt=1)
    other = this.ask_masked(dict.fromkeys(mine.sites, task))["site-00"]
    assert mine.answer("site-00", other).code == "asked"


def test_out_of_order_or_foreign_questions_are_refused(party):
    mine = party(3, 2)
    session = mine.up_to(mine.session(), "keys")
    assert mine.answer("site-00", listed(session, "site-00", mine.sites)).code == "session"
    question = messages.step(session.place, "site-00", "unmask", {})
    assert mine.answer("site-00", question).code == "session"
    old, session = session, mine.up_to(mine.session(), "keys")
    assert mine.answer("site-00", old.ask_shares()["site-00"]).code == "session"
    mine.up_to(session, "roster")  # keys are the same question again
    task = dataclasses.replace(mine.task, round=2)
    asks = session.slot(1, mine.weighing).ask_masked(dict.fromkeys(mine.sites, task))
    assert mine.answer("site-00", asks["site-00"]).code == "session"


STRANGER = ec.generate_private_key(ec.SECP256R1())


def replaced(**fields):
    """An advert of site-01 with parts of another's."""
    return lambda mine, place, theirs, own: dataclasses.replace(
        theirs, **{field: getattr(own, of) for field, of in fields.items()}
    )


def signed(site, key=None, **changes):
    """One's own advert, signed by a site, or by a key, at this place or another."""
    return lambda mine, place, theirs, own: own.sign(
        key or mine.keys[site], site, dataclasses.replace(place, **changes)
    )


FORGED = {
    "unsigned": replaced(mask="mask"),
    "sealing key": replaced(seal="seal"),
    "seed": replaced(commitment="commitment"),
    "signed by a stranger": signed("site-01", STRANGER),
    "signed by another site": signed("site-02"),
    "of another session": signed("site-01", session="x"),
    "of another round": signed("site-01", round=2),
}


@pytest.mark.parametrize("name", FORGED)
def test_exchanged_keys_are_detected(party, name):
    """By the sites, which have everybody's long-term keys, and by the server."""
    mine = party(3, 2)
    session = mine.up_to(mine.session(), "keys")
    honest = session.adverts["site-01"]
    bad = FORGED[name](mine, session.place, honest, keys.Secrets(1).advert())
    with pytest.raises(keys.SecretsDoNotFit):
        take_keys(session, bad)
    session.adverts["site-01"] = bad
    assert mine.answer("site-00", session.ask_shares()["site-00"]).code == "keys"
    session.adverts["site-01"] = honest
    assert isinstance(mine.answer("site-02", session.ask_shares()["site-02"]), Step)


def take_keys(session, advert):
    """Give the server keys of site-01."""
    step = messages.step(session.place, "", "keys", {"keys": advert.pack()})
    session.take_keys("site-01", step)


@pytest.mark.parametrize("field", ["mask", "seal"])
@pytest.mark.parametrize("bad", [bytes(32), b"short"])
def test_a_site_that_signs_no_keys_has_dropped_out(party, field, bad):
    """All others would refuse to go on with them. The point 0 agrees with everybody on 0."""
    mine = party(3, 2)
    session = mine.up_to(mine.session(), "keys")
    honest = session.adverts["site-01"]
    advert = dataclasses.replace(honest, **{field: bad}).sign(
        mine.keys["site-01"], "site-01", session.place
    )
    with pytest.raises(keys.SecretsDoNotFit, match="site-01"):
        take_keys(session, advert)
    take_keys(session, honest)


@pytest.mark.parametrize("length", [0, 31, 10**6])
def test_a_site_commits_to_a_hash(party, length):
    """It is relayed to everybody."""
    mine = party(3, 2)
    session = mine.up_to(mine.session(), "keys")
    advert = dataclasses.replace(session.adverts["site-01"], commitment=bytes(length))
    advert = advert.sign(mine.keys["site-01"], "site-01", session.place)
    with pytest.raises(keys.SecretsDoNotFit, match="not signed"):
        take_keys(session, advert)


def test_sealed_shares_have_a_longest(party):
    """They are relayed, unopened, to those they are for."""
    mine = party(3, 2)
    session = mine.up_to(mine.session(), "keys")
    question = session.ask_shares()["site-01"]
    honest = messages.blocks(mine.answer("site-01", question), "share/")
    session.take_shares(
        "site-01", messages.step(session.place, "", "shares", messages.under("share/", honest))
    )
    honest["site-00"] += bytes(10**6)
    swollen = messages.step(session.place, "", "shares", messages.under("share/", honest))
    with pytest.raises(InputError, match=r"sealed 1000094 bytes: expected 94"):
        session.take_shares("site-01", swollen)


def test_a_site_takes_no_other_keys_for_its_own(party):
    """Its own from an earlier session would be signed, but for that."""
    mine = party(3, 2)
    session = mine.up_to(mine.session(), "keys")
    own = keys.Secrets(1).advert().sign(mine.keys["site-00"], "site-00", session.place)
    session.adverts["site-00"] = own
    assert mine.answer("site-00", session.ask_shares()["site-00"]).code == "keys"


def test_shares_that_the_server_redirects_or_changes_do_not_open(party):
    mine = party(3, 2)
    for wrong in ("another's", "changed", "other direction"):
        session = mine.up_to(mine.session(), "shares")
        sealed = session.sealed
        if wrong == "another's":
            sealed["site-01"]["site-00"] = sealed["site-01"]["site-02"]
        elif wrong == "changed":
            block = bytearray(sealed["site-01"]["site-00"])
            block[-1] ^= 1
            sealed["site-01"]["site-00"] = bytes(block)
        else:
            sealed["site-01"]["site-00"] = sealed["site-00"]["site-01"]
        question = session.ask_roster()["site-00"]
        assert mine.answer("site-00", question).code == "keys", wrong


@pytest.mark.parametrize("change", ["one less", "one more"])
@pytest.mark.parametrize("step", ["shares", "unmask"])
def test_unrequested_shares_are_rejected(party, step, change):
    """One that is missing would be looked for in vain later, when it stops everybody."""
    mine = party(3, 2)
    this = mine.up_to(mine.session(), "keys" if step == "shares" else "consistency")
    question = (this.ask_shares if step == "shares" else this.ask_unmask)()["site-00"]
    blocks = messages.blocks(mine.answer("site-00", question))
    if change == "one less":
        blocks.popitem()
    else:
        blocks[next(iter(blocks)) + "x"] = b""
    answer = messages.step(this.place, "site-00", step, blocks)
    with pytest.raises(InputError, match=r"site-00 .* other s"):
        (this.take_shares if step == "shares" else this.take_opened)("site-00", answer)


def flipped(share):
    return share[:10] + bytes([share[10] ^ 1]) + share[11:]


BAD = {
    "another": lambda share, other: flipped(share),
    "somebody else's": lambda share, other: other,
    "empty": lambda share, other: b"",
    "long": lambda share, other: flipped(share) * 4,
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("liar", ["site-00", "site-02", "site-03"])
def test_site_with_wrong_shares_is_excluded_and_named(party, bad, liar, caplog):
    """There are three right ones of each secret without it, as many as the threshold."""
    mine = party(5, 3)
    session = mine.up_to(mine.session(), "unmask", {"site-04": "masked"})
    opened, other = session.opened[liar], session.opened["site-01"]
    session.opened[liar] = {name: BAD[bad](opened[name], other[name]) for name in opened}
    check_mean(mine, session, mine.sites[:4])
    named = [record.message for record in caplog.records if "wrong share" in record.message]
    # The shares of whoever comes last are not needed.
    assert len(named) == (0 if liar == "site-03" else 1)
    # Of two that open one share each may be the one.
    who = {liar, "site-01"} if bad == "somebody else's" else {liar}
    assert all(any(f": {site} has opened" in message for site in who) for message in named)


def test_two_sites_that_open_wrong_shares_are_done_without(party):
    mine = party(7, 4)
    session = mine.up_to(mine.session(), "unmask", {"site-06": "masked"})
    for liar in ("site-00", "site-02"):
        session.opened[liar] = {name: flipped(s) for name, s in session.opened[liar].items()}
    check_mean(mine, session, mine.sites[:6])


@pytest.mark.parametrize("secret", ["seed/site-00", "mask/site-04"])
@pytest.mark.parametrize("openers", [3, 4])
def test_dealer_of_invalid_shares_is_named_by_enough_others(party, secret, openers):
    """With no share to spare it may as well be one of those who opened them."""
    mine = party(5, 3)
    session = mine.up_to(mine.session(), "unmask", {"site-04": "masked"})
    for site in mine.sites[openers:4]:
        del session.opened[site]
    for opened in session.opened.values():
        opened[secret] = flipped(opened[secret])
    with pytest.raises(keys.SecretsDoNotFit) as found:
        session.total()
    assert found.value.by == (secret.partition("/")[2] if openers > 3 else "")


CELLS, DRAWS = 64, 4000
# A right stream is beyond it once in 1e9.
LIMIT = float(chi2.ppf(1 - 1e-9, CELLS - 1))


def chi_square(words):
    """Against the uniform law of the top 6 bits, in 64 cells of equal chance."""
    counts = np.bincount((words >> np.uint64(58)).astype(int), minlength=CELLS)
    expected = len(words) / CELLS
    return float(((counts - expected) ** 2 / expected).sum())


def test_a_masked_vector_alone_is_uniform_and_a_plain_one_is_not(party):
    """Error rate 1e-9 for each of 6 masked vectors; the differences are of one site's vectors in
    two sessions, whose masks are independent. Without a mask the same test rejects."""
    mine = party(3, 2, length=DRAWS)
    found = []
    for _ in range(2):
        mine.up_to(mine.session(), "masked")
        found.append(mine.weighing.words(mine.mask["site-00"]))
        for words in map(mine.weighing.words, mine.mask.values()):
            assert chi_square(words) < LIMIT
    assert chi_square(found[0] - found[1]) < LIMIT
    reply = mine.replies["site-00"]
    plain = encoding.encode_fixed_point(
        reply.vectors, reply.numbers, reply.weight / mine.weighing.total, 3
    )
    assert chi_square(plain) > 100 * LIMIT


def test_one_mask_left_on_is_still_uniform(party):
    """What the server has of a site whose seed alone, or whose pair masks alone, it knows."""
    mine = party(3, 2, length=DRAWS)
    session = mine.session()
    this = mine.up_to(session, "masked")
    words = mine.weighing.words(mine.mask["site-00"])
    own = mine.maskers["site-00"]._session.secrets
    seed = keys.expand_seed(own.seed(0), words)
    assert chi_square(words - seed) < LIMIT
    for peer in ("site-01", "site-02"):
        pairs = np.zeros_like(words)
        public = session.adverts[peer].mask_of(0)
        add_pair(pairs, own.mask_key(0), public, ("site-00", peer), this.place, this.attempt)
        words = words - pairs
    assert chi_square(words) < LIMIT
    assert chi_square(words - seed) > 100 * LIMIT


@pytest.mark.parametrize("count", SIZES)
def test_the_sum_cannot_wrap(count):
    """All coordinates at the end of the range, all weight on every site, is the worst there is."""
    x = {"w": torch.tensor([2.0**40, -(2.0**40), encoding.RANGE, -encoding.RANGE])}
    words = encoding.encode_fixed_point(x, {}, 1.0, count)
    total = sum(int(word) for word in words.view(np.int64)[:1].tolist()) * count
    assert total == count * 2 ** (20 + encoding.fraction_bits(count)) < 2**63
    summed = np.zeros_like(words)
    for _ in range(count):
        summed = summed + words
    back, _ = encoding.decode_fixed_point(
        summed, float(count), count, encoding.Form({"w": (x["w"].shape, x["w"].dtype)}, ())
    )
    assert back["w"].tolist() == [encoding.RANGE, -encoding.RANGE, encoding.RANGE, -encoding.RANGE]


def test_many_sites_are_refused_before_they_leave_no_bits():
    assert encoding.fraction_bits(2**18) == 24
    with pytest.raises(InputError, match=r"262145 sites.*2\^18"):
        encoding.fraction_bits(2**18 + 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_is_not_part_of_a_sum(party, value):
    with pytest.raises(DataError):
        encoding.encode_fixed_point({"w": torch.tensor([1.0, value])}, {}, 0.5, 3)
    mine = party(3, 2)
    reply = mine.replies["site-01"]
    mine.replies["site-01"] = dataclasses.replace(reply, numbers={"loss": value})
    session = mine.up_to(mine.session(), "roster")
    this = session.slot(1, mine.weighing)
    question = this.ask_masked(dict.fromkeys(mine.sites, mine.task))["site-01"]
    assert mine.answer("site-01", question).code == "range"


def test_numbers_that_are_public_stay_and_may_be_the_weight(party):
    """With ω_i = q_i N_i, as ldp_fedsgd has it."""
    mine = party(3, 2, summed=Summed("batch_size", ("batch_size",)))
    weights = {"site-00": 3.0, "site-01": 1.0, "site-02": 4.0}
    for site, reply in mine.replies.items():
        numbers = {"batch_size": weights[site], "loss": reply.numbers["loss"]}
        mine.replies[site] = dataclasses.replace(reply, numbers=numbers)
    this = mine.up_to(mine.session(), "open")
    assert {s: r.numbers for s, r in mine.mask.items()} == {
        site: {"batch_size": weight} for site, weight in weights.items()
    }
    mine.sizes = weights
    check_mean(mine, this, mine.sites)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, 1e9])
def test_a_weight_beyond_the_declared_sizes_is_refused(party, weight):
    mine = party(3, 2)
    reply = dataclasses.replace(mine.replies["site-00"], weight=weight)
    with pytest.raises(InputError, match="weight of site-00"):
        mine.weighing.weight(reply)
