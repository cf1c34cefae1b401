"""The dashboard and the playground in a real browser, where there is one."""

import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.api.chromium import Page, chromium, needs_chromium
from tests.serving.fakes import FACTORY, TOKENIZER
from tests.serving.harness import (
    RunningServer,
    model_server,
    running_server,
    serve_config,
    server_process,
)

from penstock.config import hash_of_key, parse_config
from penstock.serving.fork_context import LOAD_ENGINE

pytestmark = [pytest.mark.slow, needs_chromium]

WEIGHTS = TOKENIZER.parent
DRAFTERS = ("draft-tiny", "draft-code")
QUESTION = "Question: language of Poland? Then tell me of Brazil."
EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>&lt;b&gt;'
TENANTS = {
    "north": {"api_keys": [hash_of_key("key-north")], "weight": 1.0},
    "south": {"api_keys": [hash_of_key("key-south")], "weight": 3.0},
}


@pytest.fixture(scope="module")
def family() -> Iterator[RunningServer]:
    """The bundled models."""
    engine = {
        "target": str(WEIGHTS / "target-large"),
        "drafters": {name: str(WEIGHTS / name) for name in DRAFTERS} | {"ngram": "ngram"},
        "num_threads": 1,
        "kv_tokens": 8192,
        "allocation": {"name": "fixed", "options": {"k": 4}},
    }
    with running_server(parse_config({"engine": engine, "port": 0}), LOAD_ENGINE) as running:
        yield running


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(tab: Page) -> Page:
    """As a new visitor sees it."""
    tab.size(1280, 1000)
    tab.scheme("light")
    tab.complaints()
    return tab


def visit(page: Page, url: str, part: str = "overview") -> None:
    page.driver.get("about:blank")
    page.driver.get(f"{url}/dashboard#{part}")
    page.run("sessionStorage.clear(); localStorage.clear()")
    page.driver.refresh()
    page.until(lambda: page.text("#state") != "connecting")


def chat(page: Page, prompt: str, **fields: object) -> None:
    """Ask, and wait for the end of the answer."""
    for name, value in fields.items():
        page.type(f"#{name}", str(value))
    page.run("document.getElementById('prompt').value = arguments[0]", prompt)
    page.click("#send")
    page.until(lambda: page.one("#send").is_enabled())
    assert page.text("#chat-error") == ""


def choose_drafter(page: Page, name: str) -> None:
    page.until(lambda: page.all(f"#drafter option[value='{name}']"))
    page.click(f"#drafter option[value='{name}']")


def tokens(page: Page) -> list[dict[str, Any]]:
    """Of all answers: text, origin, drafter and looks."""
    found: list[dict[str, Any]] = page.run(
        """return [...document.querySelectorAll("#turns .token")].map(t => {
             const css = getComputedStyle(t);
             return {text: t.textContent, ...t.dataset, background: css.backgroundColor,
                     line: css.textDecorationLine, lineColour: css.textDecorationColor};
           })"""
    )
    return found


def answer_of(url: str, prompt: str, drafter: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": prompt}], **fields}
    body["speculation"] = {"drafter": drafter, "origins": True}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()


def test_tokens_are_coloured_by_origin(page: Page, family: RunningServer) -> None:
    visit(page, family.url, "playground")
    choose_drafter(page, "draft-tiny")
    chat(page, QUESTION, temperature=0.7, seed=5, **{"max-tokens": 120})
    asked = {"temperature": 0.7, "seed": 5, "max_tokens": 120}
    answer = answer_of(family.url, QUESTION, "draft-tiny", **asked)
    shown = tokens(page)
    told = answer["choices"][0]["origins"]
    assert [(t["text"], t["origin"], t.get("drafter")) for t in shown] == [
        (o["text"], o["origin"], o["drafter"]) for o in told
    ]
    looks = {t["origin"]: (t["background"], t["line"], t["lineColour"]) for t in shown}
    assert {"accepted", "recovered", "target"} <= set(looks)
    assert len(set(looks.values())) == len(looks), "no two origins look alike"
    assert looks["accepted"][0] != looks["target"][0] == "rgba(0, 0, 0, 0)"
    speculation = answer["usage"]["speculation"]
    accepted, drafted = speculation["num_accepted_tokens"], speculation["num_draft_tokens"]
    assert page.text("#chat-drafts") == f"{accepted} of {drafted} draft tokens"
    assert page.text("#chat-length") == f"{speculation['mean_acceptance_length']:.2f}"
    assert page.text("#chat-speed").endswith("tokens/s")
    # Another drafter has another colour, and the legend the same.
    choose_drafter(page, "draft-code")
    chat(page, QUESTION)
    colour = {t["drafter"]: t["background"] for t in tokens(page) if t["origin"] == "accepted"}
    assert set(colour) == {"draft-tiny", "draft-code"}
    legend = {
        t.text: t.value_of_css_property("background-color")
        for t in page.all("#origins-key .token.accepted")
    }
    assert set(legend) == {*DRAFTERS, "ngram"}
    assert len(set(legend.values())) == len(legend)
    assert {name: legend[name] for name in colour} == {
        name: page.one(f"#turns .accepted[data-drafter='{name}']").value_of_css_property(
            "background-color"
        )
        for name in colour
    }
    page.one("#turns .token.accepted").click()
    assert "drafted by draft-tiny and accepted" in page.text("#token-note")
    assert page.complaints() == []


def test_an_answer_is_shown_while_it_comes(page: Page, slow_server: RunningServer) -> None:
    visit(page, slow_server.url, "playground")
    choose_drafter(page, "none")
    page.type("#max-tokens", "450")
    page.type("#prompt", "one two three")
    page.click("#send")
    page.until(lambda: len(tokens(page)) > 5)
    assert not page.one("#send").is_enabled()
    page.click("#stop")
    page.until(lambda: page.one("#send").is_enabled())
    assert page.text("#chat-error") == "Stopped."
    assert 5 < len(tokens(page)) < 450
    page.click("#clear")
    assert tokens(page) == []


def test_text_is_never_html(page: Page) -> None:
    """Of users, models, operators. The toy says what it is told."""
    config = serve_config(served_model_name=f"toy {EVIL}")
    with running_server(config, FACTORY) as server:
        visit(page, server.url, "playground")
        chat(page, EVIL, **{"max-tokens": 200})
        question, answer = (e.text for e in page.all("#turns .turn"))
        assert EVIL in question
        assert "onerror=" in answer
        assert "</script>" in answer
        page.until(lambda: EVIL in page.text("#model"))
        for _ in range(2):
            page.click("#to-overview")
            page.until(lambda: page.all("#requests td"))
            page.click("#to-playground")
        assert page.run("return window.hacked ?? null") is None
        assert page.all("#turns img, #turns script, #model img, table img") == []
        assert page.complaints() == []


def test_the_page_can_make_no_html_at_all(page: Page, server: RunningServer) -> None:
    visit(page, server.url)
    made = page.run(
        """try { document.body.innerHTML += arguments[0]; return "made"; }
           catch (error) { return error.name; }""",
        EVIL,
    )
    assert made == "TypeError"
    inline = page.run(
        """const made = document.createElement("p");
           made.setAttribute("style", "position: fixed"); document.body.append(made);
           return getComputedStyle(made).position;"""
    )
    assert inline == "static"


def test_figures_are_those_of_the_server(page: Page, family: RunningServer) -> None:
    def steps() -> str:
        """The legend of a step's parts, which has their seconds while there are steps."""
        answer_of(family.url, QUESTION, "draft-tiny", max_tokens=40)
        return " ".join(page.text("#step-key").split())

    visit(page, family.url)
    for seed in range(3):
        answer_of(family.url, QUESTION, "draft-tiny", seed=seed, max_tokens=40)
    page.until(lambda: "draft-tiny" in page.text("#drafters"))
    page.until(lambda: page.all("#step-plot path"))
    assert page.all("#step-plot .empty") == []
    row = next(r for r in page.all("#requests tr")[1:] if "draft-tiny" in r.text)
    (cell,) = (c for c in row.find_elements("css selector", "td.cell") if c.text)
    last = httpx.get(f"{family.url}/dashboard/requests").json()["requests"][0]
    counts = last["drafters"]["draft-tiny"]
    share = round(100 * counts["num_accepted_tokens"] / counts["num_draft_tokens"])
    assert cell.text == f"{share}%"
    assert "8,192 tokens" in page.text("#kv-of")
    page.until(lambda: "100%" in page.text("#tenants"))
    page.until(lambda: page.text("#ttft").endswith("s"))
    page.until(lambda: re.fullmatch(r"plan [\d.]+ ms draft [\d.]+ ms receive .*", steps()))


def test_prices_are_shown(page: Page) -> None:
    policies = {"allocation": {"name": "priced"}, "admission": {"name": "fluid_guided"}}
    drafters = {"draft-tiny": WEIGHTS / "draft-tiny"}
    with model_server(WEIGHTS / "target-large", drafters, policies) as running:
        visit(page, running.url)
        page.until(lambda: "no policy has prices" in page.text("#prices") or page.all("#prices td"))
        answer_of(running.url, QUESTION, "draft-tiny", max_tokens=40)
        page.until(lambda: re.search(r"[\d.]+ tokens [\d.]+ ms", page.text("#prices")))
        assert page.text("#prices").endswith("0 tokens"), "no memory is kept free"


@pytest.fixture(scope="module")
def keyed() -> Iterator[RunningServer]:
    config = serve_config({"tenants": TENANTS}, metrics_keys=[hash_of_key("key-operator")])
    with running_server(config) as running:
        for key in ("key-north", "key-south"):
            body = {"prompt": "one two", "max_tokens": 8}
            headers = {"Authorization": f"Bearer {key}"}
            httpx.post(f"{running.url}/v1/completions", json=body, headers=headers)
        yield running


def sign_in(page: Page, key: str) -> None:
    page.type("#key", key)
    page.click("#sign-in button")
    page.until(lambda: page.text("#state") != "signed out" or page.text("#refused"))


def tenants_shown(page: Page) -> set[str]:
    page.until(lambda: page.all("#requests td:nth-child(2)"))
    return {cell.text for cell in page.all("#requests td:nth-child(2)")}


def test_a_wrong_key_opens_nothing(page: Page, keyed: RunningServer) -> None:
    visit(page, keyed.url)
    assert page.text("#state") == "signed out"
    sign_in(page, "wrong")
    page.until(lambda: page.text("#refused") == "This key is not accepted.")
    assert not page.one("#overview").is_displayed()
    assert page.run("return sessionStorage.length") == 0
    page.click("#to-playground")
    assert not page.one("#playground").is_displayed()


def test_an_operator_sees_all_tenants(page: Page, keyed: RunningServer) -> None:
    visit(page, keyed.url)
    sign_in(page, "key-operator")
    page.until(lambda: page.text("#state") == "serving")
    assert tenants_shown(page) == {"north", "south"}
    # The key is nowhere but where it is kept until the tab is closed.
    assert "key-operator" not in page.driver.page_source
    assert "key-operator" not in page.run("return location.href + JSON.stringify(localStorage)")
    assert page.one("#key").get_attribute("value") == ""
    assert {"north", "south"} <= set(page.text("#tenants").split())
    # Its key opens no model: the playground asks for another one.
    page.click("#to-playground")
    page.type("#prompt", "one two")
    page.click("#send")
    page.until(lambda: page.one("#chat-key-form").is_displayed())
    page.type("#chat-key", "key-north")
    page.click("#chat-key-form button")
    chat(page, "one two", **{"max-tokens": 5})
    assert len(tokens(page)) == 5
    # A reload keeps the keys, signing out does not.
    page.driver.refresh()
    page.until(lambda: page.text("#state") == "serving")
    page.click("#sign-out")
    page.until(lambda: page.text("#state") == "signed out")
    assert page.run("return sessionStorage.length") == 0


def test_a_tenant_sees_its_own(page: Page, keyed: RunningServer) -> None:
    visit(page, keyed.url)
    sign_in(page, "key-south")
    page.until(lambda: page.text("#state") == "serving")
    assert tenants_shown(page) == {"south"}
    assert page.one("#no-figures").is_displayed()
    assert not any(e.is_displayed() for e in page.all(".figures"))
    assert "north" not in page.driver.page_source
    page.click("#to-playground")
    chat(page, "one two", **{"max-tokens": 5})
    assert len(tokens(page)) == 5


def test_a_server_that_goes_away_and_comes_back(page: Page) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with server_process(FACTORY, port=port) as (_, url):
        visit(page, url)
        page.until(lambda: page.text("#state") == "serving")
    page.until(lambda: page.text("#state") == "the server does not answer")
    page.click("#to-playground")
    page.type("#prompt", "one two")
    page.click("#send")
    page.until(lambda: page.text("#chat-error") == "The server does not answer.")
    with server_process(FACTORY, port=port):
        page.until(lambda: page.text("#state") == "serving")
        chat(page, "one two", **{"max-tokens": 5})
        assert len(tokens(page)) == 5
