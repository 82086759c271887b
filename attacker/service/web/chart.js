/* Line charts with axes and a legend. Pointer and arrow keys show the values at a place. */

import { h, svg } from "./dom.js";
import { makeTooltip } from "./tooltip.js";
import { chooseDecades, chooseTicks, computeExtent, makeAxis } from "./ticks.js";
import { formatNumber } from "./words.js";

const MARGIN = { left: 52, right: 14, top: 12, bottom: 38 };
const DEFAULT_HEIGHT = 190;

/**
 * Return a chart.
 * title, note: caption. height: in pixels. x: {label, whole}; whole: whether ticks are whole numbers only.
 * y: {label, domain, format, log}; domain: [low, high], by default that of the points; format: function from values to text;
 * log: whether the axis is logarithmic, which leaves out points that are not positive.
 * series: [{name, points: [[x, y]], null: whether it is of a null, ink: line style from 1 to `NUM_LINE_STYLES`}].
 */
export function makeChart({ title, note = "", x, y, series, height = DEFAULT_HEIGHT }) {
  const tip = makeTooltip();
  const frame = h("div.chart-frame", {}, tip.element);
  const element = h(
    "figure.chart",
    {},
    h("figcaption", {}, h("b", {}, title), note ? h("span.soft", {}, ` ${note}`) : null),
    frame,
  );
  const drawn = series.map((one) => ({
    ...one,
    points: one.points.filter(([, value]) => Number.isFinite(value) && !(y.log && value <= 0)),
  }));
  if (series.length > 1) {
    element.classList.add("several"); // gives each line style its dash pattern
    element.append(makeLegend(drawn));
  }
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => {
    if (Math.abs(contentRect.width - width) < 1) return;
    width = contentRect.width;
    frame.querySelector("svg")?.remove();
    frame.prepend(makePicture(Math.max(220, width), { x, y, series: drawn, height, tip, frame, title }));
  }).observe(frame);
  return element;
}

function makeLegend(series) {
  return h(
    "ul.legend",
    {},
    series.map((one) =>
      h("li", {}, svg("svg.key", { viewBox: "0 0 26 10", "aria-hidden": "true" }, makeLine(one, "M1 5H25")), one.name),
    ),
  );
}

function makeLine(one, d) {
  return svg(`path.curve.ink-${one.null ? "null" : one.ink}`, { d });
}

function makePicture(width, { x, y, series, height, tip, frame, title }) {
  const xs = [...new Set(series.flatMap((one) => one.points.map(([at]) => at)))].sort((a, b) => a - b);
  const ys = series.flatMap((one) => one.points.map(([, value]) => value));
  const [xd, yd] = [computeExtent(xs), y.domain ?? computeExtent(ys, y.log)];
  const [sx, sy] = [makeAxis(xd, [MARGIN.left, width - MARGIN.right]), makeAxis(yd, [height - MARGIN.bottom, MARGIN.top], y.log)];
  const format = y.format ?? formatNumber;
  const cross = svg("line.cross", { y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
  const root = svg(
    "svg",
    {
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      tabindex: 0,
      role: "img",
      "aria-label": `${title}. ${summarise(series, format, x)}`,
    },
    makeAxes({ xd, yd, sx, sy, x, y, width, height, format }),
    series.map((one) => makeCurve(one, sx, sy)),
    cross,
  );
  showValuesOnInput(root, { xs, series, sx, cross, tip, frame, format, x });
  return root;
}

function makeAxes({ xd, yd, sx, sy, x, y, width, height, format }) {
  const below = height - MARGIN.bottom;
  const across = (y.log ? chooseDecades(...yd) : chooseTicks(...yd, 4)).map((value) => [
    svg("line.rule", { x1: MARGIN.left, x2: width - MARGIN.right, y1: sy(value), y2: sy(value) }),
    svg("text.tick", { x: MARGIN.left - 8, y: sy(value) + 4, "text-anchor": "end" }, format(value)),
  ]);
  const along = chooseTicks(...xd, Math.max(2, Math.min(8, Math.floor(width / 90))), x.whole).map((value) =>
    svg("text.tick", { x: sx(value), y: below + 17, "text-anchor": "middle" }, formatNumber(value)),
  );
  const middle = (MARGIN.left + width - MARGIN.right) / 2;
  return [
    across,
    along,
    svg("text.axis", { x: middle, y: height - 4, "text-anchor": "middle" }, x.label),
    svg("text.axis", { transform: `translate(11 ${(MARGIN.top + below) / 2}) rotate(-90)`, "text-anchor": "middle" }, y.label),
  ];
}

function makeCurve(one, sx, sy) {
  const d = one.points.map(([x, y], i) => `${i ? "L" : "M"}${sx(x).toFixed(1)} ${sy(y).toFixed(1)}`).join("");
  const dots = one.points.length <= 30 ? one.points.map(([x, y]) => svg("circle", { cx: sx(x), cy: sy(y), r: 2.75 })) : [];
  return svg(`g.series.dot-${one.null ? "null" : one.ink}`, {}, makeLine(one, d || "M0 0"), dots);
}

function summarise(series, format, x) {
  const said = series
    .filter((one) => one.points.length)
    .map(({ name, points }) => {
      const [first, last] = [points[0], points.at(-1)];
      const start = `${format(first[1])} at ${x.label} ${formatNumber(first[0])}`;
      return `${name}: ${start}, ${format(last[1])} at ${formatNumber(last[0])}`;
    });
  return said.length ? `${said.join("; ")}. Use the arrow keys to read the values.` : "No data.";
}

function showValuesOnInput(root, { xs, series, sx, cross, tip, frame, format, x }) {
  let at = null;
  const show = (index) => {
    if (!xs.length) return;
    at = Math.max(0, Math.min(xs.length - 1, index));
    const place = sx(xs[at]);
    cross.setAttribute("x1", place);
    cross.setAttribute("x2", place);
    cross.setAttribute("visibility", "visible");
    const lines = series.flatMap((one) => {
      const point = one.points.find(([value]) => value === xs[at]);
      return point ? [`${one.name}: ${format(point[1])}`] : [];
    });
    tip.show([`${x.label} ${formatNumber(xs[at])}`, ...lines], place, MARGIN.top + 6, frame);
    root.setAttribute("aria-label", [`${x.label} ${formatNumber(xs[at])}`, ...lines].join(", "));
  };
  const hide = () => {
    cross.setAttribute("visibility", "hidden");
    tip.hide();
  };
  root.addEventListener("pointermove", (event) => {
    const place = event.clientX - root.getBoundingClientRect().left;
    show(xs.reduce((best, value, i) => (Math.abs(sx(value) - place) < Math.abs(sx(xs[best]) - place) ? i : best), 0));
  });
  root.addEventListener("pointerleave", hide);
  root.addEventListener("blur", hide);
  root.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    show(at === null && Number.isFinite(move) ? 0 : Number.isFinite(move) ? at + move : move < 0 ? 0 : xs.length - 1);
  });
}
