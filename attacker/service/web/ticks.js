/* Linear and logarithmic axes of charts: their range, tick values, and the map from values to pixels. */

/** Return the multiples of a round step within [low, high], about `most` or fewer. whole: only whole numbers. */
export function chooseTicks(low, high, most = 5, whole = false) {
  if (!(high > low)) return [low];
  const raw = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1)
    found.push(Number((k * step).toPrecision(12)));
  return found;
}

/** Return every k-th power of ten within [low, high], at most `most`; ticks of a linear axis if that gives fewer than two. */
export function chooseDecades(low, high, most = 5) {
  const from = Math.ceil(Math.log10(low) - 1e-9);
  const to = Math.floor(Math.log10(high) + 1e-9);
  const every = Math.max(1, Math.ceil((to - from + 1) / most));
  const found = [];
  for (let k = from; k <= to; k += every) found.push(10 ** k);
  return found.length > 1 ? found : chooseTicks(low, high, 3);
}

/** Return a function from values in [low, high] to pixels in [from, to]. log: logarithmic axis; its values must be positive. */
export function makeAxis([low, high], [from, to], log = false) {
  const f = log ? Math.log10 : (v) => v;
  const [a, b] = [f(low), f(high)];
  return (value) => from + ((f(value) - a) / (b - a || 1)) * (to - from);
}

/** Return the smallest and the largest of `values`; a wider range around them if they are equal. log: for positive values. */
export function computeExtent(values, log = false) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  if (high > low) return [low, high];
  return log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
}
