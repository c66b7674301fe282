"use strict";
// The report: filters, the table of runs, and the charts they feed.
F.read = () => F.data.rows.map((values, i) => {
  const row = Object.fromEntries(F.data.fields.map((field, place) => [field, values[place]]));
  row.peak_gib = F.gib(row.peak_bytes);
  row.i = i;
  row.detail = F.data.details[i];
  if (row.detail) row.detail.warm = row.detail.steps.map((_, step) => row.detail.warmup_steps.includes(step));
  row.text = [...F.data.cells[i], row.run_id, row.label, row.hardware, row.layout, row.tag, row.note, row.outcome, row.precision].join("\n").toLowerCase();
  return row;
});
F.rows = F.read();
F.filtered = F.rows;
F.filters = {};
const FACETS = [["label", "Model"], ["hardware", "GPU type"], ["gpus", "GPUs"], ["seq_len", "Sequence length"], ["precision", "Precision"], ["sharding", "Sharding"], ["recompute", "Recompute"], ["outcome", "Outcome"], ["tag", "Tag"]];
const MOST_CHOICES = 60;

F.onPage = () => F.grid.shown.map((line) => F.rows[line.id]);

F.apply = () => {
  const words = (F.filters.text || "").toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = Object.entries(F.filters).filter(([field, value]) => field !== "text" && value !== "");
  F.filtered = F.rows.filter((row) => wanted.every(([field, value]) => String(row[field] ?? "") === value) && words.every((word) => row.text.includes(word)));
  F.showRows();
  F.redraw(F.allCharts);
  F.counted();
};

F.counted = () => {
  const all = F.filtered.length === F.rows.length;
  F.$("count").textContent = all ? `All ${F.plural(F.rows.length, "run")}.` : `${F.number(F.filtered.length)} of ${F.plural(F.rows.length, "run")}.`;
};

// A hash is cut, a name is not.
F.idOf = (row) => (row.run_id ? `${row.detail ? row.run_id.slice(0, 8) : row.run_id}${row.repeat ? `#${row.repeat}` : ""}` : `row ${row.i + 1}`);

F.showRows = () => {
  const lines = F.filtered.map((row) => ({ id: row.i, cells: [F.idOf(row), ...F.data.cells[row.i]], values: [F.idOf(row), ...F.data.values[row.i]] }));
  F.grid.show([{ heading: "Run" }, ...F.data.columns], lines);
};

F.filterBar = () => {
  const search = F.h("input", { type: "search", id: "search", autocomplete: "off", oninput: () => { F.filters.text = search.value; clearTimeout(F.typing); F.typing = setTimeout(F.apply, 120); } });
  search.value = F.filters.text || "";
  const bar = [F.h("label", { class: "field grow" }, F.h("span", {}, "Search"), search)];
  for (const [field, name] of FACETS) {
    const values = F.ordered(F.distinct(F.rows, field));
    if (values.length < 2 || values.length > MOST_CHOICES) continue;
    const choices = [["", "all"], ...values.map((value) => [String(value), F.short(typeof value === "number" ? F.number(value) : value, 40)])];
    const one = F.select(name, choices, F.filters[field] || "", (value) => { F.filters[field] = value; F.apply(); });
    one.list.dataset.field = field;
    bar.push(one);
  }
  bar.push(F.h("button", { type: "button", id: "clear", onclick: () => {
    F.filters = {};
    search.value = "";
    F.$("filters").querySelectorAll("select").forEach((list) => { list.value = ""; });
    F.apply();
  } }, "Clear"));
  F.fill(F.$("filters"), ...bar);
};

F.tile = (name, value, small) => F.h("div", { class: "tile" }, F.h("dt", {}, name), F.h("dd", {}, value, small ? F.h("small", {}, small) : null));

F.tiles = () => {
  const good = F.rows.filter((row) => row.outcome === "ok").length;
  const tiles = [F.tile("Runs", F.number(F.rows.length), `${F.number(good)} ok, ${F.number(F.rows.length - good)} not`)];
  const metric = F.metrics()[0];
  const best = metric && F.best(F.rows, metric[0]);
  if (best) tiles.push(F.tile(`Most ${metric[1]}`, F.number(best[metric[0]], 4), F.runName(best)));
  const mfu = F.best(F.rows, "mfu_pct");
  if (mfu) tiles.push(F.tile("Highest MFU", `${F.number(mfu.mfu_pct)}%`, `${F.runName(mfu)}; by ${F.data.convention}`));
  const score = F.data.scores.find((one) => one.error_pct !== null);
  if (score) tiles.push(F.tile("Median error of predictions", `${F.number(score.error_pct)}%`, `${F.plural(score.runs, "run")}, ${score.basis}`));
  const largest = F.best(F.rows.map((row) => ({ ...row, step_s: -(row.gpus || 0) })), "step_s");
  if (largest && largest.gpus) tiles.push(F.tile("Most GPUs", F.number(largest.gpus), F.distinct(F.rows, "hardware").slice(0, 3).join(", ")));
  F.fill(F.$("tiles"), ...tiles);
};

F.card = (id, { wide, place }) => {
  const card = F.h("section", { class: wide ? "card wide" : "card", id });
  F.$(place || "charts").append(card);
  return card;
};

/** Lists above a chart that choose what it draws. */
F.addSelectors = (chart, state, lists) => {
  for (const [key, name, choices] of lists) {
    if (choices.length < 2) continue;
    const one = F.select(name, choices, state[key], (value) => { state[key] = value; F.redraw([chart]); });
    one.list.dataset.chooses = key;
    chart.controls.append(one);
  }
};

F.buildCharts = () => {
  const onclick = (point) => { if (F.known(point.customdata)) F.choose(point.customdata); };
  const metrics = F.metrics().map(([key, name]) => [key, name]), axes = F.varying(F.AXES, F.rows), first = F.defaultAxes(F.rows);
  const metric = metrics.length ? metrics[0][0] : "step_s";
  const scatter = { x: first.x, y: metric, color: F.distinct(F.rows, "label").length > 1 ? "label" : (axes.find(([field]) => field !== first.x && ["tp", "pp", "layout", "sharding"].includes(field)) || ["label"])[0] };
  const heat = { x: first.heat[0], y: first.heat[1], z: metric }, scaling = { y: metric }, spread = { unit: "%" };
  const withChosen = (list, ...keys) => [...list, ...keys.filter((key) => !list.some(([field]) => field === key)).map((key) => [key, F.nameOf(F.AXES, key)])];
  const make = (id, title, draw, options) => new F.Chart(F.card(id, options), title, draw, options);
  const several = (...fields) => F.rows.filter((row) => fields.every((field) => F.known(row[field]))).length > 1;
  const throughput = make("throughput", "Throughput", () => F.throughput(scatter), { onclick, worth: () => several(metric) });
  F.addSelectors(throughput, scatter, [["y", "Figure", metrics], ["x", "Against", withChosen(axes, scatter.x)], ["color", "Colour", withChosen(axes, scatter.color)]]);
  const map = make("heat", "Heat map", () => F.heat(heat), { onclick, worth: () => several(metric) && F.varying(F.AXES, F.rows).some(([field]) => field === heat.x || field === heat.y) });
  F.addSelectors(map, heat, [["z", "Figure", metrics], ["x", "Across", withChosen(axes, heat.x, heat.y)], ["y", "Down", withChosen(axes, heat.x, heat.y)]]);
  const curves = make("scaling", "Scaling over GPUs", () => F.scaling(scaling), { onclick, size: "high", worth: () => !F.scaling(scaling).empty });
  F.addSelectors(curves, scaling, [["y", "Figure", metrics]]);
  const others = [
    make("predicted", "Predicted against measured", F.predicted, { onclick, worth: () => !F.predicted().empty }),
    make("outcomes", "Outcomes", F.outcomes, { size: "low", wide: true, worth: () => F.rows.some((row) => row.outcome !== "ok") }),
    make("memory", "Memory against the limit", F.memory, { onclick, place: "page-charts", worth: () => F.rows.some((row) => F.known(row.peak_gib)) }),
    make("spread", "Step-time spread", () => F.spread(spread), { onclick, place: "page-charts", worth: () => F.rows.some(F.hasSteps) }),
  ];
  F.addSelectors(others[3], spread, [["unit", "Unit", [["%", "% of the run's median"], ["s", "seconds"]]]]);
  F.allCharts = [throughput, map, curves, ...others];
  F.pageCharts = [others[2], others[3]];
  const inRun = (id, title, draw, options = {}) => {
    const card = F.h("div", { id, class: options.wide ? "wide" : "" });
    F.$("run-charts").append(card);
    return new F.Chart(card, title, draw, options);
  };
  F.runCharts = [inRun("run-memory", "Memory by kind and stage", F.stageMemory), inRun("run-steps", "Steps", F.runSteps), inRun("run-timeline", "Timeline of the pipeline", F.runTimeline, { wide: true })];
};

/** A card that would be empty, or show one value, is left out, and so is the link to it. */
F.leaveOut = () => {
  for (const chart of F.allCharts) chart.card.hidden = !chart.options.worth();
  for (const place of ["charts", "page-charts"]) { // the last of an odd number takes the row
    const halves = F.allCharts.filter((chart) => !chart.card.hidden && !chart.options.wide && chart.card.parentElement.id === place);
    halves.forEach((chart, i) => chart.card.classList.toggle("wide", halves.length % 2 === 1 && i === halves.length - 1));
  }
  const cards = F.allCharts.filter((chart) => !chart.card.hidden).map((chart) => [chart.card.id, chart.title]);
  F.fill(F.$("nav"), ...[...cards, ["runs", "Runs"]].map(([id, name]) => F.h("a", { href: `#${id}` }, name)));
};

F.tables = () => F.data.tables.map((table) => {
  const place = F.h("section", { class: "card" }, F.h("h2", {}, "Scaling table"), F.h("p", { class: "note" }, table.about));
  const grid = new F.Grid(place, { caption: table.about, perPage: 100 });
  const value = (text) => (text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text === "-" ? "" : text);
  grid.show(table.headings.map((heading) => ({ heading })), table.rows.map((cells) => ({ cells, values: cells.map(value) })));
  return place;
});

/** New data of a store that grows: filters and the chosen run stay. */
F.update = (data) => {
  F.data = data;
  F.rows = F.read();
  if (F.chosen) F.chosen = F.rows.find((row) => row.run_id === F.chosen.run_id && row.repeat === F.chosen.repeat) || null;
  F.$("title").textContent = data.title;
  F.filtered = F.rows;
  F.leaveOut();
  F.tiles();
  if (!F.$("filters").contains(document.activeElement)) F.filterBar();
  F.apply();
};

F.start = () => {
  F.$("title").textContent = F.data.title;
  F.$("about").textContent = `TFLOP/s and MFU by the convention '${F.data.convention}'; times are medians of timed steps, memory is of the fullest rank.`;
  F.$("made").textContent = `Made by fourfold ${F.data.version}${F.data.command ? `: ${F.data.command}` : ""}`;
  F.tiles();
  F.filterBar();
  F.grid = new F.Grid(F.$("grid"), {
    caption: `Runs, columns of the ${F.data.style} style`, perPage: 20, onpage: () => { if (F.pageCharts) F.redraw(F.pageCharts); },
    action: (line, text) => {
      const row = F.rows[line.id];
      line.chosen = F.chosen === row;
      return F.h("button", { type: "button", class: "plain", "aria-label": `Choose run ${F.runName(row)}`, onclick: () => F.choose(line.id) }, text || "show");
    },
  });
  F.buildCharts();
  F.showRows();
  F.counted();
  F.fill(F.$("tables"), ...F.tables());
  F.leaveOut();
  F.theme.start();
  const named = /^#run=(.+)$/.exec(location.hash);
  const linked = named && F.rows.find((row) => `${row.run_id}.${row.repeat}` === decodeURIComponent(named[1]));
  if (linked) F.choose(linked.i);
};
F.start();
