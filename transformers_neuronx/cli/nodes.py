"""Options of commands whose model is in worker processes, here or on several hosts."""

from __future__ import annotations

from typing import Annotated

import typer

from transformers_neuronx.cli import options as o
from transformers_neuronx.config import Workers
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.runtimes.worker_processes import follow

PANEL = "Processes and hosts"
PORT = 29500

Processes = Annotated[bool, o.option("--processes", help="A worker process for each device; needs --tp.", panel=PANEL)]
Nodes = Annotated[
    int, o.option("--nnodes", help="Hosts that share the model; each needs it.", panel=PANEL, default=True, least=1)
]
NodeRank = Annotated[
    int, o.option("--node-rank", help="Number of this host; 0 has the requests.", panel=PANEL, default=True, least=0)
]
Address = Annotated[
    str | None, o.option("--master-addr", help="Address of host 0, where the others find it.", panel=PANEL)
]
Port = Annotated[
    int, o.option("--master-port", help="Port there that workers connect to.", panel=PANEL, default=True, least=1)
]


def workers(
    tp: int | None, processes: bool, nodes: int, node_rank: int, address: str | None, port: int
) -> Workers | None:
    """Return the worker processes that the user wants, if any. On another host than the first, run them here instead,
    until the first one ends, and exit.

    Raises ConfigError for options that contradict each other.
    """
    if not processes and nodes == 1:
        if node_rank:
            raise ConfigError(f"--node-rank {node_rank} needs --nnodes")
        return None
    if nodes > 1 and not address:
        raise ConfigError("--nnodes needs --master-addr, the address of host 0")
    if node_rank >= nodes:
        raise ConfigError(f"--node-rank must be below --nnodes {nodes}, got {node_rank}")
    if node_rank:
        typer.echo(f"host {node_rank} of {nodes}: runs workers for {address}:{port}", err=True)
        follow(address or "", port, node_rank)
        raise typer.Exit
    if processes and not tp:
        raise ConfigError("--processes needs --tp, the number of devices")
    if (tp or nodes) % nodes:
        raise ConfigError(f"--tp must be a multiple of --nnodes {nodes}, got {tp}")
    each = (tp or nodes) // nodes if processes else 1
    return Workers(each, nodes, address or "127.0.0.1", port if nodes > 1 else 0)
