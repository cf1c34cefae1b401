// Whose page this is: keys are kept until the tab is closed, and sent with every question.

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

/** What the page shows. An answer of whatever status; throws where there is none in time. */
export function ask(path) {
  return fetch(path, {
    cache: "no-store", headers: headers(sessionStorage.getItem(PAGE)),
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
}

/** What models are for: an operator's key opens none of them, so there may be another one. */
export function askModel(path, body, signal) {
  const key = sessionStorage.getItem(CHAT) ?? sessionStorage.getItem(PAGE);
  if (body === undefined) return fetch(path, { cache: "no-store", headers: headers(key), signal });
  return fetch(path, {
    method: "POST", headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify(body), signal,
  });
}
