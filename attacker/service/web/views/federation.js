/* What was recorded: the settings the server knows, and the updates it did not get. */

import { get } from "../api.js";
import { h, put } from "../dom.js";
import { panel } from "../panel.js";
import { amount, counted } from "../words.js";
import { modelName } from "./runs.js";

const MISSING = 100;

/** Read when it is opened. */
export function federation(app, id) {
  const body = h("div");
  const details = h("details.panel", {}, h("summary", {}, "The federation, as the server knows it"), body);
  details.addEventListener("toggle", () => {
    if (!details.open) return;
    put(
      body,
      panel({
        className: "bare",
        load: () => get(`recordings/${id}`),
        draw: (place, run) => put(place, h("dl.facts", {}, facts(run))),
      }),
      panel({ className: "bare", load: () => missing(id), draw: (place, rows) => put(place, absent(rows)) }),
    );
  });
  return details;
}

function facts(run) {
  const fact = (label, ...value) => h("div", {}, h("dt", {}, label), h("dd", {}, ...value));
  const t = run.training ?? {};
  const often = t.steps ? counted(t.steps, "step") : t.epochs ? counted(t.epochs, "epoch") : "";
  const on = run.secure_aggregation
    ? typeof run.secure_aggregation === "object"
      ? settings(run.secure_aggregation)
      : "on"
    : "off";
  return [
    fact("Model", h("code", {}, modelName(run))),
    fact("Data", run.data ? `${run.data.shape.join(" × ")}, ${run.data.num_classes} classes` : "not known"),
    fact(
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
    fact("Updates", String(run.observations)),
    fact("defense", h("code", {}, run.defense || "none")),
    fact("gradient", run.gradient || "plain"),
    fact("network", run.network || "unchanged"),
    fact("inputs", run.inputs || "unchanged"),
    fact("secure_aggregation", on),
    fact("Truth", run.truth ? "given to this service" : "not given: nothing is scored here"),
  ];
}

function settings(found) {
  return Object.entries(found)
    .map(([key, value]) => `${key} ${value}`)
    .join(", ");
}

async function missing(id) {
  const answers = await Promise.all(
    ["failed", "late"].map((status) => get(`recordings/${id}/observations`, { status, limit: MISSING })),
  );
  return answers.flatMap((answer) => answer.items);
}

function absent(rows) {
  if (!rows.length) return h("p.soft", {}, "Every reply held an update.");
  const line = (row) =>
    h(
      "li",
      {},
      `round ${row.round}, `,
      h("code", {}, row.client),
      `: ${row.status}${row.reason ? `, ${row.reason}` : ""}, ${amount(row.bytes)}`,
    );
  return [h("h3", {}, `${counted(rows.length, "reply", "replies")} without an update`), h("ul.plain", {}, rows.map(line))];
}
