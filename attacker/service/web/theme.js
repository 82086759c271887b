/* Follows the system until somebody chooses; a choice is remembered in this browser. */

const KEY = "fedleak-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

export function current() {
  return document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
}

/** Calls `listener` whenever colours change; returns what ends that. */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function wire(button) {
  const tell = () => {
    button.textContent = current() === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${button.textContent.toLowerCase()} theme`);
    for (const listener of listeners) listener();
  };
  button.addEventListener("click", () => {
    const next = current() === "dark" ? "light" : "dark";
    const system = dark.matches ? "dark" : "light";
    if (next === system) delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    remember(next === system ? null : next);
    tell();
  });
  dark.addEventListener("change", tell);
  tell();
}

function remember(choice) {
  try {
    if (choice) localStorage.setItem(KEY, choice);
    else localStorage.removeItem(KEY);
  } catch {
    // storage is closed to this page: the choice lasts until it is closed
  }
}
