/* Requests to the service's JSON API. Every failure is thrown as a `Problem`, whose message is shown to the user. */

const API_ROOT = new URL("api/v1/", document.baseURI);

/**
 * A failed request. status: HTTP status; 0 without a response. field: name of the wrong field of the request, or null.
 * known: valid names, such as those of all recordings; null if the service lists none.
 */
export class Problem extends Error {
  constructor(message, { status = 0, field = null, known = null } = {}) {
    super(message);
    this.status = status;
    this.field = field;
    this.known = known;
  }
}

let askForToken = null;

/** Set the function that asks the user for the token. Requests that lack it are sent again once its promise is fulfilled. */
export function setTokenPrompt(ask) {
  askForToken = ask;
}

/** Return the URL of `path` below the API with the parameters `query`; those that are null, undefined or "" are left out. */
export function makeUrl(path, query = {}) {
  const url = new URL(path.split("/").map(encodeURIComponent).join("/"), API_ROOT);
  for (const [key, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(key, value);
  }
  return url;
}

/** Return a URL from a response in absolute form; null if it is missing, or of another origin than the service. */
export function resolveOwnUrl(url) {
  if (!url) return null;
  const full = new URL(url, document.baseURI);
  return full.origin === API_ROOT.origin ? full.href : null;
}

export async function get(path, query, options) {
  return ask(makeUrl(path, query), { method: "GET" }, options);
}

export async function post(path, body, options) {
  const request = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body ?? {}) };
  return ask(makeUrl(path), request, options);
}

export async function remove(path) {
  return ask(makeUrl(path), { method: "DELETE" });
}

/** Return the items of a list. Pages are read until the list ends or at least `most` items are there; `seen` gets each page. */
export async function getAll(path, query = {}, most = 2000, seen = () => {}) {
  const items = [];
  let after = null;
  do {
    const page = await get(path, { ...query, after });
    items.push(...page.items);
    seen(page);
    after = page.next;
  } while (after !== null && after !== undefined && items.length < most);
  return items;
}

async function ask(url, request, { locked = true } = {}) {
  for (;;) {
    let answer;
    try {
      answer = await fetch(url, { ...request, credentials: "same-origin", cache: "no-cache", redirect: "error" });
    } catch {
      throw new Problem("The service does not answer. Check that attacker serve runs and that this machine can reach it.");
    }
    if (answer.status === 401 && locked && askForToken) {
      await askForToken();
      continue;
    }
    const body = await read(answer);
    if (answer.ok) return body;
    const error = body?.error ?? {};
    const unexplained = `The service answered with HTTP status ${answer.status} and no explanation; see its log.`;
    throw new Problem(error.message ?? unexplained, {
      status: answer.status,
      field: error.field ?? null,
      known: error.known ?? null,
    });
  }
}

async function read(answer) {
  try {
    return answer.status === 204 ? null : await answer.json();
  } catch {
    return null;
  }
}
