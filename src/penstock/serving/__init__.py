"""Between the engine and the user: the engine's own process, and the client that talks to it."""
