// Elements and number formats. Text is set as text only, never as HTML.

export const $ = id => document.getElementById(id);

/** An element with a class and children, which are elements or text. */
export function make(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.map(c => (c instanceof Node ? c : String(c))));
  return made;
}

/** A bar filled to `share`, with a line at the share `mark`, if given. */
export function meter(share, mark) {
  const fill = make("i"), bar = make("div", "bar", fill);
  fill.style.width = percentOf(share);
  if (mark !== undefined) {
    const line = make("em");
    line.style.left = `calc(${percentOf(mark)} - 1px)`;
    bar.append(line);
  }
  return { className: "meter", content: bar };
}

const percentOf = share => (100 * Math.min(1, Math.max(0, share))).toFixed(1) + "%";

/** Fill a table. A cell is text, or {className, content, share}. */
export function table(id, heads, rows, empty) {
  const cell = (tag, given) => {
    const { className = "", content = given, share, title } = given?.content === undefined ? {} : given;
    const made = make(tag, className, ...[content ?? ""].flat());
    if (share !== undefined) made.style.setProperty("--share", share);
    if (title !== undefined) made.title = title;
    return made;
  };
  const row = (tag, cells) => make("tr", "", ...cells.map(c => cell(tag, c)));
  $(id).replaceChildren(
    ...(rows.length ? [row("th", heads), ...rows.map(r => row("td", r))] : [row("td", [{ className: "empty", content: empty }])]),
  );
}

/** The names of a plot's series; `series` has {name, css, dashed}. */
export function key(id, series) {
  $(id).replaceChildren(...series.map(s => make("span", "", make("i", s.css + (s.dashed ? " dashed" : "")), s.name)));
}

export const count = x => Math.round(x).toLocaleString("en");
export const percent = x => (100 * x).toFixed(x > 0 && x < 0.0995 ? 1 : 0) + "%";
export const seconds = x => (x === null ? "–" : x < 1 ? (1000 * x).toPrecision(3) * 1 + " ms" : x.toPrecision(3) * 1 + " s");
