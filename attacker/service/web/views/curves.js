/* Charts over the rounds of a run: leakage by attack and null, and loss and accuracy of the global model. */

import { makeChart } from "../chart.js";
import { h } from "../dom.js";
import { NUM_LINE_STYLES } from "../scale.js";
import { formatDecibels, formatPercent, formatSpecName, isKnown, removeNullSuffix } from "../words.js";

const MEASURES = [
  { key: "success", label: "recovered", domain: [0, 1], format: formatPercent },
  { key: "psnr", label: "PSNR, dB", format: formatDecibels },
  { key: "confidence", label: "confidence", domain: [0, 1], format: formatPercent },
];

let chosenMeasure = "success";

/** Return the leakage chart with its buttons. items: from /leakage. attack: the only one to show, with its null; null for all. */
export function makeLeakageChart(items, attack) {
  const wanted = items.filter((one) => !attack || removeNullSuffix(one.spec) === removeNullSuffix(attack.spec));
  const there = MEASURES.filter(({ key }) => wanted.some((one) => isKnown(one[key])));
  const title = "Leakage over rounds";
  if (!there.length) return [h("h2", {}, title), h("p.state", {}, "No attack has a score or a confidence yet.")];
  const body = h("div");
  const draw = () => {
    const measure = there.find(({ key }) => key === chosenMeasure) ?? there[0];
    body.replaceChildren(
      makeChart({
        title,
        note: wanted.some((one) => one.null) ? "of attacks and of their nulls" : "",
        height: 300,
        x: { label: "round", whole: true },
        y: measure,
        series: listSeries(wanted, measure.key),
      }),
    );
    for (const button of buttons.children) button.setAttribute("aria-pressed", button.dataset.key === `measure-${measure.key}`);
  };
  const buttons = h(
    "div.switch",
    { role: "group", "aria-label": "Measure" },
    there.map(({ key, label }) =>
      h("button.small", { type: "button", "data-key": `measure-${key}`, onclick: () => ((chosenMeasure = key), draw()) }, label),
    ),
  );
  draw();
  return [buttons, body];
}

function listSeries(items, key) {
  const groups = new Map();
  for (const one of items) {
    const spec = removeNullSuffix(one.spec);
    const name = `${spec}${one.null ? " null" : ""}`;
    if (!groups.has(name)) groups.set(name, { spec, null: one.null, points: [] });
    if (isKnown(one[key])) groups.get(name).points.push([one.round, one[key]]);
  }
  const specs = [...new Set(items.map((one) => removeNullSuffix(one.spec)))];
  const alike = (spec) => specs.filter((other) => formatSpecName(other) === formatSpecName(spec)).length > 1;
  return [...groups.values()]
    .filter((one) => one.points.length)
    .sort((a, b) => a.null - b.null)
    .map((one) => ({
      name: `${alike(one.spec) ? one.spec : formatSpecName(one.spec)}${one.null ? ", the null" : ""}`,
      points: one.points.sort(([a], [b]) => a - b),
      null: one.null,
      ink: (specs.indexOf(one.spec) % NUM_LINE_STYLES) + 1,
    }));
}

/** Return the charts of the training. rows: from /training. */
export function makeTrainingCharts(rows) {
  const listPoints = (key) => rows.filter((row) => isKnown(row[key])).map((row) => [row.round, row[key]]);
  const x = { label: "round", whole: true };
  const [loss, accuracy] = [listPoints("loss"), listPoints("accuracy")];
  if (!loss.length && !accuracy.length)
    return [h("h2", {}, "Training"), h("p.state", {}, "No loss or accuracy of the global model is recorded.")];
  return [
    loss.length
      ? makeChart({
          title: "Loss of the global model",
          note: "on held-out data",
          x,
          y: { label: "loss" },
          series: [{ name: "loss", points: loss, ink: 2 }],
        })
      : null,
    accuracy.length
      ? makeChart({
          title: "Accuracy of the global model",
          note: "on held-out data",
          x,
          y: { label: "accuracy", domain: [0, 1], format: formatPercent },
          series: [{ name: "accuracy", points: accuracy, ink: 2 }],
        })
      : null,
  ].filter(Boolean);
}
