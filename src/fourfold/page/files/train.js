"use strict";
// A training's curves, followed while it goes on.
const of = (name) => F.data.points.map((point) => point[F.data.names.indexOf(name)]);
const curve = (name, title) => () => {
  if (!F.data.points.length) return { empty: "No step is done yet." };
  const steps = of("step"), values = of(name);
  return {
    traces: [{ type: "scatter", mode: steps.length > 1 ? "lines" : "markers", x: steps, y: values, line: { color: F.colors[0], width: 2 }, hoverinfo: "text", hovertext: steps.map((step, i) => F.hover(`step ${step}: ${title} ${F.number(values[i], 5)}`)) }],
    layout: { xaxis: { title: { text: "step" } }, yaxis: { title: { text: title } } }, label: `${title} over ${F.plural(steps.length, "step")}`,
    headings: ["step", title], rows: steps.map((step, i) => [step, values[i]]),
  };
};
for (const [name, title, wide] of [["loss", "loss", true], ["tokens_per_s", "tokens/s", false], ["grad_norm", "gradient norm", false]]) {
  const card = F.h("section", { class: wide ? "card wide" : "card", id: name });
  F.$("charts").append(card);
  new F.Chart(card, title[0].toUpperCase() + title.slice(1), curve(name, title), {});
}
const words = () => {
  const last = F.data.points.length ? `step ${F.number(of("step").at(-1))}, loss ${F.number(of("loss").at(-1), 5)}` : "no step is done yet";
  F.$("about").textContent = last;
};
F.$("title").textContent = F.data.title;
F.$("made").textContent = `fourfold ${F.data.version}`;
const follow = async () => {
  try {
    const fresh = await (await fetch("/train/data")).json();
    if (fresh.points.length !== F.data.points.length || JSON.stringify(fresh.points.at(-1)) !== JSON.stringify(F.data.points.at(-1))) {
      F.data = fresh;
      words();
      F.redraw();
    }
  } catch {
    F.$("about").textContent = "The server does not answer; this is the last it said.";
  }
  setTimeout(follow, 2000);
};
words();
F.theme.start();
follow();
