"""The benchmark of the scheduler's part of a step."""

from lab.bench.scheduler_host import STEPS, one_pass


def test_every_measured_step_decodes_all_requests() -> None:
    taken = one_pass(3, 2)
    assert taken.shape == (STEPS,)
    assert (taken > 0).all()
