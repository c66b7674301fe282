"use strict";
// Charts of all runs that the filters let through.
F.METRICS = [
  ["tokens_s_gpu", "tokens/s per GPU", true], ["tflops_gpu", "TFLOP/s per GPU", true], ["mfu_pct", "MFU %", true],
  ["hfu_pct", "HFU %", true], ["tokens_s", "tokens/s", true], ["step_s", "seconds per step", false], ["peak_gib", "peak GiB", false],
];
F.AXES = [
  ["gpus", "GPUs"], ["tp", "TP"], ["pp", "PP"], ["dp", "DP"], ["cp", "CP"], ["ep", "EP"], ["etp", "ETP"], ["experts", "experts"], ["virtual_stages", "virtual stages"],
  ["micro_batch", "micro batch"], ["global_batch", "global batch"], ["seq_len", "sequence length"], ["nodes", "nodes"],
  ["layout", "layout"], ["label", "model"], ["hardware", "GPU type"], ["precision", "precision"], ["sharding", "sharding"],
  ["recompute", "recompute"], ["schedule", "schedule"], ["cp_kind", "CP kind"], ["attention", "attention"], ["stack", "stack"],
  ["tag", "tag"], ["note", "note"], ["started_at", "time of start"],
];
const PLACES = ["gpus", "nodes", "tp", "pp", "dp", "cp", "ep", "etp", "virtual_stages", "micro_batch", "global_batch", "seq_len"];
const MOST_GROUPS = 9, MOST_LINES = 8, MOST_NAMES = 40;

F.nameOf = (list, key) => (list.find(([field]) => field === key) || [key, key])[1];
F.distinct = (rows, field) => [...new Set(rows.map((row) => row[field]).filter(F.known))];
F.ordered = (values) => values.sort((a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true })));

/** Fields in which these rows differ. */
F.varying = (list, rows) => list.filter(([field]) => F.distinct(rows, field).length > 1);
F.metrics = () => F.METRICS.filter(([field]) => F.rows.some((row) => F.known(row[field])));

F.runName = (row) => [row.label, row.layout, row.micro_batch ? `micro batch ${row.micro_batch}` : ""].filter(Boolean).join(", ");
F.runHover = (row, ...first) => F.hover(
  ...first, F.runName(row), [row.gpus ? F.plural(row.gpus, "GPU") : "", row.hardware, row.precision, row.seq_len ? `${F.number(row.seq_len)} tokens` : ""].filter(Boolean).join(", "),
  row.tag ? `tag ${F.short(row.tag, 60)}` : "", row.note ? `note ${F.short(row.note, 80)}` : "");

/** Rows by the value of a field, the most frequent first; what is beyond the colours is 'other'. */
F.groups = (rows, field) => {
  const found = new Map();
  for (const row of rows) {
    const name = F.known(row[field]) ? String(row[field]) : "unknown";
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(row);
  }
  const sorted = [...found].sort((a, b) => b[1].length - a[1].length || a[0].localeCompare(b[0], "en", { numeric: true }));
  if (sorted.length <= MOST_GROUPS) return F.ordered(sorted.map(([name]) => name)).map((name) => [name, found.get(name)]);
  const rest = sorted.slice(MOST_GROUPS - 1).flatMap(([, members]) => members);
  return [...sorted.slice(0, MOST_GROUPS - 1), [`${sorted.length - MOST_GROUPS + 1} others`, rest]];
};

/** An axis of a field: sizes are places of equal distance, so that 1, 2, 4 ... 512 can be read. */
F.axisOf = (field, rows) => {
  const title = { text: F.nameOf(F.AXES, field) };
  const names = F.ordered(F.distinct(rows, field)).map(String);
  const few = names.length > MOST_NAMES ? { showticklabels: false } : {};
  return { axis: { title, type: "category", categoryorder: "array", categoryarray: names.map(F.label), range: [-0.5, names.length - 0.5], ...F.names(names), ...few }, names, at: (row) => F.label(row[field]) };
};

F.throughput = (state) => {
  const { x, y, color } = state;
  const rows = F.filtered.filter((row) => F.known(row[y]) && F.known(row[x]));
  if (!rows.length) return { empty: F.filtered.length ? `None of these runs has ${F.nameOf(F.METRICS, y)} and ${F.nameOf(F.AXES, x)}.` : "No run passes the filters." };
  const axis = F.axisOf(x, rows);
  const groups = F.groups(rows, color);
  const order = new Map(axis.names.map((name, i) => [name, i]));
  const drawn = groups.map(([name, members], i) => F.points({
    type: "scatter", name: F.label(F.short(PLACES.includes(color) ? `${F.nameOf(F.AXES, color)} ${name}` : name, 40)), x: members.map(axis.at), y: members.map((row) => row[y]),
    customdata: members.map((row) => row.i), hoverinfo: "text",
    hovertext: members.map((row) => F.runHover(row, `${F.number(row[y], 5)} ${F.nameOf(F.METRICS, y)}`)),
  }, { many: rows.length, color: F.colors[i % F.colors.length], places: members.map((row) => [order.get(String(row[x])), row[y]]) }));
  const missing = F.filtered.length - rows.length;
  return {
    traces: drawn.flatMap((one) => one.traces), layout: { shapes: drawn.flatMap((one) => one.shapes), xaxis: axis.axis, yaxis: { title: { text: F.nameOf(F.METRICS, y) } }, showlegend: groups.length > 1 },
    note: missing ? `${F.plural(missing, "run")} without this figure (failed, or not measured) not drawn.` : "",
    label: `${F.nameOf(F.METRICS, y)} by ${F.nameOf(F.AXES, x)}, ${F.plural(rows.length, "run")}; the data table has the values`,
    headings: ["run", F.nameOf(F.AXES, x), F.nameOf(F.AXES, color), F.nameOf(F.METRICS, y)], rows: rows.map((row) => [F.runName(row), row[x], row[color] ?? "", row[y]]),
  };
};

/** Which of several runs of one place stands for it: the best measured one. */
F.best = (rows, metric) => {
  const up = F.METRICS.find(([field]) => field === metric)[2];
  return rows.filter((row) => F.known(row[metric])).reduce((best, row) => (!best || (up ? row[metric] > best[metric] : row[metric] < best[metric]) ? row : best), null);
};

F.heat = (state) => {
  const { x, y, z } = state;
  const rows = F.filtered.filter((row) => F.known(row[x]) && F.known(row[y]));
  if (!rows.length) return { empty: "No run passes the filters and has both sizes." };
  const xs = F.ordered(F.distinct(rows, x)), ys = F.ordered(F.distinct(rows, y));
  const cells = new Map();
  for (const row of rows) {
    const key = JSON.stringify([row[x], row[y]]);
    if (!cells.has(key)) cells.set(key, []);
    cells.get(key).push(row);
  }
  const at = (a, b) => cells.get(JSON.stringify([a, b])) || [];
  const best = ys.map((b) => xs.map((a) => F.best(at(a, b), z)));
  const words = ys.map((b, i) => xs.map((a, j) => (best[i][j] ? F.number(best[i][j][z]) : F.label(F.distinct(at(a, b), "outcome").join(", ")))));
  const hover = ys.map((b, i) => xs.map((a, j) => {
    const all = at(a, b), place = `${F.nameOf(F.AXES, x)} ${F.short(a, 60)}, ${F.nameOf(F.AXES, y)} ${F.short(b, 60)}`;
    if (!all.length) return F.hover(place, "not run");
    return best[i][j] ? F.runHover(best[i][j], `${place}: best of ${F.plural(all.length, "run")}`, `${F.number(best[i][j][z], 5)} ${F.nameOf(F.METRICS, z)}`) : F.hover(place, `${F.plural(all.length, "run")}, none measured`);
  }));
  const dark = document.documentElement.dataset.theme === "dark";
  const scale = dark ? [[0, "#1d2a44"], [0.5, "#2f6f9f"], [1, "#8fd3c7"]] : [[0, "#eef5fb"], [0.5, "#7fb2d8"], [1, "#0b4a86"]];
  const up = F.METRICS.find(([field]) => field === z)[2];
  return {
    traces: [{
      type: "heatmap", x: xs.map((v) => F.label(v)), y: ys.map((v) => F.label(v)), z: best.map((line) => line.map((row) => (row ? row[z] : null))), text: words, texttemplate: xs.length * ys.length <= 150 ? "%{text}" : "",
      hovertext: hover, hoverinfo: "text", colorscale: scale, reversescale: !up, xgap: 2, ygap: 2, customdata: best.map((line) => line.map((row) => (row ? row.i : null))), colorbar: { thickness: 12, outlinewidth: 0, title: { text: F.nameOf(F.METRICS, z), side: "right" } },
    }],
    layout: { xaxis: { title: { text: F.nameOf(F.AXES, x) }, type: "category", showgrid: false, ...F.names(xs) }, yaxis: { title: { text: F.nameOf(F.AXES, y) }, type: "category", showgrid: false, ...F.names(ys, 16) } },
    note: `Each cell is the best of its runs; where none was measured, how they ended.`,
    label: `Heat map of ${F.nameOf(F.METRICS, z)} over ${F.nameOf(F.AXES, x)} and ${F.nameOf(F.AXES, y)}`,
    headings: [F.nameOf(F.AXES, x), F.nameOf(F.AXES, y), "runs", F.nameOf(F.METRICS, z), "best run"],
    rows: ys.flatMap((b, i) => xs.map((a, j) => [a, b, at(a, b).length, best[i][j] ? best[i][j][z] : null, best[i][j] ? F.runName(best[i][j]) : ""])),
  };
};

/** Runs that a curve over GPUs joins: alike but for the number of GPUs and what follows from it. */
F.curveKey = (row) => [row.label, row.hardware, row.precision, `TP ${row.tp ?? 1} CP ${row.cp ?? 1} PP ${row.pp ?? 1}`, `micro batch ${row.micro_batch ?? "?"}`, row.seq_len ? `${row.seq_len} tokens` : "", row.sharding, row.recompute ? `recompute ${row.recompute}` : ""];

F.scaling = (state) => {
  const rows = F.filtered.filter((row) => F.known(row[state.y]) && F.known(row.gpus));
  const curves = new Map();
  for (const row of rows) {
    const key = JSON.stringify(F.curveKey(row));
    if (!curves.has(key)) curves.set(key, new Map());
    const curve = curves.get(key);
    curve.set(row.gpus, F.best([row, curve.get(row.gpus)].filter(Boolean), state.y));
  }
  const whole = [...curves].filter(([, points]) => points.size > 1).map(([key, points]) => [JSON.parse(key), [...points.values()].sort((a, b) => a.gpus - b.gpus)]);
  if (!whole.length) return { empty: rows.length ? "No configuration here was run on two numbers of GPUs." : "No run passes the filters." };
  const differ = whole[0][0].map((_, i) => new Set(whole.map(([key]) => key[i])).size > 1);
  const nameOf = (key) => key.filter((part, i) => part && (differ[i] || i === 3)).join(", ");
  const value = ([, points]) => points[points.length - 1][state.y];
  const up = F.METRICS.find(([field]) => field === state.y)[2];
  whole.sort((a, b) => b[1].length - a[1].length || (up ? value(b) - value(a) : value(a) - value(b)));
  const lines = whole.slice(0, MOST_LINES);
  const counts = F.ordered([...new Set(lines.flatMap(([, points]) => points.map((row) => row.gpus)))]);
  const log = { type: "log", tickvals: counts, ticktext: counts.map((n) => F.number(n)), title: { text: "GPUs" } };
  return {
    traces: lines.map(([key, points], i) => ({
      type: "scatter", mode: "lines+markers", name: F.label(F.short(nameOf(key), 60)), x: points.map((row) => row.gpus), y: points.map((row) => row[state.y]), customdata: points.map((row) => row.i),
      hoverinfo: "text", hovertext: points.map((row) => F.runHover(row, `${F.number(row[state.y], 5)} ${F.nameOf(F.METRICS, state.y)}`)), line: { color: F.colors[i % F.colors.length], width: 2, dash: i < F.colors.length ? "solid" : "dot" }, marker: { size: 7, color: F.colors[i % F.colors.length] },
    })),
    layout: { xaxis: log, yaxis: { title: { text: F.nameOf(F.METRICS, state.y) } }, showlegend: true, legend: { y: 0, yanchor: "bottom" } },
    note: whole.length > lines.length ? `The ${lines.length} longest of ${whole.length} curves.` : "",
    label: `${F.nameOf(F.METRICS, state.y)} over GPUs, ${F.plural(lines.length, "curve")}`,
    headings: ["configuration", "GPUs", F.nameOf(F.METRICS, state.y)], rows: lines.flatMap(([key, points]) => points.map((row) => [nameOf(key), row.gpus, row[state.y]])),
  };
};

F.predicted = () => {
  const rows = F.filtered.filter((row) => F.known(row.predicted_s) && F.known(row.step_s));
  if (!rows.length) return { empty: "No run here was predicted and measured." };
  const all = rows.flatMap((row) => [row.predicted_s, row.step_s]);
  const ends = [0.8 * all.reduce((a, b) => Math.min(a, b)), 1.25 * all.reduce((a, b) => Math.max(a, b))];
  const score = F.data.scores.find((one) => one.error_pct !== null);
  const color = F.theme.css("--muted");
  const traces = [];
  if (score) {
    const off = score.error_pct / 100, wide = (k) => ends.map((v) => v * k);
    traces.push({ type: "scatter", mode: "lines", x: [...ends, ...[...ends].reverse()], y: [...wide(1 + off), ...wide(Math.max(0.001, 1 - off)).reverse()], fill: "toself", fillcolor: "rgba(120,140,160,0.18)", line: { width: 0 }, hoverinfo: "skip", name: `median error ${F.number(score.error_pct)}%` });
  }
  traces.push({ type: "scatter", mode: "lines", x: ends, y: ends, line: { color, dash: "dash", width: 1 }, hoverinfo: "skip", name: "as predicted" });
  const points = F.points({
    type: "scatter", name: "runs, with their 80% intervals", x: rows.map((row) => row.step_s), y: rows.map((row) => row.predicted_s), customdata: rows.map((row) => row.i), hoverinfo: "text",
    hovertext: rows.map((row) => F.runHover(row, `measured ${F.seconds(row.step_s)}, predicted ${F.seconds(row.predicted_s)} (80%: ${F.seconds(row.predicted_low_s)} to ${F.seconds(row.predicted_high_s)})`)),
  }, { many: rows.length, color: F.colors[0], places: rows.map((row) => [row.step_s, row.predicted_s]) });
  traces.push(...points.traces);
  const known = rows.filter((row) => F.known(row.predicted_low_s) && F.known(row.predicted_high_s));
  const intervals = { type: "path", path: known.map((row) => `M${row.step_s},${row.predicted_low_s}L${row.step_s},${row.predicted_high_s}`).join(""), line: { color: F.colors[0], width: 1 }, opacity: 0.5, layer: "above" };
  const log = (text) => ({ type: "log", title: { text }, range: ends.map(Math.log10), ...F.roundTicks(...ends) });
  return {
    traces, layout: { shapes: [...(known.length ? [intervals] : []), ...points.shapes], xaxis: log("measured seconds per step"), yaxis: log("predicted seconds per step"), showlegend: true },
    note: F.data.scores.map((one) => one.text).join(". "), label: `Predicted against measured seconds per step, ${F.plural(rows.length, "run")}`,
    headings: ["run", "measured s", "predicted s", "80% low", "80% high"], rows: rows.map((row) => [F.runName(row), row.step_s, row.predicted_s, row.predicted_low_s, row.predicted_high_s]),
  };
};

F.outcomes = () => {
  if (!F.filtered.length) return { empty: "No run passes the filters." };
  const names = F.data.outcomes.filter((name) => F.filtered.some((row) => row.outcome === name));
  const counts = names.map((name) => F.filtered.filter((row) => row.outcome === name).length);
  const reasons = new Map();
  for (const row of F.filtered) if (row.outcome !== "ok") {
    const key = JSON.stringify([row.outcome, row.failure || "no reason is known"]);
    reasons.set(key, (reasons.get(key) || 0) + 1);
  }
  const rows = [...reasons].sort((a, b) => b[1] - a[1]).map(([key, count]) => [...JSON.parse(key), count]);
  return {
    traces: [{ type: "bar", orientation: "h", y: names, x: counts, text: counts.map(String), textposition: "auto", hoverinfo: "text", hovertext: names.map((name, i) => F.hover(`${name}: ${F.plural(counts[i], "run")}`)), marker: { color: names.map((name) => F.outcomeColors[name] || "#8c8c8c") } }],
    layout: { xaxis: { title: { text: "runs" }, rangemode: "tozero" }, yaxis: { type: "category", autorange: "reversed" } },
    note: rows.length ? `Most frequent failure: ${rows[0][0]}, ${F.short(rows[0][1], 140)} (${F.plural(rows[0][2], "run")}); the data table has all of them.` : "Every run ended well.",
    label: `Outcomes: ${names.map((name, i) => `${name} ${counts[i]}`).join(", ")}`,
    headings: ["outcome", "reason", "runs"], rows: [...(names.includes("ok") ? [["ok", "", counts[names.indexOf("ok")]]] : []), ...rows],
  };
};

F.hasSteps = (row) => Boolean(row.detail && row.step_s && row.detail.steps.some((_, i) => !row.detail.warm[i]));

/** Raw step times of the runs on this page of the table. */
F.spread = (state) => {
  const rows = F.onPage().filter(F.hasSteps);
  if (!rows.length) return { empty: "None of the runs on this page of the table has stored steps." };
  const relative = state.unit === "%";
  const shown = (row, s) => (relative ? 100 * (s / row.step_s - 1) : s);
  const timed = (row) => row.detail.steps.filter((_, i) => !row.detail.warm[i]);
  const names = F.labelsOf(rows);
  return {
    traces: rows.map((row, i) => ({ type: "box", y: timed(row).map((s) => shown(row, s)), name: names[i], boxpoints: rows.length <= 20 ? "all" : "outliers", jitter: 0.4, pointpos: 0, marker: { color: F.colors[0], size: 4 }, line: { width: 1.2, color: F.colors[0] }, fillcolor: "rgba(68,119,170,0.25)", customdata: timed(row).map(() => row.i), hoverinfo: "y", })),
    layout: { xaxis: { type: "category", tickangle: -45, tickfont: { size: 10 } }, yaxis: { title: { text: relative ? "% of the run's median" : "seconds per step" } } },
    note: `Timed steps of ${F.plural(rows.length, "run")} on this page of the table; warm-up left out.`, label: `Spread of step times of ${F.plural(rows.length, "run")}`,
    headings: ["run", "timed step", "seconds", "median of the run"], rows: rows.flatMap((row) => timed(row).map((s, k) => [F.runName(row), k + 1, s, row.step_s])),
  };
};

/** Short names that tell these rows apart. */
F.labelsOf = (rows) => {
  if (rows.every((row) => row.run_id && !row.detail)) return rows.map((row) => F.label(F.short(row.run_id, 34)));
  const parts = rows.map((row) => [row.label, row.layout, `mb${row.micro_batch ?? "?"}`, row.gpus ? `${row.gpus} GPUs` : "", row.precision, row.sharding, row.recompute, row.hardware, row.seq_len ? `${row.seq_len}` : ""]);
  const differ = parts[0].map((_, i) => new Set(parts.map((one) => one[i])).size > 1);
  const names = parts.map((one) => F.short(one.filter((part, i) => part && (differ[i] || i === 1)).join(" "), 34));
  const seen = new Map();
  return names.map((name) => {
    seen.set(name, (seen.get(name) || 0) + 1);
    return F.label(seen.get(name) > 1 ? `${name} #${seen.get(name)}` : name);
  });
};

F.memory = () => {
  const rows = F.onPage().filter((row) => F.known(row.peak_gib) || F.known(row.predicted_bytes));
  if (!rows.length) return { empty: "None of the runs on this page of the table has its memory measured." };
  const names = F.labelsOf(rows), limit = (row) => F.gib((row.detail && row.detail.limit_bytes) || row.predicted_limit_bytes);
  const bar = (name, values, color) => ({ type: "bar", name, x: names, y: values, customdata: rows.map((row) => row.i), marker: { color }, hoverinfo: "text", hovertext: rows.map((row, i) => (F.known(values[i]) ? F.runHover(row, `${name}: ${F.number(values[i], 4)} GiB`, row.outcome === "ok" ? "" : row.outcome) : "")) });
  const limits = rows.map(limit);
  const traces = [bar("measured peak", rows.map((row) => row.peak_gib ?? null), F.colors[0]), bar("predicted peak", rows.map((row) => F.gib(row.predicted_bytes)), F.colors[3])];
  if (limits.some(F.known)) traces.push({ type: "scatter", mode: "markers", name: "limit", x: names, y: limits, marker: { symbol: "line-ew", size: 22, line: { width: 3, color: F.outcomeColors.crashed } }, hoverinfo: "text", hovertext: limits.map((v) => F.hover(`limit ${F.number(v, 4)} GiB`)) });
  return {
    traces, layout: { barmode: "group", xaxis: { type: "category", tickangle: -45, tickfont: { size: 10 } }, yaxis: { title: { text: "GiB on the fullest rank" }, rangemode: "tozero" }, showlegend: true },
    note: `The ${F.plural(rows.length, "run")} on this page of the table. Choose a run to see its memory by kind and stage.`, label: `Memory of ${F.plural(rows.length, "run")} against the limit`,
    headings: ["run", "measured GiB", "predicted GiB", "limit GiB", "outcome"], rows: rows.map((row, i) => [F.runName(row), row.peak_gib ?? null, F.gib(row.predicted_bytes), limits[i], row.outcome]),
  };
};

F.defaultAxes = (rows) => {
  const varying = PLACES.filter((field) => F.distinct(rows, field).length > 1);
  // tp across and pp down where they vary; never one field both ways.
  const across = varying.includes("tp") || varying.length < 2 ? "tp" : varying.find((field) => field !== "pp");
  const down = varying.includes("pp") || varying.length < 2 ? "pp" : varying.find((field) => field !== across);
  return { x: varying[0] || "gpus", heat: [across, down] };
};
