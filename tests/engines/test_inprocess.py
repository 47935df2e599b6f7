"""The transport to worker threads: what whoever takes the replies can rely on."""

import torch

from fedpact.engines.inprocess import InProcess, OneByOne


class Site:
    def handle(self, task, bench):
        return task, bench


def test_replies_are_taken_on_one_thread():
    """Torch's own threads would wait for the workers, which have all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        sites = {name: Site() for name in "cab"}
        with InProcess(sites, 2, lambda: OneByOne("bench")) as transport:
            found = [
                (*answer, torch.get_num_threads())
                for answer in transport.exchange({"a": 1, "b": 2, "c": 3})
            ]
            assert found == [(1, "bench", 1), (2, "bench", 1), (3, "bench", 1)]
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
