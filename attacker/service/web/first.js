// Applies the theme that the user chose. It is a classic script, so that it runs before the first paint and nothing flashes.
try {
  const chosen = localStorage.getItem("fedleak-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // the browser denies access to its storage: the page follows the theme of the system
}
