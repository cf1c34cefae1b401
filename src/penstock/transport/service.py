"""The service `penstock.v1.Drafting` over gRPC: stub, handler, options, credentials.

Written by hand, since it is one method, and since the server must see raw bytes: a message that
cannot be parsed is then refused in words, and one that is too large never parsed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from penstock.transport.v1 import drafting_pb2 as pb

SERVICE = "penstock.v1.Drafting"

MAX_MESSAGE_BYTES = 4 << 20
"""gRPC refuses larger messages without reading them; a stream's own limit is lower."""

_METHOD = "Connect"
_KEEPALIVE_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
_IDENTITY_ONLY = 1

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
        # A peer that is frozen, but whose machine is not, is otherwise waited for a minute.
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A small message can inflate a thousandfold, past every limit on its size.
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
    ]


def server_options() -> Options:
    return [
        *_common_options(),
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
        ("grpc.max_concurrent_streams", 64),
        # Or the window of a stream that is read slowly would grow, and with it what a flood costs.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_metadata_size", 16 << 10),
        # Otherwise a second server on the port would take half of the streams.
        ("grpc.so_reuseport", 0),
    ]


def channel_options() -> Options:
    """For `grpc.aio.insecure_channel` and `secure_channel`. One channel is one draft server: it
    shares no connection with another of the same process."""
    return [
        *_common_options(),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


class DraftingStub:
    """What a draft server calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.connect: grpc.aio.StreamStreamMultiCallable[pb.Up, pb.Down] = channel.stream_stream(
            f"/{SERVICE}/{_METHOD}",
            request_serializer=pb.Up.SerializeToString,
            response_deserializer=pb.Down.FromString,
        )


def add_service(server: grpc.aio.Server, connect: Connect) -> None:
    """Serve `connect`: an async function of the raw messages up and of the context, by which it
    writes raw messages down."""
    handler: Any = grpc.stream_stream_rpc_method_handler(connect)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {_METHOD: handler}),)
    )


# --- identities ---------------------------------------------------------------------------------


def token_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata by which a draft server shows its token."""
    return () if token is None else (("authorization", f"Bearer {token}"),)


def server_credentials(
    certificate: Path, key: Path, client_ca: Path | None
) -> grpc.ServerCredentials:
    """TLS. With `client_ca` every draft server needs a certificate that it has signed. All PEM.
    Raises: OSError."""
    authorities = None if client_ca is None else client_ca.read_bytes()
    return grpc.ssl_server_credentials(
        [(key.read_bytes(), certificate.read_bytes())],
        root_certificates=authorities,
        require_client_auth=authorities is not None,
    )


def channel_credentials(
    ca: Path | None, certificate: Path | None = None, key: Path | None = None
) -> grpc.ChannelCredentials:
    """TLS. `ca`: whom to trust instead of the system's authorities; certificate and key: one's own.
    All PEM. Raises: OSError."""
    return grpc.ssl_channel_credentials(
        root_certificates=None if ca is None else ca.read_bytes(),
        private_key=None if key is None else key.read_bytes(),
        certificate_chain=None if certificate is None else certificate.read_bytes(),
    )
