"use strict";
// One chart: a card with a drawing and its data as a table. Charts are drawn one a task, and only
// when they are about to be seen, so that the page answers while they are.
F.charts = [];

F.Chart = class {
  /** draw() returns {traces, layout, note, label, headings, rows} or {empty: why}. */
  constructor(card, title, draw, options = {}) {
    Object.assign(this, { card, draw, options, dirty: true, visible: false });
    this.controls = F.h("div", { class: "controls" });
    this.note = F.h("p", { class: "note" });
    this.plot = F.h("div", { class: `plot ${options.size || ""}`, role: "img", "aria-label": title });
    this.empty = F.h("p", { class: "empty", hidden: true });
    this.table = F.h("div", {});
    this.details = F.h("details", { ontoggle: () => this.fillTable() }, F.h("summary", {}, "Data table"), this.table);
    card.append(F.h("h2", {}, title), this.controls, this.note, this.plot, this.empty, this.details);
    this.title = title;
    F.charts.push(this);
    new IntersectionObserver((entries) => {
      this.visible = entries.some((entry) => entry.isIntersecting);
      F.drawSoon();
    }, { rootMargin: "400px" }).observe(card);
  }

  fillTable() {
    if (!this.details.open || !this.drawn || this.drawn.empty) return;
    const { headings, rows } = this.drawn;
    if (!this.grid) this.grid = new F.Grid(this.table, { caption: `${this.title}: data`, perPage: 25 });
    this.grid.show(headings.map((heading) => ({ heading })), rows.map((cells) => ({ cells: cells.map((cell) => F.number(cell, 6)), values: cells })));
  }

  render() {
    this.dirty = false;
    const drawn = (this.drawn = this.draw());
    this.empty.hidden = !drawn.empty;
    this.plot.hidden = this.details.hidden = Boolean(drawn.empty);
    this.note.textContent = drawn.note || "";
    this.note.hidden = !drawn.note;
    if (drawn.empty) {
      this.empty.textContent = drawn.empty;
      this.card.dataset.drawn = "yes";
      return;
    }
    this.plot.setAttribute("aria-label", drawn.label || this.title);
    const layout = F.merge(F.baseLayout(), drawn.layout);
    Plotly.react(this.plot, drawn.traces, layout, { displayModeBar: false, responsive: true, doubleClick: "reset", typesetMath: false })
      .then(() => { if (!this.dirty) this.card.dataset.drawn = "yes"; });
    if (!this.listens && this.options.onclick) {
      this.listens = true;
      this.plot.on("plotly_click", (event) => this.options.onclick(event.points[0]));
    }
    this.fillTable();
  }
};

F.merge = (base, over) => {
  const made = { ...base };
  for (const [key, value] of Object.entries(over || {})) {
    const both = value && made[key] && typeof value === "object" && typeof made[key] === "object" && !Array.isArray(value);
    made[key] = both ? F.merge(made[key], value) : value;
  }
  return made;
};

F.baseLayout = () => {
  const css = F.theme.css;
  const axis = { gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--line"), automargin: true, title: { standoff: 8 }, fixedrange: matchMedia("(pointer: coarse)").matches };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("--text"), size: 12, family: "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif" },
    margin: { l: 50, r: 14, t: 12, b: 40 }, hovermode: "closest", showlegend: false, dragmode: "zoom",
    hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { color: css("--text") }, align: "left", namelength: -1 },
    legend: { orientation: "h", yref: "container", y: 1, yanchor: "top", x: 0, font: { size: 11 } },
    colorway: F.colors, xaxis: axis, yaxis: { ...axis }, separators: ".,",
  };
};

let drawing = false;
/** Draw what is due, a chart a task. */
F.drawSoon = () => {
  if (drawing) return;
  drawing = true;
  setTimeout(() => {
    drawing = false;
    const due = F.charts.find((chart) => chart.dirty && chart.visible && !chart.card.closest("[hidden]"));
    if (!due) {
      document.documentElement.dataset.drawn = "yes";
      return;
    }
    try {
      due.render();
    } finally {
      F.drawSoon(); // the others are drawn whatever becomes of this one
    }
  }, 0);
};

F.redraw = (charts = F.charts) => {
  document.documentElement.dataset.drawn = "";
  charts.forEach((chart) => { chart.dirty = true; chart.card.dataset.drawn = ""; });
  F.drawSoon();
};
F.theme.listeners.push(() => F.redraw());

// A mark of its own for each of thousands of points takes seconds; so many are dots of one path, and
// a trace that draws nothing answers the pointer.
F.MOST_MARKS = 400;

/** {traces, shapes} of points; `places` are theirs on the axes, as numbers. */
F.points = (trace, { many, color, places }) => {
  if (many <= F.MOST_MARKS) return { traces: [{ ...trace, mode: "markers", marker: { color, size: 9, opacity: 0.8 } }], shapes: [] };
  const dots = places.map(([x, y]) => `M${x},${y}L${x},${y}`).join("");
  const shape = { type: "path", path: dots, line: { color, width: 6 }, opacity: 0.6, layer: "above" };
  const key = { type: "scatter", mode: "markers", name: trace.name, x: [null], y: [null], marker: { color, size: 9 } }; // of the legend
  return { traces: [{ ...trace, mode: "none", hoveron: "points", showlegend: false }, key], shapes: [shape] };
};

/** Long names on an axis would leave no room for the chart. */
F.names = (values, most = 24) => ({ tickvals: values.map(F.label), ticktext: values.map((value) => F.label(F.short(value, most))) });

/** Hover text of one mark: lines of ours, values as they are written. */
F.hover = (...lines) => lines.filter((line) => line !== "").map(F.label).join("<br>");

/** 1, 2, 5, 10 ... between two ends of a logarithmic axis; only the tens where these are many. */
F.roundTicks = (low, high) => {
  const steps = high / low > 300 ? [1] : [1, 2, 5];
  const values = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) values.push(...steps.map((step) => Number((step * 10 ** power).toPrecision(1))));
  const inside = values.filter((value) => value >= low && value <= high);
  return { tickvals: inside, ticktext: inside.map((value) => String(value)) };
};
