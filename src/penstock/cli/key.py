"""`penstock key`: API keys."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from penstock.cli.options import JsonOption
from penstock.json_text import dumps

app = typer.Typer(no_args_is_help=True, help="API keys of tenants.")


@app.callback()
def _group() -> None:
    """Keep `new` a subcommand: Typer would drop the name of an only one."""


@app.command()
def new(
    tenant: Annotated[str, typer.Option(help="Tenant of the key.")] = "default",
    as_json: JsonOption = False,
) -> None:
    """Create an API key. It is printed once; the server's file has only its hash."""
    from penstock.config import hash_of_key

    key = f"sk-{secrets.token_urlsafe()}"
    line = f"engine: {{tenants: {{{dumps(tenant)}: {{api_keys: [{hash_of_key(key)!r}]}}}}}}"
    if as_json:
        print(dumps({"tenant": tenant, "key": key, "hash": hash_of_key(key)}))
        return
    print(f"{key}\n\nThe client sends it: Authorization: Bearer KEY. It is not stored.")
    print(f"For the server's file; a running server reads it on SIGHUP:\n\n{line}")
