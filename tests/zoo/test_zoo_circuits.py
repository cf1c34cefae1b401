"""Initial weights: heads that look back, and induction on top of them."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from penstock.zoo.modeling import build  # noqa: E402
from penstock.zoo.recipe import FULL  # noqa: E402

SHAPES = {spec.shape: spec.name for spec in FULL.models if spec.grown_from is None}


def _attentions(shape, ids):
    model = build(shape, seed=0)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(ids, output_attentions=True).attentions


def _share(attention, head, back):
    """Mean attention of `head` to the place `back` places before."""
    return float(attention[:, head].diagonal(-back, 1, 2)[:, 4:].mean())


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPES.get)
def test_first_heads_look_one_and_two_places_back(shape):
    ids = torch.randint(10, 4000, (2, 100), generator=torch.Generator().manual_seed(1))
    first = _attentions(shape, ids)[0]
    assert _share(first, 0, 1) > 0.7
    assert _share(first, 1, 2) > 0.7


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.layers > 1], ids=SHAPES.get)
def test_second_layer_finds_what_followed_before(shape):
    half = torch.randint(10, 4000, (2, 100), generator=torch.Generator().manual_seed(1))
    second = _attentions(shape, torch.cat((half, half), dim=1))[1]
    assert float(second[:, 0, 100:].diagonal(1, 1, 2).mean()) > 0.3
