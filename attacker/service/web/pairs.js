/* Figures of an example: original, reconstruction and that of the null, as images or table rows, with labels and scores. */

import { resolveOwnUrl } from "./api.js";
import { h } from "./dom.js";
import { formatDecibels, formatNumber, isKnown } from "./words.js";

/** Return the figure of one example of a case. whose: element of the caption that says where the example is from, or null. */
export function makePair(example, { whose = null } = {}) {
  const beside = example.null ?? null;
  return h(
    beside ? "figure.pair.with-null" : "figure.pair",
    {},
    example.values ? makeTable(example, beside) : makeImages(example, beside),
    h("figcaption", {}, makeLabelLine(example), makeScoreLine(example), beside ? makeNullLine(example, beside) : null, whose),
  );
}

function makeImages(example, beside) {
  const shown = [
    [
      "private original",
      resolveOwnUrl(example.original),
      `Private original${example.label_true === null || example.label_true === undefined ? "" : `: ${example.label_true}`}`,
    ],
    ["reconstruction", resolveOwnUrl(example.image), `Reconstruction: ${example.label ?? "no label"}`],
    ["the null", resolveOwnUrl(beside?.image), "The null: the same attack without the update"],
  ];
  const there = shown.filter(([, source], i) => source || i === 1);
  return h(
    "div.both",
    {},
    there.map(([words, source, alt]) =>
      h(
        "div",
        {},
        h("small", { "aria-hidden": "true" }, words),
        source
          ? h("img", { src: source, alt, loading: "lazy", decoding: "async" })
          : h("span.blank", {}, example.failure ?? "no reconstruction"),
      ),
    ),
  );
}

function makeTable(example, beside) {
  const truth = example.values.some((value) => value.original !== null);
  const nothing = beside?.values ?? null;
  const titles = ["column", ...(truth ? ["private original"] : []), "reconstruction", ...(nothing ? ["the null"] : [])];
  return h(
    "table.cells",
    {},
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        titles.map((title) => h("th", { scope: "col" }, title)),
      ),
    ),
    h(
      "tbody",
      {},
      example.values.map(({ column, original, reconstruction, right }) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, column),
          truth ? h("td", {}, original ?? "–") : null,
          h("td", {}, reconstruction, right === null ? null : right ? " ✓" : " ✗"),
          nothing ? h("td.soft", {}, nothing[column] ?? "–") : null,
        ),
      ),
    ),
  );
}

function makeLabelLine(example) {
  const got = example.label ?? null;
  const truth = example.label_true ?? null;
  if (got === null && truth === null) return null;
  if (truth === null) return h("span.line", {}, `label ${got}`);
  if (got === null) return h("span.line", {}, `${truth} → no label`);
  const right = String(truth) === String(got);
  return h("span.line", {}, `${truth} → `, h(right ? "span" : "span.soft", {}, `${got} ${right ? "✓" : "✗"}`));
}

/** Return a line on the null's reconstruction, such as "null: label dog ✗, 8.3 dB". */
function makeNullLine(example, { label: got, psnr, success }) {
  const right = isKnown(example.label_true) || example.label_true ? String(example.label_true) === String(got) : null;
  const name = got === null || got === undefined ? "no label" : `label ${got}${right === null ? "" : right ? " ✓" : " ✗"}`;
  const near = isKnown(psnr) ? formatDecibels(psnr) : success === true ? "recovered" : success === false ? "not recovered" : null;
  return h("span.line.soft", {}, `null: ${[name, near].filter(Boolean).join(", ")}`);
}

/** Return a text in place of the confidence if that is unknown; null if there is a PSNR, or no reconstruction. */
function describeMissingConfidence(example) {
  return (example.image || example.values) && !isKnown(example.psnr) ? "confidence undecided" : null;
}

function makeScoreLine(example) {
  const numbers = [
    isKnown(example.psnr) ? formatDecibels(example.psnr) : null,
    isKnown(example.confidence) ? `confidence ${formatNumber(example.confidence)}` : describeMissingConfidence(example),
  ];
  const tail = numbers.filter(Boolean).join(", ");
  if (example.failure) return h("span.line", {}, `– ${example.failure}`);
  if (example.success === null || example.success === undefined) return tail ? h("span.line.soft", {}, tail) : null;
  return h(
    "span.line",
    {},
    example.success ? h("b.yes", {}, "✓ recovered ") : h("span.soft", {}, "✗ not recovered "),
    h("span.soft", {}, tail),
  );
}
