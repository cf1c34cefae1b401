"""What the live figures of Spin make of figures that are known."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lab.common.cells import Cells
from lab.common.experiment import LabError, Trial
from lab.common.families import AS_PRINTED, SPIN
from lab.papers import spin_fig2, spin_fig4, spin_fig10
from lab.papers.spin_fig2 import ServedRequests
from lab.papers.spin_fig10 import ALL_ELSE, CHOICE, FAST, NONE, RANDOM, UNPACKED, WHOLE, Batch
from penstock.cli import app

NOISE = np.array([1.0, 1.01, 0.99, 1.005])
RANDOM_STATE = 7


def batch(best: float = 60.0, **rates: float) -> Batch:
    """Two Vanillas of 20 and 30 tokens a second, 25 without drafts; 28 where one drafter has all
    parts but the choice. rates: of Spin as printed; with additions it makes 29."""
    known = {"Vanilla a": 20.0, "Vanilla b": 30.0, f"{ALL_ELSE}b": 28.0, NONE: 25.0, RANDOM: 22.0}
    parts = {"choice": CHOICE, "packed": FAST, "unpacked": UNPACKED, "whole": WHOLE}
    known |= {f"{spin}: {part}": 29.0 for spin in SPIN for part in parts.values()}
    known |= {f"{AS_PRINTED}: {parts[n]}": rate for n, rate in rates.items()}
    noisy = {name: rate * NOISE for name, rate in known.items()}
    return Batch(noisy, 1.1, ("hindsight", best * NOISE))


def outcomes(found: Batch, claim: str) -> list[str]:
    return [v.outcome for v in spin_fig10.verdicts(1, found) if claim in v.claim]


def test_the_papers_gain_is_over_all_vanillas_and_ahead_of_each() -> None:
    told = [outcomes(batch(whole=rate), "2.28 times") for rate in (60.0, 35.0, 29.0)]
    assert [printed for printed, _ in told] == ["holds", "holds in part", "does not hold"]
    assert {added for _, added in told} == {"does not hold"}
    first = spin_fig10.verdicts(1, batch(whole=60.0))[0]
    assert "verification 1.10 steps" in first.claim
    assert "2.00× (2.00 to 2.00) the best" in first.measured
    assert outcomes(batch(whole=29.0, best=30.0), "2.28 times")[0] == "inconclusive"
    as_random = batch(whole=60.0)
    as_random.rates[RANDOM][:] = as_random.rates[f"{AS_PRINTED}: {WHOLE}"]
    assert outcomes(as_random, "2.28 times")[0] == "not shown"


def test_the_whole_is_set_against_rivals_with_all_parts_but_one() -> None:
    def told(**rates: float) -> str:
        return outcomes(batch(**{"packed": 26.0, "unpacked": 26.0} | rates), "lacks one part")[0]

    assert told(whole=40.0) == "holds"
    # Ahead of every Vanilla, but not of one drafter with the same parts.
    assert told(whole=27.0) == "does not hold"
    assert told(whole=40.0, packed=40.0) == "does not hold", "the pipeline adds nothing"
    assert told(whole=40.0, unpacked=41.0) == "does not hold", "nor does fast verification"
    assert told(whole=27.0, best=28.0) == "inconclusive"
    measured = spin_fig10.verdicts(1, batch(whole=42.0, packed=26.0, unpacked=26.0))[1].measured
    assert measured.startswith("1.50× (1.50 to 1.50) without choice")


def by_batch(padded: list[float], served: float = 1.0, right: float = 3.0) -> spin_fig4.Rates:
    """Gains at batches 1, 8 and 32, the same on both paths."""
    return {
        size: {
            spin_fig4.PLAIN: 20 * NOISE,
            spin_fig4.PADDED: 20 * gain * NOISE,
            spin_fig4.NATIVE: 40 * NOISE,
            spin_fig4.FIXED: 40 * gain * NOISE,
            spin_fig4.SERVED: 40 * served * NOISE,
            spin_fig4.RIGHT: 20 * right / size**0.17 * NOISE,
            spin_fig4.RIGHT_NATIVE: 40 * right / size**0.17 * NOISE,
        }
        for size, gain in zip((1, 8, 32), padded, strict=True)
    }


def test_gains_that_fall_with_the_batch() -> None:
    found = [v.outcome for v in spin_fig4.verdicts(by_batch([1.6, 1.0, 0.6]))]
    assert found == ["holds"] * 6
    found = [v.outcome for v in spin_fig4.verdicts(by_batch([1.2, 1.2, 1.2], served=0.9))]
    # Of drafts that never lose, the control shows as much.
    flat = ["does not hold"] * 4 + ["not shown"]
    assert found == [*flat, "does not hold"]
    low = spin_fig4.verdicts(by_batch([1.2, 1.2, 1.2], right=1.3))
    assert low[0].outcome == "inconclusive", "drafts that are never wrong gain 1.3"


def requests(best: list[int], again: list[int]) -> ServedRequests:
    """Of two domains in turn; the best of three drafters takes half of the others' time."""
    seconds = np.ones((2, len(best), 3))
    for number, each in enumerate((best, again)):
        seconds[number, np.arange(len(best)), each] = 0.5
    return ServedRequests(
        ["x", "y"] * (len(best) // 2),
        ["draft-a", "draft-b", "draft-c"],
        seconds,
        np.tile([0.1, 0.2, 0.3], (len(best), 1)),
        np.full((len(best), 3), 0.5),
    )


def test_the_best_drafter_of_a_request_must_be_the_best_again() -> None:
    lasting = requests([0, 1] * 20, [0, 1] * 20)
    assert [v.outcome for v in spin_fig2.verdicts(lasting)] == ["holds"] * 3
    drawn = np.random.default_rng(RANDOM_STATE).integers(0, 3, (2, 40))
    luck = spin_fig2.verdicts(requests(*drawn.tolist()))
    assert [v.outcome for v in luck[:2]] == ["does not hold", "inconclusive"]


def test_a_live_run_that_was_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from lab.common.live import LiveScene, Served

    class Cut(Exception):
        """The run ends here."""

    @dataclass
    class Counted:
        name: str = "counted"
        drafter: str = "none"
        served: int = 0
        last: int = 4

        def serve(self, requests: object, batch: int) -> Served:
            self.served += 1
            if self.served == self.last:
                raise Cut
            return Served([], 100.0 * self.last + self.served)

    def rates(system: Counted) -> list[float]:
        scene = LiveScene(tmp_path, {}, 5, new_tokens=8, kept=Cells(tmp_path / "x", silent=True))
        return scene.rates([system], 1, lambda _: None)[system.name].tolist()

    with pytest.raises(Cut):
        rates(Counted())
    again = Counted(last=9)
    # Turn 0 is served again, to learn in; turns 1 and 2 are kept.
    assert rates(again) == [402, 403, 902, 903, 904]
    assert rates(Counted(last=1)) == [402, 403, 902, 903, 904]


def test_a_family_is_for_live_experiments(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["reproduce", "wait_fig4_6", "--family", str(tmp_path)])
    assert found.exit_code == 2
    assert "runs no models; those that do: spin_fig10, spin_fig12, spin_fig2" in found.output


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(LabError, match="no bundled models in"):
        spin_fig2.EXPERIMENT.run(Trial(tmp_path, family=tmp_path))
