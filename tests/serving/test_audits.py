from penstock.core.types import AuditFinding
from penstock.serving.draft_access import Audits

GOOD = AuditFinding("edge#2", True, 4, 0, 0.01)
FALSE_DRAW = AuditFinding("edge#2", True, 4, 1, 0.01)
FALSE_WEIGHTS = AuditFinding("edge#2", True, 4, 0, 0.5)
BAD_GUESS = AuditFinding("edge#2", False, 4, 3, 0.0)


def test_one_failure_may_be_a_rounding() -> None:
    audits = Audits(1.0, ["small"])
    assert not any(audits.count("edge", f) for f in (FALSE_DRAW, *[GOOD] * 50, FALSE_DRAW))
    assert audits.demoted == set()


def test_a_row_of_them_is_not() -> None:
    for finding in (FALSE_DRAW, FALSE_WEIGHTS):
        audits = Audits(1.0, ["small"])
        lost = [audits.count("edge", f) for f in (GOOD, finding, finding, finding)]
        assert lost == [False, False, True, False]
        assert audits.demoted == {"edge"}


def test_bad_guesses_are_only_counted() -> None:
    audits = Audits(1.0, ["small"])
    assert not any(audits.count("edge", BAD_GUESS) for _ in range(20))
    assert audits.by_server["edge"].num_false_draws == 60


def test_what_is_audited() -> None:
    assert Audits(1.0, ["small"]).choose("small") == "small"
    assert Audits(1.0, ["small"]).choose("other") is None
    assert Audits(0.0, ["small"]).choose("small") is None
    audits = Audits(0.25, ["small"])
    chosen = sum(audits.choose("small") is not None for _ in range(4000))
    assert 800 < chosen < 1200
