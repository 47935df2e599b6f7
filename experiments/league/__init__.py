"""A league of private algorithms: who is how far ahead on which data, and whether by chance.

    FEDPACT_DATA=DIR python -m experiments.league [DATA ...]       carry on with what is missing
    python -m experiments.league --left                            what is missing
    python -m experiments.league --page                            README.md, of what is stored

DATA: heart, adult, fashion_mnist or cifar10, all by default, the cheapest first. Every algorithm
that has a private form, some of their settings that are known by names of their own, and each site
alone, at (ε, δ) of a record and site with ε = 1, 2, 4, 8, over as many rounds, and no more bytes
than FedAvg's: what sends twice as much a round has half the rounds. For each of these cells the
step, and the local steps where there are any, are chosen by one rule from the same few, on a
quarter of the training records that is set aside. Figures are of three other seeds, on records that
had no part in the choice: the mean over the sites of the accuracy of the model that a site uses.
Each result is stored as it comes, with what the sites' receipts say was spent; what was stopped
goes on where it ended.
"""
