"""Certificates for tests, by openssl."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest


def write_certificates(
    folder: Path, issuers: Mapping[str, str], names: str = "DNS:localhost,IP:127.0.0.1"
) -> Path:
    """NAME.pem and NAME.key of each name and of each issuer; returns the folder.

    issuers: by name; a name's common name is what comes before its first dot. names: what a
    server with one of them may be called.
    """
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here to make certificates with")
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    (folder / "names").write_text(f"subjectAltName={names}\n")
    commands = [
        f"req -x509 {key} -keyout {ca}.key -out {ca}.pem -subj /CN={ca}"
        for ca in dict.fromkeys(issuers.values())
    ]
    for name, ca in issuers.items():
        commands += [
            f"req {key} -keyout {name}.key -out {name}.csr -subj /CN={name.partition('.')[0]}",
            f"x509 -req -in {name}.csr -CA {ca}.pem -CAkey {ca}.key -CAcreateserial "
            f"-extfile names -out {name}.pem",
        ]
    for command in commands:
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return folder
