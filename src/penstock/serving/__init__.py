"""Between the engine and the user: the engine's own process, and the client that talks to it."""

import os

# Before gRPC is imported: its own log would let any peer write to ours.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
