/* Settings of the federation that the server knows, and the updates that it did not receive. */

import { get } from "../api.js";
import { h, put } from "../dom.js";
import { makePanel } from "../panel.js";
import { formatBytes, formatCount } from "../words.js";
import { formatModelName } from "./runs.js";

const MAX_MISSING = 100;
const OPTIMISERS = { sgd: "SGD", adam: "Adam", adamw: "AdamW" };
const UNKNOWN = "not known";

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
      makePanel({ className: "bare", load: () => readMissing(id), draw: (place, found) => put(place, makeMissingList(found)) }),
    );
  });
  return details;
}

function listFacts(run) {
  const makeFact = (label, ...value) => h("div", {}, h("dt", {}, label), h("dd", {}, ...value));
  const t = run.training ?? {};
  const often = t.steps ? formatCount(t.steps, "step") : t.epochs ? formatCount(t.epochs, "epoch") : "";
  const training = [
    often && `${often} a round`,
    t.batch_size && `batches of ${t.batch_size}`,
    t.learning_rate && `${OPTIMISERS[t.optimiser] ?? "SGD"} with learning rate ${t.learning_rate}`,
    t.momentum && `momentum ${t.momentum}`,
  ];
  const describe = (setting) => (setting === null ? UNKNOWN : setting || "none");
  return [
    makeFact("Model", h("code", {}, formatModelName(run) || UNKNOWN)),
    makeFact("Data", run.data ? `${run.data.shape.join(" × ")}, ${run.data.num_classes} classes` : UNKNOWN),
    makeFact("Local training", training.filter(Boolean).join(", ") || UNKNOWN),
    makeFact("Observations", String(run.observations)),
    makeFact("Defense of updates", h("code", {}, describe(run.defense))),
    makeFact("Defense of gradients", describe(run.gradient === "plain" ? "" : run.gradient)),
    makeFact("Defense of the network", describe(run.network)),
    makeFact("Defense of inputs", describe(run.inputs)),
    makeFact("Secure aggregation", describeAggregation(run.secure_aggregation)),
    makeFact("True examples", run.truth ? "given to this service" : "not given, so that nothing is scored"),
  ];
}

/** Return secure aggregation as text. found: its parameters; true or false without any; null if it is not known. */
function describeAggregation(found) {
  if (found === null) return UNKNOWN;
  if (typeof found !== "object") return found ? "on" : "off";
  const settings = Object.entries(found).map(([key, value]) => `${key} ${value}`);
  return settings.join(", ") || "on";
}

async function readMissing(id) {
  const answers = await Promise.all(
    ["failed", "late"].map((status) => get(`recordings/${id}/observations`, { status, limit: MAX_MISSING })),
  );
  return { rows: answers.flatMap((answer) => answer.items), more: answers.some((answer) => answer.next !== null) };
}

function makeMissingList({ rows, more }) {
  if (!rows.length) return h("p.soft", {}, "No update failed or was late.");
  const verb = rows.length === 1 ? "was" : "were";
  const makeLine = (row) =>
    h(
      "li",
      {},
      `round ${row.round}, `,
      h("code", {}, row.client),
      `: ${row.status}${row.reason ? `, ${row.reason}` : ""}, ${formatBytes(row.bytes)} received`,
    );
  return [
    h("h3", {}, `${more ? "The first " : ""}${formatCount(rows.length, "update")} that failed or ${verb} late`),
    h("ul.plain", {}, rows.map(makeLine)),
  ];
}
