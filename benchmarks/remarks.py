"""Why a row misses its target: (table, row) -> explanation. Written by hand."""

_TWO_THREADS = (
    "The sum is also read, rounded, added to and written; and two threads share the interpreter "
    "lock at every operation, so they gain only 1.4 to 1.8 times, varying from run to run."
)
_SMALL_STEPS = (
    "A pfl client is a plain step and a sum. A site of fedpact samples, clips, draws noise, "
    "writes its ledger, and sends a message that is checked: products, gathering its records and "
    "noise alone take 0.1 ms, more than a quarter of pfl's total, and most of the rest is "
    "Python, which two workers cannot run in parallel."
)

REMARKS: dict[tuple[str, str], str] = {
    ("step-B", "fedpact, batch 75"): (
        "The clipped sum takes nine tenths of it. The rest is a simulation's noise, at half the "
        "cost of torch's normal numbers, and the step itself."
    ),
    ("step-B", "Opacus, ghost / fedpact, batch 75"): (
        "Ghost norms cost Opacus two backward passes and little more; at a batch of 300, where "
        "noise counts less, it is 3.4 times."
    ),
    ("workers", "2 workers / 1"): (
        "Folding replies, committing the round and the interpreter's lock are shared by all "
        "workers: about 25 of 211 ms."
    ),
    ("accuracy", "Flower with Opacus, ghost / fedpact"): (
        "As in a round of ten sites: a step by ghost norms takes two to three times ours."
    ),
    ("noise", "secure on the grid, two threads / randn alone, d = 582,026"): _TWO_THREADS,
    ("noise", "secure on the grid, two threads / randn alone, d = 1,663,370"): _TWO_THREADS,
    ("noise", "secure on the grid, two threads / randn alone, d = 13,000,000"): _TWO_THREADS,
    ("round-B", "Flower with Opacus, ghost"): (
        "A step by ghost norms takes 2.8 times as long as fedpact's, and Flower adds at most a "
        "tenth to a plain loop over such steps."
    ),
    ("round-B", "pfl, no privacy in the clients"): (
        "pfl's clients neither clip nor add noise, and it writes nothing to the disk. fedpact "
        "spends 6 % of the round on noise, and as much on ledgers, messages and checkpoint. The "
        "ratio varies between 1.17 and 1.22 from day to day."
    ),
    ("round-100A", "pfl, no privacy in the clients"): _SMALL_STEPS,
    ("overhead", "a site and round"): (
        "Sampling, noise, ledger entry, messages and the oracle's checks are each 20 to 100 µs of "
        "Python; the commit's two flushes are shared by all sites."
    ),
}
