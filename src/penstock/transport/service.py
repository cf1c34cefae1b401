"""The service `penstock.v1.Drafting` over gRPC: stub, handler, options, credentials.

Written by hand: it is one method, and the server needs raw bytes to refuse a malformed message with
a reason and to skip parsing an oversized one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from penstock.transport.v1 import drafting_pb2 as pb

SERVICE = "penstock.v1.Drafting"

MAX_MESSAGE_BYTES = 4 << 20
"""Size above which gRPC refuses a message unread; a stream's own limit is lower."""

_METHOD = "Connect"
_KEEPALIVE_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
"""Keepalive pings: a silent peer is noticed within 15 seconds."""
_IDENTITY_ONLY = 1
"""gRPC's bit set of compression algorithms with only `identity`."""

Options = list[tuple[str, int]]
Connect = Callable[
    [AsyncIterator[bytes], "grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[None]
]


def _common_options() -> Options:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        # A frozen peer on a live machine is otherwise waited for a minute.
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A small message can inflate a thousandfold, past every limit on its size.
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
    ]


def server_options() -> Options:
    """Return the options of `grpc.aio.server`."""
    return [
        *_common_options(),
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
        ("grpc.max_concurrent_streams", 64),
        # The window of a slowly read stream would otherwise grow, and with it the cost of a flood.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_metadata_size", 16 << 10),
        # A second server on the port would otherwise take half of the streams.
        ("grpc.so_reuseport", 0),
    ]


def channel_options() -> Options:
    """Return the options of a `grpc.aio` channel, whose connection is its own."""
    return [
        *_common_options(),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


class DraftingStub:
    """Client of the service, for draft servers."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.connect: grpc.aio.StreamStreamMultiCallable[pb.Up, pb.Down] = channel.stream_stream(
            f"/{SERVICE}/{_METHOD}",
            request_serializer=pb.Up.SerializeToString,
            response_deserializer=pb.Down.FromString,
        )


def add_service(server: grpc.aio.Server, connect: Connect) -> None:
    """Serve `connect`, an async function of the raw messages up and of the context.

    It writes raw messages down through the context."""
    handler: Any = grpc.stream_stream_rpc_method_handler(connect)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {_METHOD: handler}),)
    )


# --- identities ---------------------------------------------------------------------------------


def token_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata that carries a draft server's token."""
    return () if token is None else (("authorization", f"Bearer {token}"),)


def server_credentials(
    certificate: Path, key: Path, client_ca: Path | None
) -> grpc.ServerCredentials:
    """Return TLS credentials from PEM files. Raises OSError.

    client_ca: every draft server needs a certificate signed by it."""
    authorities = None if client_ca is None else client_ca.read_bytes()
    return grpc.ssl_server_credentials(
        [(key.read_bytes(), certificate.read_bytes())],
        root_certificates=authorities,
        require_client_auth=authorities is not None,
    )


def channel_credentials(
    ca: Path | None, certificate: Path | None = None, key: Path | None = None
) -> grpc.ChannelCredentials:
    """Return TLS credentials from PEM files. Raises OSError.

    ca: trusted instead of the system's authorities; certificate and key: the draft server's own."""
    return grpc.ssl_channel_credentials(
        root_certificates=None if ca is None else ca.read_bytes(),
        private_key=None if key is None else key.read_bytes(),
        certificate_chain=None if certificate is None else certificate.read_bytes(),
    )
