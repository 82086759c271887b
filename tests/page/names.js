// Returns controls and images without an accessible name, duplicate ids, and references to missing ids.
() => {
  const bad = [];
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  for (const id of new Set(ids)) if (ids.filter((other) => other === id).length > 1) bad.push(`twice: ${id}`);
  for (const element of document.querySelectorAll("button, a, input, select, summary, canvas, img, svg, [role]")) {
    if (
      !element.checkVisibility() ||
      element.closest("[aria-hidden=true]") ||
      ["presentation", "row", "status", "alert"].includes(element.getAttribute("role"))
    )
      continue;
    const labels = element.labels ? [...element.labels].map((label) => label.textContent) : [];
    const name = [element.getAttribute("aria-label"), element.getAttribute("alt"), element.textContent, ...labels]
      .filter(Boolean)
      .join("")
      .trim();
    const decorative = element.tagName === "IMG" && element.getAttribute("alt") === "";
    if (!name && !decorative) bad.push(element.outerHTML.slice(0, 120));
  }
  for (const attribute of ["aria-labelledby", "aria-describedby", "aria-activedescendant", "for"]) {
    for (const element of document.querySelectorAll(`[${attribute}]`)) {
      for (const id of element.getAttribute(attribute).split(" "))
        if (!document.getElementById(id)) bad.push(`${attribute} leads nowhere: ${id}`);
    }
  }
  return bad;
};
