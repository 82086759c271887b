/* Elements from data. Text from the service becomes text nodes and attribute values, never markup. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * Return an HTML element, such as h("a.name", { href, onclick }, "text", [child]).
 * tag: name of the element, followed by classes. properties: attributes, and listeners as on...; null, undefined and false are
 * left out, also among the children, which are elements, texts and nested arrays of them.
 */
export function h(tag, properties, ...children) {
  const [name, ...classes] = tag.split(".");
  return fill(document.createElement(name), classes, properties, children);
}

/** Return an SVG element; the arguments are those of `h`. */
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

/** Replace the children of `parent`. If the focus was among them, the new element with the same data-key gets it. */
export function put(parent, ...children) {
  const focused = parent.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  parent.replaceChildren(...flatten(children));
  if (focused) parent.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

/** Make `children` the children of `parent`. If they are already, nothing is moved: a moved element would miss a click. */
export function arrange(parent, children) {
  const same = parent.children.length === children.length && children.every((child, i) => parent.children[i] === child);
  if (!same) put(parent, children);
}

/** Return a function of data that calls `draw(element, data)` if the data differ from those of its last call. */
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

/** Return a new id for an element that another one refers to. */
export function makeId(prefix) {
  return `${prefix}-${++numIds}`;
}

/** Have screen readers read out `words`. */
export function announce(words) {
  document.getElementById("news").textContent = words;
}

/**
 * Return a function that calls `work` at once, but at most every `wait` ms.
 * Calls in between cause one further call of `work` at the end of this time, which `stop()` prevents.
 */
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
