/* The address: #/run/ID?attack=...&cell=... names what is on the screen, so that it can be kept and sent. */

/** {path: ["run", "photos"], query: {attack: "cpl-1"}} of a hash. */
export function parseHash(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").filter(Boolean).map(decodePart), query: Object.fromEntries(new URLSearchParams(query)) };
}

/** The hash of a path and a query; what is empty is left out. */
export function makeLink(path, query = {}) {
  const set = new URLSearchParams();
  for (const [key, value] of Object.entries(query))
    if (value !== null && value !== undefined && value !== "") set.set(key, value);
  const tail = set.toString();
  return `#/${path.map(encodeURIComponent).join("/")}${tail ? `?${tail}` : ""}`;
}

/** Changes the query of the current address in place: the back button leads out of the view, not through its filters. */
export function changeQuery(changes) {
  const { path, query } = parseHash(location.hash);
  history.replaceState(null, "", makeLink(path, { ...query, ...changes }));
}

function decodePart(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
