"""Engine process, its client, and draft servers."""

import os

# Before gRPC is imported: peers could write to our log through its own.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
