// Table of running and recently ended requests by drafter.

import { count, percent, table } from "./dom.js";

/** The first characters after the prefix. */
const shortId = id => id.replace(/^(chatcmpl|cmpl)-/, "").slice(0, 8);

export function showRequests({ drafters, requests }) {
  const used = requests.flatMap(r => Object.keys(r.drafters));
  const columns = [...new Set([...drafters, ...used])];
  const rows = requests.map(r => {
    const css = r.state === "ended" ? "ended" : "";
    const cells = columns.map(name => {
      const told = r.drafters[name];
      if (told === undefined) return { className: "cell " + css, content: "" };
      const share = told.num_draft_tokens ? told.num_accepted_tokens / told.num_draft_tokens : 0;
      return {
        className: "cell", content: percent(share), share,
        title: `${count(told.num_drafts)} drafts, ${count(told.num_accepted_tokens)} of ${count(told.num_draft_tokens)} tokens accepted`,
      };
    });
    return [
      { className: css, content: shortId(r.id), title: r.id }, { className: "left " + css, content: r.tenant },
      { className: "left " + css, content: r.reason ?? r.state },
      { className: "spare " + css, content: r.seconds.toFixed(1) + " s" },
      { className: "spare " + css, content: count(r.num_prompt_tokens) },
      { className: css, content: count(r.num_tokens) },
      { className: "left spare " + css, content: r.asked }, ...cells,
    ];
  });
  const left = content => ({ className: "left", content });
  const spare = content => ({ className: "spare", content });
  const heads = ["request", left("tenant"), left("state"), spare("time"), spare("prompt tokens"), "output tokens",
    { className: "left spare", content: "asked for" }, ...columns];
  table("requests", heads, rows, "no requests yet");
}
