// A chat that shows the origin of each token.

import { $, count, make, percent, seconds } from "./dom.js";
import { askModel, keepForChat } from "./session.js";
import { events, problemOf } from "./stream.js";

const COLOURS = 6;
const MEANINGS = {
  accepted: drafter => `drafted by ${drafter} and accepted`,
  recovered: drafter => `sampled by the target after it rejected a token of ${drafter}`,
  bonus: drafter => `sampled by the target after a wholly accepted draft of ${drafter}`,
  target: () => "sampled by the target in a step without a draft",
};

export class Playground {
  #drafters = [];
  #messages = [];
  #abort = null;
  #noTurns = $("no-turns");

  constructor() {
    $("chat").addEventListener("submit", event => { event.preventDefault(); this.#send(); });
    $("stop").addEventListener("click", () => this.#abort?.abort());
    $("clear").addEventListener("click", () => this.#clear());
    $("prompt").addEventListener("keydown", event => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("chat").requestSubmit(); }
    });
    $("chat-key-form").addEventListener("submit", event => {
      event.preventDefault();
      keepForChat($("chat-key").value);
      $("chat-key").value = "";
      $("chat-key-form").hidden = true;
    });
    for (const kind of ["click", "mouseover"]) $("turns").addEventListener(kind, event => this.#tell(event.target.closest(".token")));
    this.know({ drafters: [] }, true);
  }

  /** Update the list of drafters; draft servers come and go. */
  know({ drafters }, isFirst = false) {
    if (!isFirst && drafters.join("\n") === this.#drafters.join("\n")) return;
    this.#drafters = drafters;
    const chosen = $("drafter").value || "auto";
    const option = (value, text) => Object.assign(make("option", "", text), { value });
    $("drafter").replaceChildren(option("auto", "auto: the server chooses"), option("none", "none"), ...drafters.map(d => option(d, d)));
    $("drafter").value = ["auto", "none", ...drafters].includes(chosen) ? chosen : "auto";
    $("origins-key").replaceChildren(
      ...drafters.map(d => this.#token({ text: d, origin: "accepted", drafter: d })),
      ...["recovered", "bonus", "target"].map(kind => make("span", `token ${kind}`, kind)),
    );
  }

  #clear() {
    this.#abort?.abort();
    this.#messages = [];
    $("turns").replaceChildren(this.#noTurns);
    $("chat-error").textContent = "";
  }

  #body() {
    const seed = $("seed").value, most = $("max-tokens").valueAsNumber, temperature = $("temperature").valueAsNumber;
    return {
      messages: this.#messages,
      stream: true, stream_options: { include_usage: true },
      speculation: { drafter: $("drafter").value, origins: true },
      ...(Number.isNaN(temperature) ? {} : { temperature }),
      ...(seed === "" ? {} : { seed: Number(seed) }),
      ...(Number.isNaN(most) ? {} : { max_tokens: most }),
    };
  }

  async #send() {
    const asked = $("prompt").value;
    if (this.#abort !== null || !asked.trim()) return;
    $("prompt").value = "";
    $("chat-error").textContent = "";
    this.#noTurns.remove();
    this.#messages.push({ role: "user", content: asked });
    const question = make("div", "turn", make("h3", "", "You"), asked);
    $("turns").append(question);
    const answer = make("div", "turn answer", make("h3", "", "Model"));
    $("turns").append(answer);
    $("turns").scrollTop = $("turns").scrollHeight;
    this.#abort = new AbortController();
    this.#work(true);
    const made = new Answer();
    try {
      await this.#stream(answer, made);
      this.#messages.push({ role: "assistant", content: made.text });
    } catch (error) {
      // A failed turn is not part of the next request.
      this.#messages.pop();
      $("chat-error").textContent = error.name === "AbortError" ? "Stopped." : error instanceof TypeError ? "The server does not answer." : error.message;
      if (!made.text) {
        question.remove();
        answer.remove();
        $("prompt").value ||= asked;
      }
    } finally {
      this.#abort = null;
      this.#work(false);
    }
  }

  async #stream(answer, made) {
    const response = await askModel("v1/chat/completions" + location.search, this.#body(), this.#abort.signal);
    if (!response.ok) {
      const problem = await problemOf(response);
      if (response.status === 401) {
        $("chat-key-form").hidden = false;
        $("chat-key-note").textContent = "The key of this page opens no model.";
        $("chat-key").focus();
      }
      throw new Error(problem);
    }
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const isAtEnd = $("turns").scrollTop + $("turns").clientHeight > $("turns").scrollHeight - 30;
      const tokens = event.choices[0]?.origins ?? [];
      made.take(tokens);
      answer.append(...tokens.map(told => this.#token(told)));
      if (event.usage) made.usage = event.usage;
      made.show();
      if (isAtEnd) $("turns").scrollTop = $("turns").scrollHeight;
    }
    if (made.usage === null) throw new Error("The answer broke off.");
  }

  #token({ text, origin, drafter }) {
    const made = make("span", `token ${origin}`, make("span", "", text));
    if (origin === "accepted") made.classList.add(this.#colourOf(drafter));
    made.dataset.origin = origin;
    if (drafter !== null) made.dataset.drafter = drafter;
    return made;
  }

  #colourOf(drafter) {
    return `s${Math.max(0, this.#drafters.indexOf(drafter)) % COLOURS}`;
  }

  #tell(token) {
    if (!token) return;
    for (const other of $("turns").querySelectorAll(".chosen")) other.classList.remove("chosen");
    token.classList.add("chosen");
    const { origin, drafter } = token.dataset;
    $("token-note").textContent = `${JSON.stringify(token.textContent)}: ${MEANINGS[origin](drafter)}`;
  }

  #work(isAtWork) {
    $("send").disabled = isAtWork;
    $("stop").disabled = !isAtWork;
    $("turns").setAttribute("aria-busy", isAtWork);
  }
}

/** One streamed answer and its figures. */
class Answer {
  text = "";
  usage = null;
  #startedAt = performance.now();
  #firstAt = null;
  #lastAt = null;
  #counts = { accepted: 0, recovered: 0, bonus: 0, target: 0 };
  #numFirst = 0;

  /** Add the tokens of a chunk. The first chunk does not count for the speed. */
  take(tokens) {
    if (!tokens.length) return;
    this.#lastAt = performance.now();
    if (this.#firstAt === null) {
      this.#firstAt = this.#lastAt;
      this.#numFirst = tokens.length;
    }
    for (const { text, origin } of tokens) {
      this.text += text;
      this.#counts[origin] += 1;
    }
  }

  show() {
    const num = Object.values(this.#counts).reduce((sum, n) => sum + n, 0);
    if (this.#firstAt === null) return;
    const passed = (this.#lastAt - this.#firstAt) / 1000;
    $("chat-speed").textContent = passed > 0 ? `${((num - this.#numFirst) / passed).toPrecision(3) * 1} tokens/s` : "–";
    $("chat-ttft").textContent = `first token after ${seconds((this.#firstAt - this.#startedAt) / 1000)}`;
    $("chat-tokens").textContent = `${count(num)} tokens`;
    const shown = Object.entries(this.#counts).filter(([, n]) => n).map(([kind, n]) => `${count(n)} ${kind}`);
    $("chat-split").textContent = shown.join(", ");
    if (this.usage === null) return;
    const told = this.usage.speculation, proposed = told.num_draft_tokens;
    $("chat-accepted").textContent = proposed ? percent(told.num_accepted_tokens / proposed) : "–";
    $("chat-drafts").textContent = proposed ? `${count(told.num_accepted_tokens)} of ${count(proposed)} draft tokens` : "nothing was drafted";
    $("chat-length").textContent = told.mean_acceptance_length.toFixed(2);
    $("chat-rounds").textContent = proposed ? `${count(told.num_drafts)} drafts, most by ${told.drafter}` : "1 is without drafts";
  }
}
