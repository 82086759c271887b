/* Texts of numbers, states and names. */

const NO_BREAK_SPACE = "\u00a0";
const PAPER_NAMES = {
  accumulate: "Accumulate",
  agic: "AGIC",
  cocktail_party: "Cocktail Party",
  cohort_spans: "Cohort Spans",
  cpl: "CPL",
  dlg: "DLG",
  exact: "Exact",
  hgap: "H-GAP",
  idlg: "iDLG",
  inverting_gradients: "Inverting Gradients",
  membership: "Membership",
  rgap: "R-GAP",
  robbing_the_fed: "Robbing the Fed (malicious server)",
  rog: "ROG",
  spans: "Spans",
};

export const JOB_STATES = {
  queued: "queued",
  running: "running",
  done: "done",
  failed: "failed",
  cancelled: "cancelled",
  set_aside: "set aside",
};

/** Return an attack's name for display, as in the report; unchanged if it is not in `PAPER_NAMES`. */
export function formatAttackName(name) {
  return Object.hasOwn(PAPER_NAMES, name) ? PAPER_NAMES[name] : name;
}

/** Return the name of a job: that of its attack, or "Audit" if it has none. */
export function formatJobName(spec) {
  return spec.attack ? formatAttackName(spec.attack) : "Audit";
}

/** Return the specification of an attack, given its own or that of its null. */
export function removeNullSuffix(spec) {
  return String(spec).replace(/ without gradient$/, "");
}

/** Return whether two results are of the same attack with the same settings, as those of an attack and its null are. */
export function haveSameSettings(one, other) {
  return (
    removeNullSuffix(one.spec) === removeNullSuffix(other.spec) &&
    one.seed === other.seed &&
    one.knows_defense === other.knows_defense
  );
}

/** Return the state of a case as text. "none" is the state of a case that cannot be attacked. */
export function formatCaseState(state) {
  return state === "none" ? "no update to attack" : state;
}

/** Return the attack's name for display from a specification such as `cpl(restarts=2)`. */
export function formatSpecName(spec) {
  return formatAttackName(String(spec).split("(")[0]);
}

/** Explanation of nulls, shown before the first null of a view. */
export const NULL_EXPLAINED =
  "The null of an attack is the same attack without the update: it can only guess. " +
  "Only what an attack finds beyond its null counts as a leak.";

export function formatPercent(share) {
  return isKnown(share) ? `${(100 * share).toFixed(0)}${NO_BREAK_SPACE}%` : "–";
}

export function formatDecibels(value) {
  return isKnown(value) ? `${value.toFixed(1)}${NO_BREAK_SPACE}dB` : "–";
}

export function formatNumber(value, digits = 2) {
  if (!isKnown(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e4 || size < 1e-2
    ? value.toExponential(1).replace("e+", "e").replace(".0e", "e")
    : Number(value.toPrecision(digits + 1)).toString();
}

export function formatCount(count, noun, plural = `${noun}s`) {
  return `${count.toLocaleString("en")}${NO_BREAK_SPACE}${count === 1 ? noun : plural}`;
}

/** Return a duration as text, such as "9.8 s", "1 min 43 s" or "2 h 5 min". */
export function formatDuration(seconds) {
  if (!isKnown(seconds)) return "–";
  if (seconds < 99.5) return `${seconds < 9.95 ? seconds.toFixed(1) : seconds.toFixed(0)}${NO_BREAK_SPACE}s`;
  const whole = Math.round(seconds);
  const minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Return a number of bytes as text in powers of 1000, such as "73 B", "73.0 kB" or "730 kB". */
export function formatBytes(bytes) {
  if (!isKnown(bytes)) return "–";
  const units = ["B", "kB", "MB", "GB"];
  let size = bytes;
  let unit = 0;
  while (size >= 999.5 && unit < 3) {
    size /= 1000;
    unit += 1;
  }
  return `${size >= 99.5 || unit === 0 ? size.toFixed(0) : size.toFixed(1)}${NO_BREAK_SPACE}${units[unit]}`;
}

/** Return how long ago a time was, such as "just now" or "12 min ago"; its date if it was more than a day ago. */
export function formatAge(iso, now = Date.now()) {
  const then = Date.parse(iso ?? "");
  if (Number.isNaN(then)) return "–";
  const seconds = (now - then) / 1000;
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)}${NO_BREAK_SPACE}min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)}${NO_BREAK_SPACE}h ago`;
  return new Date(then).toISOString().slice(0, 10);
}

/** Return the seconds from the start of a job's last attempt to its end, or to `now` if it has not ended; null before a start. */
export function computeElapsed(job, now = Date.now()) {
  const from = Date.parse(job.started ?? "");
  const to = job.ended ? Date.parse(job.ended) : now;
  return Number.isNaN(from) ? null : Math.max(0, (to - from) / 1000);
}

/** Return the defenses of a recording and its secure aggregation as text; null if there are none, or they are not known. */
export function describeProtection(recording) {
  const parts = [recording.defense];
  if (recording.gradient && recording.gradient !== "plain") parts.push(`gradient ${recording.gradient}`);
  if (recording.network) parts.push(`network ${recording.network}`);
  if (recording.inputs) parts.push(`inputs ${recording.inputs}`);
  if (recording.secure_aggregation) parts.push("secure aggregation");
  return parts.filter(Boolean).join(", ") || null;
}

/** Return the same as text in every case. A recording whose manifest cannot be read has `defense` null. */
export function formatProtection(recording) {
  return recording.defense === null ? "defense not known" : (describeProtection(recording) ?? "no defense");
}

/** Return the size of a recording as text, such as "3 clients, 2 rounds". */
export function describeSize(recording) {
  return `${formatCount(recording.clients, "client")}, ${formatCount(recording.rounds, "round")}`;
}

/** Return a client's name, cut to `most` characters. */
export function shorten(name, most = 12) {
  return name.length > most ? `${name.slice(0, most - 1)}…` : name;
}

export function isKnown(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** Return ascending rounds as text, such as "rounds 1 to 3, 7" for [1, 2, 3, 7]. */
export function formatRounds(rounds) {
  return `${rounds.length > 1 ? "rounds" : "round"} ${formatRanges(rounds)}`;
}

function formatRanges(rounds) {
  const parts = [];
  for (const round of rounds) {
    const last = parts.at(-1);
    if (last && last[1] === round - 1) last[1] = round;
    else parts.push([round, round]);
  }
  return parts.map(([a, b]) => (a === b ? `${a}` : `${a} to ${b}`)).join(", ");
}
