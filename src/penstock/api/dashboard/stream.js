// Server-sent events of one answer.

/** Data of a response's events, parsed, until `[DONE]` or the end. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        const data = line.slice("data: ".length);
        if (data.trim() === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The message of an error response. */
export async function problemOf(response) {
  let message = `status ${response.status}`;
  try { message = (await response.json()).error.message ?? message; } catch { /* not ours */ }
  const after = response.headers.get("Retry-After");
  return after === null ? message : `${message} (try again in ${after} s)`;
}
