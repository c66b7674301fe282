"use strict";
// What each pipeline rank does when.
const ACTIONS = { F: "forward", B: "backward", I: "backward to input", W: "weight gradients" };
const ACTION_COLORS = { F: "#4477aa", B: "#ee6677", I: "#ee6677", W: "#228833" };

/** A pipeline's boxes, of a run or of a plan. */
F.timeline = (line, why) => {
  if (!line) return { empty: why };
  const scale = line.step_s / 1e6 * (line.step_s < 1 ? 1000 : 1), unit = line.step_s < 1 ? "ms" : "s";
  const kinds = Object.keys(ACTIONS).filter((kind) => line.events.some((event) => event[1] === kind));
  const many = line.events.length > 400;
  const traces = kinds.map((kind) => {
    const events = line.events.filter((event) => event[1] === kind);
    return {
      type: "bar", orientation: "h", name: ACTIONS[kind], y: events.map(([rank]) => `rank ${rank}`), base: events.map((event) => event[4] * scale), x: events.map((event) => (event[5] - event[4]) * scale),
      text: many ? undefined : events.map((event) => String(event[3])), textposition: "inside", insidetextanchor: "middle", textangle: 0, constraintext: "both",
      marker: { color: events.map(([, , chunk]) => ACTION_COLORS[kind]), opacity: events.map(([, , chunk]) => 1 - 0.55 * Math.floor(chunk / line.stages) / line.virtual_stages), line: { width: 0.5, color: F.theme.css("--panel") } }, hoverinfo: "text",
      hovertext: events.map(([rank, , chunk, micro, start, end]) => F.hover(`rank ${rank}: ${ACTIONS[kind]} of micro batch ${micro}, chunk ${chunk}`, `${F.number(start * scale, 4)} to ${F.number(end * scale, 4)} ${unit}`)),
    };
  });
  return {
    traces, layout: { barmode: "overlay", bargap: 0.12, xaxis: { title: { text: unit }, range: [0, line.step_s * (line.step_s < 1 ? 1000 : 1)] }, yaxis: { type: "category", autorange: "reversed", categoryorder: "array", categoryarray: [...Array(line.stages).keys()].map((rank) => `rank ${rank}`) }, showlegend: true },
    note: `${line.schedule}, ${F.plural(line.micros, "micro batch")}${line.virtual_stages > 1 ? `, ${line.virtual_stages} virtual stages a rank` : ""}: ${F.seconds(line.step_s)} of forward and backward as predicted, ${F.number(100 * line.bubble)}% bubble.`.replace("micro batchs", "micro batches"),
    label: `Timeline of the pipeline: ${F.plural(line.stages, "rank")}, bubble ${F.number(100 * line.bubble)}%`,
    headings: ["rank", "action", "chunk", "micro batch", `start ${unit}`, `end ${unit}`], rows: line.events.map(([rank, kind, chunk, micro, start, end]) => [rank, ACTIONS[kind], chunk, micro, start * scale, end * scale]),
  };
};
