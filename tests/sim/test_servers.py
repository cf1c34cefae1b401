"""Draft servers from a file."""

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.sim.links import DraftServer, Link
from penstock.sim.servers import deal_to_tenants, read_servers
from penstock.sim.workloads import Workload, WorkloadError

GOOD = """
servers:
  - {name: a, acceptance: 0.5, ms_per_token: 20, rtt_ms: 60, loss: 0.01, tenant: alice}
  - {name: b, acceptance: {rates: [0.6, 0.8], dwell: 5}, ms_per_token: 8, mbit_per_s: 8}
  - {name: c, acceptance: [0.9, 0.5], ms_per_token: 3, draft_ahead: 4, max_draft_tokens: 5}
  - {name: d, acceptance: {file: records.jsonl, drafter: ngram}, ms_per_token: 3}
"""


def write(folder: Path, text: str) -> Path:
    (folder / "records.jsonl").write_text(json.dumps({"ngram": [3, 1, 2]}) + "\n")
    path = folder / "servers.yaml"
    path.write_text(text)
    return path


def test_what_a_file_says(tmp_path: Path) -> None:
    servers, acceptance = read_servers(write(tmp_path, GOOD))
    assert [s.name for s in servers] == ["a", "b", "c", "d"]
    assert servers[0] == DraftServer("a", 0.02, Link(0.03, loss=0.01), tenant="alice")
    assert servers[1].link.bandwidth == 1e6
    assert (servers[2].draft_ahead, servers[2].max_draft_tokens) == (4, 5)
    assert acceptance.tokens_per_step("a", 1) == pytest.approx(1.5)
    assert acceptance.tokens_per_step("b", 1) == pytest.approx(1.7)
    assert acceptance.tokens_per_step("c", 2) == pytest.approx(2.4)
    assert acceptance.tokens_per_step("d", 20) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("servers: []", "servers: List should have at least 1 item"),
        ("servers: [{name: a, ms_per_token: 3}]", "acceptance: Field required"),
        ("servers: [{name: a, ms_per_token: 0, acceptance: 0.5}]", "ms_per_token"),
        ("servers: [{name: a, ms_per_token: 1, acceptance: 1.5}]", "from 0 to 1"),
        ("servers: [{name: a, ms_per_token: 1, acceptance: [0.5, 0.9]}]", "falls from"),
        ("servers: [{name: a, ms_per_token: 1, acceptance: 0.5, speed: 2}]", "speed"),
        (
            "servers: [{name: a, ms_per_token: 1, acceptance: 0.5},"
            " {name: a, ms_per_token: 1, acceptance: 0.5}]",
            "a name of its own",
        ),
        ("- a", "must hold a mapping"),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(WorkloadError, match=said) as caught:
        read_servers(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_requests_are_dealt_to_the_servers_tenants() -> None:
    load = Workload("w", np.full(5, 3), np.full(5, 3))
    servers = [
        DraftServer("a", 1.0, tenant="x"),
        DraftServer("b", 1.0, tenant="y"),
        DraftServer("c", 1.0),
    ]
    dealt = deal_to_tenants(load, servers).tenants
    assert dealt.tolist() == ["x", "y", "x", "y", "x"]
    assert deal_to_tenants(load, servers[2:]).tenants is None
