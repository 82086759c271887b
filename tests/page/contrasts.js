// Returns the texts whose contrast is lower than WCAG 2.2 (AA) requires.
() => {
  const channels = (text) => text.match(/[\d.]+/g).map(Number);
  const light = ([r, g, b]) =>
    [r, g, b]
      .map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4))
      .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let up = element; up; up = up.parentElement) {
      const found = channels(getComputedStyle(up).backgroundColor);
      if (found.length < 4 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const bad = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (
      !texts.currentNode.data.trim() ||
      element.closest(".unseen, .skip, noscript, option, [hidden]") ||
      !element.checkVisibility()
    )
      continue;
    const style = getComputedStyle(element);
    if (parseFloat(style.fontSize) === 0) continue;
    const ink = element.closest("svg") ? style.fill : style.color;
    const [a, b] = [light(channels(ink)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const large = parseFloat(style.fontSize) >= 24;
    if (ratio < (large ? 3 : 4.5)) bad.push(`${texts.currentNode.data.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return bad;
};
