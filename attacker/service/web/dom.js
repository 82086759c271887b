/* Elements from data. Everything that comes from a server becomes a text node or a property, never markup. */

const SVG = "http://www.w3.org/2000/svg";

/** h("a.name", {href}, "text", [child, null]): an element; `on...` are listeners, null and false properties are left out. */
export function h(tag, properties, ...children) {
  const [name, ...classes] = tag.split(".");
  return fill(document.createElement(name), classes, properties, children);
}

/** The same for SVG. */
export function svg(tag, properties, ...children) {
  const [name, ...classes] = tag.split(".");
  return fill(document.createElementNS(SVG, name), classes, properties, children);
}

function fill(element, classes, properties, children) {
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...flatten(children));
  return element;
}

function flatten(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

/** Puts new children in place of the old, and the focus back on the element with the same data-key. */
export function put(parent, ...children) {
  const focused = parent.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  parent.replaceChildren(...flatten(children));
  if (focused) parent.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

/** Makes `children` the parent's, touching nothing that is in its place: what is moved while it is pressed gets no click. */
export function arrange(parent, children) {
  const same = parent.children.length === children.length && children.every((child, i) => parent.children[i] === child);
  if (!same) put(parent, children);
}

/** A drawing of a piece of data that is made anew only where the data changed: `draw(element, data)`. */
export function drawOnChange(element, draw) {
  let text = null;
  return (data) => {
    const next = JSON.stringify(data);
    if (next === text) return;
    text = next;
    draw(element, data);
  };
}

let numIds = 0;

/** A name for an element that another one points to. */
export function makeId(prefix) {
  return `${prefix}-${++numIds}`;
}

/** Reads `words` out to those who do not see the page change. */
export function announce(words) {
  document.getElementById("news").textContent = words;
}

/** Calls `work` at once and then at most every `wait` ms, always once more after the last call. */
export function throttle(work, wait) {
  let timer = null;
  let again = false;
  const run = () => {
    timer = null;
    if (!again) return;
    again = false;
    call();
  };
  const call = () => {
    if (timer !== null) {
      again = true;
      return;
    }
    timer = setTimeout(run, wait);
    work();
  };
  call.stop = () => {
    clearTimeout(timer);
    timer = null;
    again = false;
  };
  return call;
}
