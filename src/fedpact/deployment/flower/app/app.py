"""The Flower app that a SuperLink needs to begin a run; nothing in it is carried out."""

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()
