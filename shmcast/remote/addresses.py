"""Endpoints and the addresses that they stand for."""

from __future__ import annotations

import ipaddress
import socket as net

__all__ = ["addresses_of", "is_wildcard", "join", "split"]


def split(endpoint: str) -> tuple[str, int]:
    """The host and the port of "tcp://HOST:PORT"."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def join(host: str, port: int) -> str:
    """The endpoint of a host and a port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def addresses_of(host: str, port: int, flags: int = 0) -> list[str]:
    """
    The host as numbers, IPv4 first: a name may have both, and the other side may bind one.

    Raises OSError, or UnicodeError for what can be no name.
    """
    found = net.getaddrinfo(host, port, type=net.SOCK_STREAM, flags=flags)
    found.sort(key=lambda entry: entry[0] != net.AF_INET)
    addresses = []
    for family, _, _, _, address in found:
        number = str(address[0])
        if family == net.AF_INET6 and len(address) == 4 and address[3] and "%" not in number:
            number += f"%{net.if_indextoname(address[3])}"
        addresses.append(number)
    return list(dict.fromkeys(addresses))


def is_wildcard(address: str) -> bool:
    """Whether it stands for all addresses of this host."""
    ip = ipaddress.ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None)
    return ip.is_unspecified or (mapped is not None and mapped.is_unspecified)
