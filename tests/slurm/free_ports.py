"""Ports that nothing listens on."""

import contextlib
import socket


def free_ports(n_ports: int) -> list[int]:
    """`n_ports` different free TCP ports of this host."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n_ports)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
