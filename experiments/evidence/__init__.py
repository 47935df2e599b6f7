"""The papers' tables: runs, what they left, and the page that says it, docs/evidence.md.

    FEDPACT_DATA=DIR python -m experiments.evidence --left         what is missing, and its cost
    FEDPACT_DATA=DIR python -m experiments.evidence [WORDS ...]    make it
    python -m experiments.evidence --again NAME                    make a stored one once more
    python -m experiments.evidence --page                          write docs/evidence.md, figures

WORDS: runs whose names hold all of them, as in `ali-cifar10 "tau=5 " seed=0`. A result is stored as
it comes (results/GROUP.json: settings, seed, versions, commit, what each look showed), and none is
made twice; a run that was stopped goes on where it ended.
"""
