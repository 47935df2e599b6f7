"""fedpact as a Flower app, for a SuperLink and SuperNodes that are there already.

The client has neither records nor keys, and needs no fedpact. It passes each question to the site's
own process, over the Unix socket that the SuperNode's --node-config names, and passes back what
that has signed, after noise. All that goes wrong there reaches the server as one word.
"""

import json
from multiprocessing.connection import Client
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

server = ServerApp()
client = ClientApp()


@server.main()
def carry_out(grid: Grid, context: Context) -> None:
    """Carry out, or go on with, the run of the directory `server-dir` at the SuperLink."""
    from fedpact.deployment.flower.server_process import serve_app

    serve_app(grid, Path(str(context.run_config["server-dir"])))


@client.train()
def pass_on(message: Message, context: Context) -> Message:
    """Have the site answer a message; both are as fedpact.simulation.flower_records makes them."""
    array, seal = message.content["fedpact"], message.content["seal"]
    if not isinstance(array, ArrayRecord) or not isinstance(seal, ConfigRecord):
        raise TypeError("no message of fedpact")
    told = {**seal, "signature": bytes(seal["signature"]).hex()}  # pyright: ignore
    try:
        with Client(str(context.node_config["fedpact-socket"]), "AF_UNIX") as site:
            site.send_bytes(json.dumps(told).encode())
            site.send_bytes(array["message"].data)
            signature, block = site.recv_bytes(), site.recv_bytes()
    except (OSError, EOFError, KeyError) as error:
        raise RuntimeError(f"no site answers here: {type(error).__name__}") from None
    block = Array(dtype="uint8", shape=(len(block),), stype="bytes", data=block)
    said = {"fedpact": ArrayRecord({"message": block})}
    return Message(
        RecordDict({**said, "seal": ConfigRecord({"signature": signature})}), reply_to=message
    )
