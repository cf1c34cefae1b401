"""Which passes count."""

from lab.bench.peers.passes import Pass, is_finished, kept

CLEAN = Pass(100.0, 1.98, 0.01)
DISTURBED = Pass(50.0, 1.2, 0.7)
IDLE = Pass(80.0, 1.4, 0.02)


def test_a_share_of_1_85_is_clean_and_less_is_not() -> None:
    assert Pass(1.0, 1.85, 0.0).is_clean
    assert not Pass(1.0, 1.849, 0.0).is_clean


def test_disturbed_passes_are_thrown_out_and_made_again() -> None:
    passes = [CLEAN, DISTURBED, CLEAN, CLEAN]
    assert not is_finished(passes, 4)
    passes.append(CLEAN)
    assert is_finished(passes, 4)
    assert kept(passes, 4) == ([CLEAN] * 4, "")


def test_an_engine_that_leaves_cores_idle_is_kept_and_flagged() -> None:
    assert not is_finished([IDLE] * 4, 5)
    assert is_finished([IDLE] * 5, 5)
    assert kept([IDLE] * 5, 5) == ([IDLE] * 5, "leaves cores idle")
