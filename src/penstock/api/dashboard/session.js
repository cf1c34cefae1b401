// API keys of the page, kept until the tab is closed.

const PAGE = "penstock-api-key", CHAT = "penstock-chat-key";
const TIMEOUT_MS = 8000;

export const keep = key => sessionStorage.setItem(PAGE, key);
export const keepForChat = key => sessionStorage.setItem(CHAT, key);
export const hasKey = () => sessionStorage.getItem(PAGE) !== null;

export function signOut() {
  sessionStorage.removeItem(PAGE);
  sessionStorage.removeItem(CHAT);
}

function headers(key) {
  return key === null ? {} : { Authorization: `Bearer ${key}` };
}

/** Fetch with the page's key. Any status is returned; throws on a timeout. */
export function ask(path) {
  return fetch(path, {
    cache: "no-store", headers: headers(sessionStorage.getItem(PAGE)),
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
}

/** Fetch with the chat's key: an operator's key is not valid for generation. */
export function askModel(path, body, signal) {
  const key = sessionStorage.getItem(CHAT) ?? sessionStorage.getItem(PAGE);
  if (body === undefined) return fetch(path, { cache: "no-store", headers: headers(key), signal });
  return fetch(path, {
    method: "POST", headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify(body), signal,
  });
}
