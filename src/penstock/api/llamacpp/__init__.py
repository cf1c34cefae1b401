"""llama.cpp's endpoints over the same engine."""
