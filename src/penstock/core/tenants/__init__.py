"""Tenants: what each has been served, and fairness between them."""
