/* Numbers and states in words, as the report spells them. */

const SPACE = "\u00a0";
const NAMES = {
  agic: "AGIC",
  cpl: "CPL",
  dlg: "DLG",
  hgap: "H-GAP",
  idlg: "iDLG",
  inverting_gradients: "Inverting Gradients",
  rgap: "R-GAP",
  exact: "Exact",
};

export const STATES = {
  queued: "queued",
  running: "running",
  done: "done",
  failed: "failed",
  cancelled: "cancelled",
  set_aside: "set aside",
};

/** As the papers spell it, where known. */
export function attackName(name) {
  return Object.hasOwn(NAMES, name) ? NAMES[name] : name;
}

/** What a job does, as a name: audits name no attack. */
export function jobName(spec) {
  return spec.attack ? attackName(spec.attack) : "Audit";
}

/** What is the same of an attack and its null. */
export function base(spec) {
  return String(spec).replace(/ without gradient$/, "");
}

/** The attack's name out of a specification such as `cpl(restarts=2)`. */
export function specName(spec) {
  return attackName(String(spec).split("(")[0]);
}

/** What a null is, for the first place of a view that names one. */
export const NULL_EXPLAINED =
  "The null of an attack is the same attack without the update: it can only guess. Only what an attack finds beyond its null leaked.";

export function percent(share) {
  return known(share) ? `${(100 * share).toFixed(0)}${SPACE}%` : "–";
}

export function decibel(value) {
  return known(value) ? `${value.toFixed(1)}${SPACE}dB` : "–";
}

export function number(value, digits = 2) {
  if (!known(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e4 || size < 1e-2
    ? value.toExponential(1).replace("e+", "e").replace(".0e", "e")
    : Number(value.toPrecision(digits + 1)).toString();
}

export function counted(count, noun, plural = `${noun}s`) {
  return `${count.toLocaleString("en")}${SPACE}${count === 1 ? noun : plural}`;
}

/** From seconds to "9.8 s", "1 min 33 s", "2 h 5 min". */
export function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 99.5) return `${seconds < 9.95 ? seconds.toFixed(1) : seconds.toFixed(0)}${SPACE}s`;
  const whole = Math.round(seconds);
  const minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** From bytes to "73 kB": powers of 1000. */
export function amount(bytes) {
  if (!known(bytes)) return "–";
  const units = ["B", "kB", "MB", "GB"];
  let size = bytes;
  let unit = 0;
  while (size >= 999.5 && unit < 3) {
    size /= 1000;
    unit += 1;
  }
  return `${size >= 99.5 || unit === 0 ? size.toFixed(0) : size.toFixed(1)}${SPACE}${units[unit]}`;
}

/** Where a moment lies from now: "just now", "12 min ago", a date beyond a day. */
export function ago(iso, now = Date.now()) {
  const then = Date.parse(iso ?? "");
  if (Number.isNaN(then)) return "–";
  const seconds = (now - then) / 1000;
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)}${SPACE}min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)}${SPACE}h ago`;
  return new Date(then).toISOString().slice(0, 10);
}

export function elapsed(job, now = Date.now()) {
  const from = Date.parse(job.started ?? "");
  const to = job.ended ? Date.parse(job.ended) : now;
  return Number.isNaN(from) ? null : Math.max(0, (to - from) / 1000);
}

/** What clients do to what they send, or null where they do nothing. */
export function protection(recording) {
  const parts = [recording.defense];
  if (recording.gradient && recording.gradient !== "plain") parts.push(`gradient ${recording.gradient}`);
  if (recording.network) parts.push(`network ${recording.network}`);
  if (recording.inputs) parts.push(`inputs ${recording.inputs}`);
  if (recording.secure_aggregation) parts.push("secure aggregation");
  return parts.filter(Boolean).join(", ") || null;
}

/** "3 clients, 2 rounds". */
export function size(recording) {
  return `${counted(recording.clients, "client")}, ${counted(recording.rounds, "round")}`;
}

/** A client's name short enough for a column; the whole of it is told on hover and focus. */
export function short(name, most = 12) {
  return name.length > most ? `${name.slice(0, most - 1)}…` : name;
}

export function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** [1, 2, 3, 7] as "rounds 1 to 3, 7". */
export function inRounds(rounds) {
  return `${rounds.length > 1 ? "rounds" : "round"} ${ranges(rounds)}`;
}

/** [1, 2, 3, 7] as "1 to 3, 7". */
export function ranges(rounds) {
  const parts = [];
  for (const round of rounds) {
    const last = parts.at(-1);
    if (last && last[1] === round - 1) last[1] = round;
    else parts.push([round, round]);
  }
  return parts.map(([a, b]) => (a === b ? `${a}` : `${a} to ${b}`)).join(", ");
}
