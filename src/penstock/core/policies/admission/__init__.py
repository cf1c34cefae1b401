"""Admission policies: who runs in a step, and with how many known tokens."""
