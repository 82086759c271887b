/* Settings of the federation that the server knows, and the updates that it did not receive. */

import { get } from "../api.js";
import { h, put } from "../dom.js";
import { makePanel } from "../panel.js";
import { formatBytes, formatCount } from "../words.js";
import { formatModelName } from "./runs.js";

const MAX_MISSING = 100;

/** Return a collapsed panel, whose data are loaded when it is opened. */
export function makeFederationDetails(app, id) {
  const body = h("div");
  const details = h("details.panel", {}, h("summary", {}, "The federation, as the server knows it"), body);
  details.addEventListener("toggle", () => {
    if (!details.open) return;
    put(
      body,
      makePanel({
        className: "bare",
        load: () => get(`recordings/${id}`),
        draw: (place, run) => put(place, h("dl.facts", {}, listFacts(run))),
      }),
      makePanel({ className: "bare", load: () => readMissing(id), draw: (place, rows) => put(place, makeMissingList(rows)) }),
    );
  });
  return details;
}

function listFacts(run) {
  const makeFact = (label, ...value) => h("div", {}, h("dt", {}, label), h("dd", {}, ...value));
  const t = run.training ?? {};
  const often = t.steps ? formatCount(t.steps, "step") : t.epochs ? formatCount(t.epochs, "epoch") : "";
  const on = run.secure_aggregation
    ? typeof run.secure_aggregation === "object"
      ? formatSettings(run.secure_aggregation)
      : "on"
    : "off";
  return [
    makeFact("Model", h("code", {}, formatModelName(run))),
    makeFact("Data", run.data ? `${run.data.shape.join(" × ")}, ${run.data.num_classes} classes` : "not known"),
    makeFact(
      "Schedule",
      [
        often && `${often} a round`,
        t.batch_size && `batches of ${t.batch_size}`,
        t.learning_rate && `SGD at ${t.learning_rate}`,
        t.momentum && `momentum ${t.momentum}`,
      ]
        .filter(Boolean)
        .join(", "),
    ),
    makeFact("Updates", String(run.observations)),
    makeFact("defense", h("code", {}, run.defense || "none")),
    makeFact("gradient", run.gradient || "plain"),
    makeFact("network", run.network || "unchanged"),
    makeFact("inputs", run.inputs || "unchanged"),
    makeFact("secure_aggregation", on),
    makeFact("Truth", run.truth ? "given to this service" : "not given: nothing is scored here"),
  ];
}

function formatSettings(found) {
  return Object.entries(found)
    .map(([key, value]) => `${key} ${value}`)
    .join(", ");
}

async function readMissing(id) {
  const answers = await Promise.all(
    ["failed", "late"].map((status) => get(`recordings/${id}/observations`, { status, limit: MAX_MISSING })),
  );
  return answers.flatMap((answer) => answer.items);
}

function makeMissingList(rows) {
  if (!rows.length) return h("p.soft", {}, "Every reply held an update.");
  const makeLine = (row) =>
    h(
      "li",
      {},
      `round ${row.round}, `,
      h("code", {}, row.client),
      `: ${row.status}${row.reason ? `, ${row.reason}` : ""}, ${formatBytes(row.bytes)}`,
    );
  return [
    h("h3", {}, `${formatCount(rows.length, "reply", "replies")} without an update`),
    h("ul.plain", {}, rows.map(makeLine)),
  ];
}
