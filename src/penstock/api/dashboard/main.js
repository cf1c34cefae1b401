// The page: its tabs, signing in, and polling the server every second.

import { $ } from "./dom.js";
import { Overview } from "./overview.js";
import { Playground } from "./playground.js";
import { parse } from "./metrics.js";
import * as session from "./session.js";

const PERIOD_MS = 1000;
const overview = new Overview(), playground = new Playground();
let timer = null;

function state(css, text) {
  $("state").className = css;
  $("state").textContent = text;
}

/** The server wants a key. */
function askForKey() {
  const wasRefused = session.hasKey();
  session.signOut();
  state("", "signed out");
  $("refused").textContent = wasRefused ? "This key is not accepted." : "";
  $("sign-in").hidden = false;
  $("sign-out").hidden = true;
  for (const part of ["overview", "playground"]) $(part).hidden = true;
  $("key").focus();
}

function showPart() {
  const shown = location.hash === "#playground" ? "playground" : "overview";
  for (const part of ["overview", "playground"]) {
    $(part).hidden = part !== shown || !$("sign-in").hidden;
    if (part === shown) $(`to-${part}`).setAttribute("aria-current", "page");
    else $(`to-${part}`).removeAttribute("aria-current");
  }
}

async function look() {
  try {
    const [metrics, requests] = await Promise.all(["metrics", "dashboard/requests"].map(path => session.ask(path + location.search)));
    if (requests.status === 401) return askForKey();
    if (!requests.ok) throw new Error(`status ${requests.status}`);
    // A tenant's key may open its own requests and no more.
    const figures = metrics.ok ? parse(await metrics.text()) : null;
    const known = await requests.json();
    $("sign-out").hidden = !session.hasKey();
    $("model").textContent = known.model;
    state(known.problem ? "down" : "up", known.problem ?? "serving");
    overview.show(figures, known);
    playground.know(known);
  } catch (error) {
    if (error instanceof TypeError || error.name === "TimeoutError") state("down", "the server does not answer");
    else state("down", `the server's answer cannot be read: ${error.message}`);
  }
  timer = setTimeout(look, PERIOD_MS);
}

$("sign-in").addEventListener("submit", event => {
  event.preventDefault();
  session.keep($("key").value);
  $("key").value = "";
  $("sign-in").hidden = true;
  showPart();
  look();
});

$("sign-out").addEventListener("click", () => {
  clearTimeout(timer);
  session.signOut();
  location.reload();
});

addEventListener("hashchange", () => { showPart(); overview.draw(); });
addEventListener("resize", () => overview.draw());
showPart();
look();
