"""fedpact as a Flower app, for a SuperLink and SuperNodes that are there already.

The client has neither records nor keys, and needs no fedpact. It passes each question to the site's
own process, over the Unix socket that the SuperNode's --node-config names, and passes back what
that has signed, after noise. All that goes wrong there reaches the server as one word.
"""

import json
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, Final

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

_PIECE: Final = 4 * 2**20  # bytes of a record, as flower_records has it

server = ServerApp()
client = ClientApp()


@server.main()
def carry_out(grid: Grid, context: Context) -> None:
    """Carry out, or go on with, the run of the directory `server-dir` at the SuperLink."""
    from fedpact.deployment.flower.server_process import serve_app

    serve_app(grid, Path(str(context.run_config["server-dir"])))


@client.train()
def pass_on(message: Message, context: Context) -> Message:
    """Have the site answer a message; deployment.flower.flower_records makes both."""
    seal: dict[str, Any] = dict(message.content["seal"])
    rest = [message.content[str(number)]["block"] for number in range(1, len(message.content))]
    question = b"".join([seal.pop("block"), *rest])
    told = {**seal, "signature": seal["signature"].hex()}
    try:
        with Client(str(context.node_config["fedpact-socket"]), "AF_UNIX") as site:
            site.send_bytes(json.dumps(told).encode())
            site.send_bytes(question)
            signature, block = site.recv_bytes(), site.recv_bytes()
    except (OSError, EOFError, KeyError) as error:
        raise RuntimeError(f"no site answers here: {type(error).__name__}") from None
    first, *more = (block[start : start + _PIECE] for start in range(0, len(block), _PIECE))
    said = {"seal": ConfigRecord({"signature": signature, "block": first})}
    said |= {str(n): ConfigRecord({"block": piece}) for n, piece in enumerate(more, 1)}
    return Message(RecordDict(said), reply_to=message)
