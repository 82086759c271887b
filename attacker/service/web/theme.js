/* Follows the system until somebody chooses; a choice is remembered in this browser. */

const STORAGE_KEY = "fedleak-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

export function getTheme() {
  return document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
}

/** Calls `listener` whenever colours change; returns what ends that. */
export function listenToTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function wireButton(button) {
  const update = () => {
    button.textContent = getTheme() === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${button.textContent.toLowerCase()} theme`);
    for (const listener of listeners) listener();
  };
  button.addEventListener("click", () => {
    const next = getTheme() === "dark" ? "light" : "dark";
    const system = dark.matches ? "dark" : "light";
    if (next === system) delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    remember(next === system ? null : next);
    update();
  });
  dark.addEventListener("change", update);
  update();
}

function remember(choice) {
  try {
    if (choice) localStorage.setItem(STORAGE_KEY, choice);
    else localStorage.removeItem(STORAGE_KEY);
  } catch {
    // storage is closed to this page: the choice lasts until it is closed
  }
}
