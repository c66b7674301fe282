"use strict";
// Ranked layouts: a layout is a bar with an error bar, not a number.
F.PARTS = {
  compute: "compute", recompute: "recompute", tp: "TP communication", cp: "CP communication", ep: "tokens to experts and back", pp: "pipeline bubble and sends", dp: "DP communication", host: "host", other: "optimizer and other",
};

F.planName = (row) => `#${row.rank} ${row.name}`;
F.planHover = (row, ...first) => F.hover(...first, `${row.name}, micro batch ${row.micro_batch}, ${row.policy.sharding}, recompute ${row.policy.recompute}`);

/** An asymmetric error bar at the end of a stacked bar. */
F.interval = (rows, value, low, high, name, hover) => ({
  type: "scatter", mode: "markers", name, y: rows.map((row) => F.label(F.planName(row))), x: rows.map(value), marker: { color: F.theme.css("--text"), size: 6 }, hoverinfo: "text", hovertext: rows.map(hover),
  error_x: { type: "data", symmetric: false, array: rows.map((row) => high(row) - value(row)), arrayminus: rows.map((row) => value(row) - low(row)), color: F.theme.css("--text"), thickness: 1.6, width: 5 },
});

F.stacked = (rows, names, colors, parts, unit) => Object.keys(names).filter((key) => rows.some((row) => parts(row)[key] > 0)).map((key) => ({
  type: "bar", orientation: "h", name: names[key], y: rows.map((row) => F.label(F.planName(row))), x: rows.map((row) => parts(row)[key] || 0), marker: { color: colors[key] }, hoverinfo: "text", hovertext: rows.map((row) => F.planHover(row, `${names[key]}: ${unit(parts(row)[key] || 0)}`)),
}));

const ranks = (rows) => ({ type: "category", autorange: "reversed", categoryorder: "array", categoryarray: rows.map((row) => F.label(F.planName(row))), tickfont: { size: 11 } });

F.stepChart = (plan) => {
  const rows = plan.rows;
  if (!rows.length) return { empty: plan.sentence };
  const best = Math.min(...rows.map((row) => row.step_s));
  const shapes = rows.length > 1 ? [{ type: "rect", x0: best, x1: 1.02 * best, y0: 0, y1: 1, yref: "paper", fillcolor: "rgba(120,140,160,0.22)", line: { width: 0 }, layer: "below" }] : [];
  const hover = (row) => F.planHover(row, `${F.seconds(row.step_s)} per step, 80%: ${F.seconds(row.step_s_low)} to ${F.seconds(row.step_s_high)}`, `${F.number(row.tflops_gpu)} TFLOP/s, ${F.number(row.mfu_pct)}% MFU per GPU`);
  return {
    traces: [...F.stacked(rows, F.PARTS, F.partColors, (row) => row.exposed_s, F.seconds), F.interval(rows, (row) => row.step_s, (row) => row.step_s_low, (row) => row.step_s_high, "step, with its 80% interval", hover)],
    layout: { barmode: "stack", shapes, xaxis: { title: { text: "seconds per step" }, rangemode: "tozero" }, yaxis: ranks(rows), showlegend: true },
    note: rows.length > 1 ? "The grey band is within 2% of the fastest; a faster one below #1 may not fit." : "",
    label: `Seconds per step of ${rows.length} layouts, with parts and intervals`,
    headings: ["layout", "seconds per step", "80% low", "80% high", ...Object.values(F.PARTS)], rows: rows.map((row) => [F.planName(row), row.step_s, row.step_s_low, row.step_s_high, ...Object.keys(F.PARTS).map((key) => row.exposed_s[key] ?? 0)]),
  };
};

F.planMemory = (plan) => {
  const rows = plan.rows, limit = F.gib(plan.memory_bytes);
  if (!rows.length) return { empty: "Nothing fits." };
  const gib = (row) => Object.fromEntries(Object.entries(row.memory_bytes).map(([kind, bytes]) => [kind, F.gib(bytes)]));
  const hover = (row) => F.planHover(row, `${F.size(row.peak_bytes)} on the fullest rank, 80%: ${F.size(row.peak_bytes_low)} to ${F.size(row.peak_bytes_high)}`, `${F.number(Math.round(100 * row.fit_chance))}% chance to fit`);
  return {
    traces: [...F.stacked(rows, F.KINDS, F.partColors, gib, (value) => `${F.number(value)} GiB`), F.interval(rows, (row) => F.gib(row.peak_bytes), (row) => F.gib(row.peak_bytes_low), (row) => F.gib(row.peak_bytes_high), "peak, with its 80% interval", hover)],
    layout: { barmode: "stack", shapes: [{ type: "line", x0: limit, x1: limit, y0: 0, y1: 1, yref: "paper", line: { color: F.outcomeColors.crashed, width: 2, dash: "dash" } }], xaxis: { title: { text: "GiB on the fullest rank" }, rangemode: "tozero" }, yaxis: ranks(rows), showlegend: true },
    note: `The dashed line is the GPU's memory, ${F.size(plan.memory_bytes)}; an interval that crosses it may not fit.`, label: `Memory of ${rows.length} layouts by kind against ${F.size(plan.memory_bytes)}`,
    headings: ["layout", "GiB", "80% low", "80% high", ...Object.values(F.KINDS)], rows: rows.map((row) => [F.planName(row), F.gib(row.peak_bytes), F.gib(row.peak_bytes_low), F.gib(row.peak_bytes_high), ...Object.keys(F.KINDS).map((kind) => gib(row)[kind] ?? 0)]),
  };
};

F.planTiles = (plan) => {
  const best = plan.rows[0];
  if (!best) return [];
  const tile = (name, value, small) => F.h("div", { class: "tile" }, F.h("dt", {}, name), F.h("dd", {}, value, small ? F.h("small", {}, small) : null));
  const found = [
    tile("Layout", best.name, `micro batch ${best.micro_batch}, ${best.policy.sharding}, recompute ${best.policy.recompute}`), tile("Step", F.seconds(best.step_s), `80%: ${F.seconds(best.step_s_low)} to ${F.seconds(best.step_s_high)}`),
    tile("Per GPU", `${F.number(best.tflops_gpu)} TFLOP/s`, `${F.number(best.mfu_pct)}% MFU, ${F.number(best.tokens_s_gpu, 4)} tokens/s`), tile("Memory", F.size(best.peak_bytes), `of ${F.size(plan.memory_bytes)}; ${F.number(Math.round(100 * best.fit_chance))}% chance to fit`),
  ];
  const of = best.training_s ? "training_s" : "step_s", ends = [best[`${of}_low`] / best[of], best[`${of}_high`] / best[of]];
  if (best.training_s) found.push(tile("Training", `${F.number(best.training_s / 86400)} days`, `80%: ${F.number(best.training_s_low / 86400)} to ${F.number(best.training_s_high / 86400)}; ${F.number(Math.round(best.gpu_hours))} GPU-hours`));
  if (best.cost !== null) found.push(tile("Cost, in the price's currency", F.number(Math.round(best.cost)), `80%: ${F.number(Math.round(best.cost * ends[0]))} to ${F.number(Math.round(best.cost * ends[1]))}`));
  return found;
};

F.planGrid = (grid, plan) => {
  const value = (text) => (text !== "" && !Number.isNaN(Number(text.replace(/,/g, ""))) ? Number(text.replace(/,/g, "")) : text === "-" ? "" : text);
  grid.show(plan.headings.map((heading) => ({ heading })), plan.cells.map((cells) => ({ cells, values: cells.map(value) })));
};

F.planFlips = (plan) => {
  F.$("order").hidden = !plan.flips.length;
  return F.h("ul", { class: "remarks" }, ...plan.flips.map((flip) => F.h("li", {}, `With ${flip.about} (${flip.knob}) at ${F.number(flip.other)} instead of ${F.number(flip.value)}, #${flip.winner} (${flip.layout}) leads by ${F.number(100 * (flip.gain - 1), 2)}%.`)));
};

/** What is said besides; and, of a model with experts, capacities where they were asked for. */
F.planRemarks = (plan) => {
  F.fill(F.$("remarks"), F.h("ul", { class: "remarks" }, ...plan.remarks.map((text) => F.h("li", {}, text))));
  F.$("capacities").hidden = !plan.capacities.length;
  F.capacities = F.capacities || new F.Grid(F.$("capacity-grid"), { caption: "Capacities of experts", perPage: 20 });
  for (const [headings, ...cells] of plan.capacities) F.planGrid(F.capacities, { headings, cells });
};

/** The best of each engine side by side; why not, where it cannot. */
F.engineGrid = (grid, plan) => {
  const has = (field) => plan.engines.some((one) => one.choice && F.known(one.choice[field]));
  const columns = [
    ["Engine", (one) => one.engine], ["Layout", (one, row) => row.name], ["Micro", (one, row) => row.micro_batch], ["Sharding", (one, row) => row.sharding], ["Recompute", (one, row) => row.recompute],
    ["s/step", (one, row) => F.number(row.step_s)], ["80%", (one, row) => `${F.number(row.step_s_low)} to ${F.number(row.step_s_high)}`], ["GiB", (one, row) => F.number(F.gib(row.peak_bytes))], ["Fits", (one, row) => `${Math.round(100 * row.fit_chance)}%`], ["TFLOP/s", (one, row) => F.number(row.tflops_gpu)],
    ...(has("training_s") ? [["Days", (one, row) => F.number(row.training_s / 86400)]] : []), ...(has("cost") ? [["Cost", (one, row) => F.number(Math.round(row.cost))]] : []),
  ];
  const able = plan.engines.filter((one) => one.choice).sort((a, b) => a.choice.step_s - b.choice.step_s);
  const cells = (one) => columns.map(([, value]) => String(value(one, one.choice)));
  const value = (text) => (text !== "" && !Number.isNaN(Number(text.replace(/,/g, ""))) ? Number(text.replace(/,/g, "")) : text);
  grid.show(columns.map(([heading]) => ({ heading })), able.map((one) => ({ cells: cells(one), values: cells(one).map(value) })));
};

F.planSizes = (plan) => {
  const points = [...plan.sizes].sort((a, b) => a.gpus - b.gpus), counts = points.map((one) => one.gpus);
  const days = points.some((one) => one.training_s), most = points.at(-1);
  const text = (one) => F.hover(`${F.number(one.gpus)} GPUs: ${F.seconds(one.step_s)} per step, 80%: ${F.seconds(one.step_s_low)} to ${F.seconds(one.step_s_high)}`, `${one.name}, micro batch ${one.micro_batch}`, one.training_s ? `${F.number(one.training_s / 86400)} days, ${F.number(Math.round(one.gpu_hours))} GPU-hours` : "");
  return {
    traces: [
      { type: "scatter", mode: "lines", name: "as fast per GPU as the most", x: counts, y: counts.map((n) => most.step_s * most.gpus / n), line: { color: F.theme.css("--muted"), dash: "dash", width: 1 }, hoverinfo: "skip" },
      { type: "scatter", mode: "lines+markers", name: "best layout, with its 80% interval", x: counts, y: points.map((one) => one.step_s), error_y: { type: "data", symmetric: false, array: points.map((one) => one.step_s_high - one.step_s), arrayminus: points.map((one) => one.step_s - one.step_s_low) }, line: { color: F.colors[0], width: 2 }, marker: { size: 8 }, hoverinfo: "text", hovertext: points.map(text) },
    ],
    layout: { xaxis: { type: "log", title: { text: "GPUs" }, tickvals: counts, ticktext: counts.map((n) => F.number(n)) }, yaxis: { type: "log", title: { text: "seconds per step" }, ...F.roundTicks(0.8 * Math.min(...points.map((one) => one.step_s_low)), 1.25 * Math.max(...points.map((one) => one.step_s_high))) }, showlegend: true },
    note: days ? `${points.map((one) => `${F.number(one.gpus)}: ${F.number(one.training_s / 86400)} days`).join("; ")}.` : "", label: `Seconds per step on ${counts.map((n) => F.number(n)).join(", ")} GPUs`,
    headings: ["GPUs", "layout", "seconds per step", "80% low", "80% high", "days", "GPU-hours", "cost"], rows: points.map((one) => [one.gpus, one.name, one.step_s, one.step_s_low, one.step_s_high, one.training_s === null ? null : one.training_s / 86400, one.gpu_hours, one.cost]),
  };
};

/** Without stages there is no pipeline to draw: what a step's seconds go to, one after the other. */
F.oneStep = (row) => {
  const parts = Object.keys(F.PARTS).filter((key) => row.exposed_s[key] > 0.001 * row.step_s);
  return {
    traces: parts.map((key) => ({ type: "bar", orientation: "h", name: F.PARTS[key], y: ["#1"], x: [row.exposed_s[key]], marker: { color: F.partColors[key] }, hoverinfo: "text", hovertext: [F.hover(`${F.PARTS[key]}: ${F.seconds(row.exposed_s[key])}, ${F.number(100 * row.exposed_s[key] / row.step_s)}% of the step`)] })),
    layout: { barmode: "stack", xaxis: { title: { text: "seconds" }, rangemode: "tozero" }, yaxis: { type: "category" }, showlegend: true }, note: `${F.seconds(row.step_s)}: ${parts.map((key) => `${F.PARTS[key]} ${F.number(100 * row.exposed_s[key] / row.step_s, 2)}%`).join(", ")}.`,
    label: "Parts of a step of the first layout", headings: ["part", "seconds"], rows: parts.map((key) => [F.PARTS[key], row.exposed_s[key]]),
  };
};
