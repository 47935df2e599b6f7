"""Why a row misses its stretch, one sentence each: (table, row) -> sentence. Kept by hand."""

_TORCH_IS_FASTER = (
    "torch.randn draws a number in 2.5 ns on this processor, half of what it took where the goals "
    "were set; AES, logarithm, root and tangent in float64 take 2.6, and float32 from 32 bits "
    "would be quicker, but ends at 6.7 standard deviations and is too coarse for the grid."
)
_GRID = (
    "Besides the draw, the sum is read, rounded, added to and written: what it replaces is "
    "torch.randn and an addition, the row above."
)
_THIRTEEN = "At this length both wait for memory; the arithmetic in float64 is what is left."
_PYTHON = (
    "A client of pfl's is a plain step and a sum. Sampling, noise, ledger entry, messages and "
    "checks are about 0.6 ms of Python a site (see Overhead), more than the step, and two workers "
    "take nearly as long for them as one."
)

REMARKS: dict[tuple[str, str], str] = {
    ("step-A", "fedpact, batch 75"): (
        "The clipped sum alone takes the plain step's time; seeding and drawing the noise, "
        "gathering the batch and the oracle's checks cost 0.1 ms more, whatever the model."
    ),
    ("stacked", "A: stacked"): (
        "Each site's own noise, its seed, its batch and the oracle's checks are not stacked, and "
        "they are now the larger part."
    ),
    ("step-B", "fedpact, generic kernel, batch 75"): (
        "Autograd's functions and its order cost what the compiled level saves."
    ),
    ("step-B", "fedpact, batch 75"): (
        "The clipped sum is near the stretch; a simulation's noise, at the speed of torch's normal "
        "numbers, is a tenth of the plain step."
    ),
    ("step-B", "Opacus, ghost / fedpact, batch 75"): (
        "Ghost norms cost Opacus two backward passes and little more; at a batch of 300, where "
        "noise counts less, it is 3.4 times."
    ),
    ("workers", "2 workers / 1"): (
        "Folding replies, committing the round and the interpreter's lock are shared by all "
        "workers: about 30 of 232 ms."
    ),
    ("accuracy", "Flower with Opacus, ghost / fedpact"): (
        "As in a round of ten sites: a step by ghost norms takes two to three times ours."
    ),
    ("step-C", "fedpact, batch 75"): (
        "The clipped sum is near the stretch; a simulation's noise, at the speed of torch's normal "
        "numbers, is what is left."
    ),
    ("step-13M", "fedpact, batch 75"): (
        "Normal numbers for 13 million coordinates, at the speed of torch's generator, are a fifth "
        "of the plain step."
    ),
    ("noise", "secure, d = 582,026"): _TORCH_IS_FASTER,
    ("noise", "secure, d = 1,663,370"): _TORCH_IS_FASTER,
    ("noise", "secure, d = 13,000,000"): _THIRTEEN,
    ("noise", "secure on the grid / randn alone, d = 582,026"): _GRID,
    ("noise", "secure on the grid / randn alone, d = 1,663,370"): _GRID,
    ("noise", "secure on the grid / randn alone, d = 13,000,000"): _GRID,
    ("round-B", "Flower with Opacus, ghost"): (
        "A step by ghost norms takes 2.7 times ours, and Flower's own share of a round, as its "
        "idle clients show, adds little to that."
    ),
    ("round-B", "pfl, no privacy in the clients"): (
        "pfl's clients clip nothing and add no noise, and it writes nothing to the disk; ours "
        "spend a tenth of the round on noise, and as much on ledgers, messages and checkpoint."
    ),
    ("sites", "memory, 1,000 sites"): (
        "A site's ledger, terms and settings are 10 KiB of Python objects; no vector is held for "
        "one that does not train. Peaks differ by 40 MiB from run to run, as workers hold more or "
        "fewer vectors of 6.7 MB at one moment."
    ),
    ("profile", "embedded default: kernel"): (
        "A clipped sum of 650 parameters takes less than a tenth of a millisecond; the ledger's "
        "entry, sampling, messages and the checks around it are a multiple of that."
    ),
    ("profile", "ten sites, CNN: kernel"): (
        "With the noise it is 0.88; a private step cannot be without either, and what is left is "
        "encoding, adding up and storing vectors of 6.7 MB, once a site and round of one step."
    ),
    ("round-100A", "pfl, no privacy in the clients / fedpact, sites one by one"): _PYTHON,
    ("round-100A", "pfl, no privacy in the clients / fedpact, run.stacked = 16"): _PYTHON,
    ("overhead", "a site and round"): (
        "Sampling, noise, ledger entry, messages and the oracle's checks are each 20 to 100 µs of "
        "Python; the commit's two flushes are shared by all sites."
    ),
}
