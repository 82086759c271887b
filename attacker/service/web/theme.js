/* Light or dark theme: that of the system, or the user's choice if it differs, which is kept in the browser's storage. */

const STORAGE_KEY = "fedleak-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

export function getTheme() {
  return document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
}

/** Call `listener` after every change of the theme, until the returned function is called. */
export function listenToTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Make `button` switch between the themes, with the name of the other theme as its text. */
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
    // the browser denies access to its storage: the choice lasts until the page is closed
  }
}
