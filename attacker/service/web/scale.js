/* Colour scale of leakage, interpolated in OKLCH. Its lightness is monotonic, so that the order is visible with any colour
   blindness. */

/** Lightness, chroma and hue in degrees at the shares 0, 0.5 and 1. */
const COLOUR_STOPS = {
  light: [
    [0.94, 0.025, 75],
    [0.66, 0.15, 50],
    [0.34, 0.11, 30],
  ],
  dark: [
    [0.31, 0.025, 60],
    [0.62, 0.14, 45],
    [0.93, 0.09, 88],
  ],
};
const NUM_COLOURS = 64;
const colours = { light: makeTable(COLOUR_STOPS.light), dark: makeTable(COLOUR_STOPS.dark) };

/** Return the colour of a share from 0 to 1, as "rgb(r, g, b)". theme: "light" or "dark". */
export function getColour(share, theme) {
  const at = Math.round(Math.min(1, Math.max(0, share)) * (NUM_COLOURS - 1));
  return colours[theme][at];
}

/** Number of line styles of charts, each a colour and a dash pattern in figures.css. */
export const NUM_LINE_STYLES = 6;

function makeTable(stops) {
  return Array.from({ length: NUM_COLOURS }, (_, i) => {
    const place = (i / (NUM_COLOURS - 1)) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    const part = place - low;
    const [l, c, hue] = stops[low].map((value, k) => value + part * (stops[low + 1][k] - value));
    return convertToRgb(l, c * Math.cos((hue * Math.PI) / 180), c * Math.sin((hue * Math.PI) / 180));
  });
}

/** Convert OKLab to sRGB (Ottosson 2020), with each channel clipped to [0, 255]. */
function convertToRgb(l, a, b) {
  const long = (l + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const medium = (l - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const short = (l - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
    -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
    -0.0041960863 * long - 0.7034186147 * medium + 1.707614701 * short,
  ];
  const bytes = linear.map((v) => {
    const clipped = Math.min(1, Math.max(0, v));
    return Math.round(255 * (clipped <= 0.0031308 ? 12.92 * clipped : 1.055 * clipped ** (1 / 2.4) - 0.055));
  });
  return `rgb(${bytes.join(", ")})`;
}
