"""Heads of the sites' own in a deployment: what is on the wire, and that nobody evaluates w."""

import torch
from safetensors.torch import load_file

from fedpact.client import read_memory
from fedpact.common.messages import from_bytes
from fedpact.common.params import FlatModel
from fedpact.deployment.federation import Federation, read_plan
from fedpact.deployment.store import StoreSlot
from fedpact.report.evaluations import why_none
from fedpact.report.run_summary import read_run

HEAD = 10  # of the logistic model on the digits: its bias


def test_a_head_is_at_its_site_and_nowhere_else(federate):
    run = federate({}, rounds=3, local={"head": HEAD}, compression={"kind": "none"})
    records = run()
    assert run.summary["status"] == "finished"
    server = run.directory / "server"
    federation, plan = Federation.read(server / "federation.toml"), read_plan(server / "plan.json")
    module = federation.workshop(plan, server).module()
    began = FlatModel(module).vector[-HEAD:].clone()
    heads = []
    for node in run.nodes:
        replies = [from_bytes(block) for block in node.said]
        assert len(replies) == 3
        for reply in replies:
            assert torch.equal(reply.vectors["w"][-HEAD:], began)
        memory = read_memory(StoreSlot.of_memory(node.site._store, node.site.run), 3)
        heads.append(memory.vectors["heads/own"])
        # No two of its numbers are anywhere in what sites have said or heard. Draws are secure: by
        # chance eight bytes are there less than once in 10^12 runs of this test.
        for pair in heads[-1].view(-1, 2):
            block = pair.numpy().tobytes()
            assert not any(block in each for other in run.nodes for each in other.said)
            assert not any(block in each for other in run.nodes for each in other.heard)
    assert len({tuple(head.tolist()) for head in heads}) == 3
    assert torch.equal(load_file(server / "run" / "model.safetensors")["1.bias"], began)
    # The public test set that lies at the server would be answered by a head that nobody trained.
    assert (server / "test.npz").exists()
    assert all(record.accuracy is None for record in records)
    assert "a head of its own" in why_none(read_run(server / "run"))
