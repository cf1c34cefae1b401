"""Penstock: small models draft, one large model verifies, one scheduler decides."""

__version__ = "0.2.0"
