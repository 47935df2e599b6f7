"""Why a row misses its stretch, one sentence each: (table, row) -> sentence. Kept by hand."""

_TWO_THREADS = (
    "The sum is read, rounded, added to and written as well; and two threads that take turns with "
    "the interpreter at every operation gain 1.4 to 1.8 times, unevenly from run to run."
)
_SMALL_STEPS = (
    "A client of pfl's is a plain step and a sum. A site of ours samples, clips, draws noise, "
    "writes its ledger, and sends a message that is checked: products, gathering its records and "
    "noise alone are 0.1 ms, more than a quarter of what pfl takes in all, and most of the rest is "
    "Python, which two workers cannot share."
)

_MATRICES = (
    "A weight's gradient is made for each record, as 64 matrices that are written once and read "
    "twice where the plain step writes one: a third of the time. Ghost norms would save that, and "
    "with it what proves how far a record moves the sum."
)
_RECURRENCE = (
    "The plain LSTM is torch's fused one. Ours goes step by step, some twenty operations each, as "
    "the fused one does not tell the gradients of its gates."
)

REMARKS: dict[tuple[str, str], str] = {
    ("step-A", "fedpact, batch 75"): (
        "The clipped sum takes most of a plain step, of which passes of one form, so that no "
        "record changes another's last bits, are a tenth; noise, its key and the oracle's checks "
        "are the rest."
    ),
    ("step-A", "fedpact, batch 300"): (
        "More than 128 records are summed in several products, so that the sum's rounding is bound."
    ),
    ("step-resnet", "fedpact, batch 64"): (
        "The gradients of 64 records by their convolutions take half as long again as their sum "
        "does, most of it for the small images of the deep layers, and are read twice more."
    ),
    ("step-transformer", "fedpact, batch 64"): _MATRICES,
    ("step-vit", "fedpact, batch 64"): _MATRICES,
    ("step-lora", "fedpact, batch 64"): (
        "What is left beside the plain step are the factors' gradients record by record, and a "
        "trace's operations one by one."
    ),
    ("step-lstm", "fedpact, 2x256, batch 32"): _RECURRENCE,
    ("step-lstm", "fedpact, 2x64, batch 32"): _RECURRENCE,
    ("stacked", "A: stacked"): (
        "The two products over the records are 0.3 of the plain step, the rest of the sums 0.2, "
        "noise 0.15; what each site does for itself, its batch, its checks and its turns, 0.25."
    ),
    ("step-B", "fedpact, generic kernel, batch 75"): (
        "Autograd's functions and its order, and gradients of the second convolution made without "
        "the zeros that max-pooling leaves."
    ),
    ("step-B", "fedpact, batch 75"): (
        "The clipped sum is nine tenths of it; a simulation's noise, at half the price of torch's "
        "normal numbers, and the step itself are what is left."
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
        "A step by ghost norms takes 2.8 times ours, and Flower adds no more than a tenth to a "
        "plain loop over such steps."
    ),
    ("round-B", "pfl, no privacy in the clients"): (
        "pfl's clients clip nothing and add no noise, and it writes nothing to the disk; ours "
        "spend 6 % of the round on noise, and as much on ledgers, messages and checkpoint. From "
        "day to day it is 1.17 to 1.22."
    ),
    ("round-100A", "pfl, no privacy in the clients / fedpact, sites one by one"): _SMALL_STEPS,
    ("round-100A", "pfl, no privacy in the clients / fedpact, run.stacked = 16"): _SMALL_STEPS,
    ("overhead", "a site and round"): (
        "Sampling, noise, ledger entry, messages and the oracle's checks are each 20 to 100 µs of "
        "Python; the commit's two flushes are shared by all sites."
    ),
}
