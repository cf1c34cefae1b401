"""Selection policies: the drafter of each request."""
