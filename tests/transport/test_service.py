from __future__ import annotations

import pytest

from penstock.transport.service import network_of


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("ipv4:192.0.2.1:50100", "192.0.2.1"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:50100", "2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:2::9%5D:50101", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:50101", "fe80::/64"),
        ("ipv6:[::ffff:192.0.2.1]:50100", "192.0.2.1"),
        ("unix:/run/socket", "unix"),
        ("", ""),
    ],
)
def test_the_network_of_a_peer(peer: str, network: str) -> None:
    assert network_of(peer) == network
