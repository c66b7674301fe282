"use strict";
// The timeline of a traced step: wheel, drag and keys choose which part of it is drawn.
(() => {
  const svg = document.getElementById("timeline"), step = JSON.parse(document.getElementById("step").textContent);
  const WIDE = 1200, LEAST_NS = 2000, total = step.spans.reduce((sum, [, ns]) => sum + ns, 0);
  const starts = new Float64Array(step.spans.length);
  step.spans.forEach(([, ns], at) => { if (at + 1 < starts.length) starts[at + 1] = starts[at] + ns; });
  let from = 0, to = total, due = false;

  const make = (name, attributes, text, parent) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return parent ? (parent.append(made), made) : made;
  };
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const ms = (ns, digits) => (ns / 1e6).toFixed(digits);

  /** The place of the span that runs at an instant. */
  const spanAt = (ns) => {
    let low = 0, high = starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (starts[middle] <= ns) low = middle; else high = middle - 1;
    }
    return low;
  };

  /** Spans in sight; those shorter than a window are summed by part, as page/diagnose.py does. */
  const inWindows = () => {
    const window_ns = (to - from) / WIDE, found = [];
    let small = new Map(), begin = 0;
    const sumUp = () => {
      for (const [part, [ns, cause]] of [...small].sort(([, a], [, b]) => b[0] - a[0])) {
        found.push([part, begin, ns, cause]);
        begin += ns;
      }
      small = new Map();
    };
    for (let at = spanAt(from); at < starts.length && starts[at] < to; at++) {
      const [part, ns, cause] = step.spans[at];
      if (ns < window_ns) {
        if (!small.size) begin = starts[at];
        const [sum, first] = small.get(part) ?? [0, cause];
        small.set(part, [sum + ns, first]);
        if (starts[at] + ns - begin >= window_ns) sumUp();
      } else {
        sumUp();
        found.push([part, starts[at], ns, cause]);
      }
    }
    sumUp();
    return found;
  };

  const draw = () => {
    due = false;
    const scale = WIDE / (to - from), digits = clamp(1 + Math.ceil(-Math.log10((to - from) / 5e6)), 0, 5);
    const spans = document.createDocumentFragment(), ticks = document.createDocumentFragment();
    for (const [part, start, ns, cause] of inWindows()) {
      const { name, color, waits } = step.parts[part];
      const left = Math.max(0, (start - from) * scale), right = Math.min(WIDE, (start + ns - from) * scale);
      const rect = make("rect", { x: left.toFixed(2), y: waits ? 44 : 4, width: Math.max(right - left, waits ? 0.8 : 0).toFixed(2), height: 34, fill: color }, undefined, spans);
      make("title", {}, `${cause ? `${name} ${cause}` : name}: ${ms(ns, 3)} ms at ${ms(start, Math.max(2, digits))} ms`, rect);
    }
    for (let tick = 0; tick <= 5; tick++) {
      const anchor = tick === 0 ? "start" : tick === 5 ? "end" : "middle";
      make("text", { x: WIDE * tick / 5, y: 98, "text-anchor": anchor }, `${ms(from + (to - from) * tick / 5, digits)} ms`, ticks);
    }
    document.getElementById("spans").replaceChildren(spans);
    document.getElementById("ticks").replaceChildren(ticks);
    document.getElementById("range").textContent = to - from < total ? `${ms(from, digits)} to ${ms(to, digits)} ms of ${ms(total, 1)} ms` : `all ${ms(total, 1)} ms`;
    document.documentElement.dataset.drawn = "yes";
  };
  const redraw = () => {
    if (due) return;
    due = true;
    delete document.documentElement.dataset.drawn;
    requestAnimationFrame(draw);
  };
  const show = (start, width) => {
    const shown = clamp(width, Math.min(LEAST_NS, total), total);
    from = clamp(start, 0, total - shown);
    to = from + shown;
    redraw();
  };
  const zoom = (factor, at) => {
    const width = clamp((to - from) * factor, Math.min(LEAST_NS, total), total);
    show(at - (at - from) * width / (to - from), width);
  };
  const instant = (event) => {
    const box = svg.getBoundingClientRect();
    return from + (event.clientX - box.left) / box.width * (to - from);
  };

  svg.addEventListener("wheel", (event) => {
    if (event.deltaY > 0 && to - from >= total) return; // the page scrolls on
    event.preventDefault();
    zoom(Math.exp(clamp(event.deltaY, -200, 200) / 400), instant(event));
  }, { passive: false });
  let held;
  svg.addEventListener("pointerdown", (event) => {
    held = instant(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (held !== undefined && svg.hasPointerCapture(event.pointerId)) show(from + held - instant(event), to - from);
  });
  svg.addEventListener("pointerup", () => { held = undefined; });
  svg.addEventListener("dblclick", () => show(0, total));
  const keys = {
    "+": () => zoom(0.5, (from + to) / 2), "=": () => zoom(0.5, (from + to) / 2), "-": () => zoom(2, (from + to) / 2),
    ArrowLeft: () => show(from - (to - from) / 4, to - from), ArrowRight: () => show(from + (to - from) / 4, to - from),
    Home: () => show(0, to - from), End: () => show(total, to - from), 0: () => show(0, total), Escape: () => show(0, total),
  };
  svg.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  draw();
})();
