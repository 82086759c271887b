/* The service's JSON. Every failure becomes a `Problem` that says what is wrong in words. */

const API_ROOT = new URL("api/v1/", document.baseURI);

export class Problem extends Error {
  constructor(message, { status = 0, field = null, known = null } = {}) {
    super(message);
    this.status = status;
    this.field = field;
    this.known = known;
  }
}

let askForToken = null;

/** What is called, and waited for, where the service asks for its token. */
export function setTokenPrompt(ask) {
  askForToken = ask;
}

/** The address of `path` below the API, with those of `query` that are set. */
export function makeUrl(path, query = {}) {
  const url = new URL(path.split("/").map(encodeURIComponent).join("/"), API_ROOT);
  for (const [key, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(key, value);
  }
  return url;
}

/** An address that the service gave, or null where it does not lead back to the service. */
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

/** All pages of a list, at most `most` items; `seen` is called with each page. */
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
      throw new Problem("The service does not answer. It may have stopped, or the connection is gone.");
    }
    if (answer.status === 401 && locked && askForToken) {
      await askForToken();
      continue;
    }
    const body = await read(answer);
    if (answer.ok) return body;
    const error = body?.error ?? {};
    throw new Problem(error.message ?? `The service answered ${answer.status} without saying why.`, {
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
