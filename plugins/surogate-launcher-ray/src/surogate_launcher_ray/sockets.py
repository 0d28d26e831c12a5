"""Networks of this machine."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import closing

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux."""


def free_port(address: str) -> int:
    """A port of the address that nobody has now. Raises `OSError` if the address is not one of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with closing(socket.socket(family)) as found:
        found.bind((address, 0))
        return int(found.getsockname()[1])


def interface_of(address: str) -> str:
    """The network interface with an IPv4 address; empty if there is none, or the system does not say."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
