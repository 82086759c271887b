// Before the first paint, so that a chosen theme does not flash in after the system's.
try {
  const chosen = localStorage.getItem("fedleak-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // storage is closed to this page: the system's theme it is
}
