// Reads a drawn chart back: pixels of marks, and the axes from the places of their tick labels.
window.drawnMarks = (card) => {
  const plot = card.querySelector(".plot");
  const screen = (element, x, y) => {
    const point = new DOMPoint(x, y).matrixTransform(element.getScreenCTM());
    return [point.x, point.y];
  };
  const shift = (element) => {
    const found = /translate\(([-\d.e]+)[ ,]*([-\d.e]*)\)/.exec(element.getAttribute("transform") || "");
    return found ? [Number(found[1]), Number(found[2] || 0)] : [0, 0];
  };
  const all = (selector) => [...plot.querySelectorAll(selector)];
  const tick = (group, which) => all(group).map((text) => {
    const [x, y] = shift(text);
    return [screen(text.parentNode, x, y)[which], text.textContent];
  });
  const ofPath = (path) => [...path.getAttribute("d").matchAll(/M\s*([-\d.e]+)[, ]([-\d.e]+)\s*L\s*([-\d.e]+)[, ]([-\d.e]+)/g)].map((found) => {
    const [x0, y0, x1, y1] = found.slice(1).map(Number);
    return [...screen(path, x0, y0), ...screen(path, x1, y1)];
  });
  const box = (element) => {
    const place = element.getBoundingClientRect();
    return [place.left, place.top, place.right, place.bottom];
  };
  return {
    xticks: tick(".xtick text", 0),
    yticks: tick(".ytick text", 1),
    points: all(".scatterlayer .points path").map((path) => screen(path.parentNode, ...shift(path))),
    segments: all(".shapelayer path").map(ofPath),
    bars: all(".barlayer .point path").map(box),
    labels: all(".heatmap-label text, .heatmaplayer text").map((text) => [...box(text), text.textContent]),
    boxes: all(".boxlayer path.box").length,
    lines: all(".scatterlayer .js-line").length,
    errors: all(".errorbars .xerror, .errorbar path.xerror").map(box),
    texts: all("text").map((text) => text.textContent),
    hidden: plot.hidden,
  };
};
