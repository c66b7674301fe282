"use strict";
// The chosen run: what it was, how to run it again, and where its time and memory went.
F.chosen = null;

F.choose = (i, scroll = true) => {
  const row = F.rows[i];
  F.chosen = row;
  F.$("run").hidden = false;
  F.fill(F.$("run-title"), `${F.runName(row) || row.run_id} `, F.h("span", { class: `pill ${row.outcome === "ok" ? "ok" : "bad"}` }, row.outcome));
  F.$("run-about").textContent = F.runWords(row);
  F.fill(F.$("run-texts"), ...F.runTexts(row));
  F.grid.page();
  for (const chart of F.runCharts) chart.card.hidden = Boolean(chart.draw().empty);
  F.redraw(F.runCharts);
  history.replaceState(null, "", `#run=${encodeURIComponent(`${row.run_id}.${row.repeat}`)}`);
  if (scroll) {
    F.$("run").scrollIntoView({ block: "start" });
    F.$("run-title").focus({ preventScroll: true });
  }
  F.say(`Run ${F.runName(row)} chosen`);
};

F.runWords = (row) => {
  const said = [
    row.run_id ? `run ${row.run_id}${row.repeat ? ` #${row.repeat}` : ""}` : "", row.gpus ? F.plural(row.gpus, "GPU") : "", row.hardware,
    row.global_batch ? `${F.number(row.global_batch)} sequences of ${F.number(row.seq_len)} tokens` : "", row.precision, row.sharding, row.recompute ? `recompute ${row.recompute}` : "",
    F.known(row.step_s) ? `${F.seconds(row.step_s)} per step${F.known(row.low_s) ? ` (95%: ${F.seconds(row.low_s)} to ${F.seconds(row.high_s)})` : ""}` : "",
    F.known(row.tokens_s_gpu) ? `${F.number(row.tokens_s_gpu, 4)} tokens/s per GPU` : "", F.known(row.mfu_pct) ? `${F.number(row.mfu_pct)}% MFU` : "",
    F.known(row.loss) ? `loss ${F.number(row.loss, 4)}` : "", row.tag ? `tag ${row.tag}` : "", row.note ? `note: ${row.note}` : "", row.started_at,
  ];
  return said.filter(Boolean).join("; ");
};

F.runTexts = (row) => {
  const one = row.detail;
  const shown = [];
  if (!one && row.failure) shown.push(F.h("h3", {}, "Why it ended"), F.h("pre", { tabindex: "0", role: "region", "aria-label": "Failure" }, row.failure));
  if (!one) return [...shown, F.h("p", { class: "note" }, "This row is from a table of results: there is no stored run behind it.")];
  if (one.failure) shown.push(F.h("h3", {}, "Why it ended"), F.h("pre", { tabindex: "0", role: "region", "aria-label": "Failure" }, one.failure));
  if (one.fixes.length) shown.push(F.h("h3", {}, "What would fit"), F.h("ul", { class: "remarks" }, ...one.fixes.filter((fix) => fix.fits).map((fix) => F.h("li", {}, `${fix.change}: ${F.size(fix.peak_bytes)}, ${F.number(fix.slower_pct)}% slower`))));
  if (one.flags.length) shown.push(F.h("h3", {}, "Doubts about this measurement"), F.h("ul", { class: "remarks" }, ...one.flags.map((flag) => F.h("li", {}, flag))));
  shown.push(F.copyable("Command that runs it again", one.command));
  const environment = F.data.environments[one.environment] || {};
  const lines = Object.entries(environment).map(([name, value]) => `${name}=${value}`);
  shown.push(F.copyable("Environment", [...lines, `folder=${one.folder}`].join("\n")));
  return shown;
};

F.stageMemory = () => {
  const one = F.chosen && F.chosen.detail;
  if (!one || !(one.stages.length || one.memory.length)) return { empty: "The memory of this run is not known by kind." };
  const kinds = Object.keys(F.KINDS).filter((kind) => one.stages.some(([, bytes]) => bytes[kind] > 0));
  const short = (stage) => `${stage.replace(/^(fullest of )?stages? /, "").replace(" to ", "-")} predicted`;
  const places = [...one.stages.map(([stage]) => short(stage)), ...one.memory.map(([stage]) => `${stage} measured`)];
  const traces = kinds.map((kind) => ({ type: "bar", orientation: "h", name: F.KINDS[kind], y: one.stages.map(([stage]) => F.label(short(stage))), x: one.stages.map(([, bytes]) => F.gib(bytes[kind])), marker: { color: F.partColors[kind] }, hoverinfo: "text", hovertext: one.stages.map(([stage, bytes]) => F.hover(`${stage}: ${F.KINDS[kind]} ${F.size(bytes[kind])}`)) }));
  const peaks = one.memory;
  if (peaks.length) traces.push({ type: "bar", orientation: "h", name: "measured peak", y: peaks.map(([stage]) => `${stage} measured`), x: peaks.map(([, peak]) => F.gib(peak)), marker: { color: F.theme.css("--muted") }, hoverinfo: "text", hovertext: peaks.map(([stage, peak]) => F.hover(`stage ${stage}: measured peak ${F.size(peak)}`)) });
  const limit = F.gib(one.limit_bytes);
  const shapes = limit ? [{ type: "line", x0: limit, x1: limit, y0: 0, y1: 1, yref: "paper", line: { color: F.outcomeColors.crashed, width: 2, dash: "dash" } }] : [];
  const most = Math.max(limit || 0, ...one.stages.map(([, bytes]) => F.gib(Object.values(bytes).reduce((a, b) => a + b, 0))), ...peaks.map(([, peak]) => F.gib(peak)));
  return {
    traces, layout: { barmode: "stack", shapes, xaxis: { title: { text: "GiB" }, range: [0, 1.05 * most] }, yaxis: { type: "category", title: { text: "stage" }, categoryorder: "array", categoryarray: places.map(F.label), autorange: "reversed" }, showlegend: true },
    note: limit ? `The dashed line is the limit, ${F.size(one.limit_bytes)}.` : "No limit is known for this run.", label: "Memory of the chosen run by kind and stage against the limit",
    headings: ["stage", "kind", "GiB"], rows: [...one.stages.flatMap(([stage, bytes]) => kinds.map((kind) => [stage, `${F.KINDS[kind]}, predicted`, F.gib(bytes[kind])])), ...peaks.map(([stage, peak]) => [`stage ${stage}`, "measured peak", F.gib(peak)])],
  };
};

F.runTimeline = () => {
  const one = F.chosen && F.chosen.detail;
  if (!one) return { empty: "No stored run is behind this row." };
  return F.timeline(one.timeline, `No timeline: ${one.no_timeline}.`);
};

F.runSteps = () => {
  const one = F.chosen && F.chosen.detail;
  if (!one || !one.steps.length) return { empty: "No step of this run was finished." };
  const count = one.steps.map((_, i) => i + 1), warm = count.filter((_, i) => one.warm[i]), timed = count.filter((_, i) => !one.warm[i]);
  const part = (name, places, color) => ({ type: "scatter", mode: "markers", name, x: places, y: places.map((i) => one.steps[i - 1]), marker: { color, size: 8 }, hoverinfo: "text", hovertext: places.map((i) => F.hover(`step ${i} (${name}): ${F.seconds(one.steps[i - 1])}`)) });
  const traces = [part("warm-up", warm, F.theme.css("--muted")), part("timed", timed, F.colors[0])];
  const losses = one.losses.some(F.known);
  if (losses) traces.push({ type: "scatter", mode: "lines", name: "loss", yaxis: "y2", x: count, y: one.losses, line: { color: F.colors[1], width: 2 }, hoverinfo: "text", hovertext: one.losses.map((loss, i) => F.hover(`step ${i + 1}: loss ${F.number(loss, 5)}`)) });
  return {
    traces, layout: { xaxis: { title: { text: "step" }, dtick: count.length <= 20 ? 1 : undefined }, yaxis: { title: { text: "seconds per step" }, rangemode: "tozero" }, yaxis2: { title: { text: "loss" }, overlaying: "y", side: "right", tickmode: "auto", showgrid: false, automargin: true }, showlegend: true, margin: { r: losses ? 50 : 14 } },
    label: `Step times of the chosen run, ${F.plural(count.length, "step")}`, headings: ["step", "kind", "seconds", "loss"], rows: count.map((i) => [i, one.warm[i - 1] ? "warm-up" : "timed", one.steps[i - 1], one.losses[i - 1]]),
  };
};
