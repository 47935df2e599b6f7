"""Speed and memory of fedpact beside plain torch, Opacus and Flower, as ratios of one run.

    python -m benchmarks                    all tables, then docs/benchmarks.md
    python -m benchmarks step-B noise       these tables alone, then the page from all results
    python -m benchmarks kernel             all tables of tables/kernel.py; what is stored is kept
    python -m benchmarks --quick            fewer repetitions: for trying, not for quoting
    python -m benchmarks --page             only the page, from the results that are there

Each table is a module in `tables`; its results lie in benchmarks/results/NAME.json.
"""

import os

# numpy's library reads it when it is loaded; one thread is what everything here is compared on.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
