/* The hash of the address, such as #/run/ID?attack=...&cell=..., which names the view and its filters for bookmarks and links. */

/** Return the parts of a hash, such as {path: ["run", "photos"], query: {attack: "cpl-1"}} for #/run/photos?attack=cpl-1. */
export function parseHash(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").filter(Boolean).map(decodePart), query: Object.fromEntries(new URLSearchParams(query)) };
}

/** Return the hash of a path and a query; values that are null, undefined or "" are left out. */
export function makeLink(path, query = {}) {
  const set = new URLSearchParams();
  for (const [key, value] of Object.entries(query))
    if (value !== null && value !== undefined && value !== "") set.set(key, value);
  const tail = set.toString();
  return `#/${path.map(encodeURIComponent).join("/")}${tail ? `?${tail}` : ""}`;
}

/** Change the query of the current address without a history entry: the back button then leaves the view at once. */
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
