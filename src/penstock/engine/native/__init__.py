"""The fast CPU path: a whole forward pass, or a whole draft, in one call of compiled code."""
