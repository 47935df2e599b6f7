"""For the whole suite: one intra-op thread, as reproducible runs have and xdist needs."""

import torch

torch.set_num_threads(1)
